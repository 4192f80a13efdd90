"""Answers to clients, and the ends of requests: by refusal, by abort, or because a client cannot be answered."""

from array import array
from collections.abc import Callable

from common.codec import FrameError, Message
from common.messages import Abort, ErrorCode, Finish, TextBatch
from tokenizer_proc.clients import Clients, Delivery
from tokenizer_proc.ledger import Choice, Entry, Ledger, Owner
from tokenizer_proc.limits import RETRY_AFTER_S, Refused
from tokenizer_proc.measures import Measures
from tokenizer_proc.rows import Rows
from tokenizer_proc.stories import cause

Send = Callable[[Message], None]


class Answers:
    """The way to the clients. A request that ends here is forgotten in the ledger and aborted in the scheduler."""

    def __init__(
        self, ledger: Ledger, clients: Clients, measures: Measures, send_scheduler: Send, clock: Callable[[], int]
    ):
        self._ledger = ledger
        self._clients = clients
        self._measures = measures
        self._send_scheduler = send_scheduler
        self._clock = clock

    def send(self, owner: Owner, msg: Message) -> None:
        """Send or keep an answer. A client that is gone, or has left too much unread, loses its requests. Raises
        FrameError when the message is too large for any frame."""
        match self._clients.send(owner, msg):
            case Delivery.GONE:
                self.drop_client(owner)
            case Delivery.OVERFLOW:
                self._cut_off(owner)
            case Delivery.DONE:
                pass

    def send_rows(self, owner: Owner, batch: TextBatch) -> None:
        """Send rows; where they are too large for a frame, end their requests with an error."""
        try:
            self.send(owner, batch)
        except FrameError as error:
            refusal = Refused(ErrorCode.INTERNAL, f"the answer cannot be sent: {error}")
            for rid in dict.fromkeys(batch.rids):  # a request can have several rows
                entry = self._ledger.find(owner, rid)
                if entry is not None:
                    self._ledger.close(entry, cause(refusal))
                    self.abort_running(entry)
                    self._measures.refused(refusal.code)
                self.send(owner, refusal.answer(rid))

    def refuse(self, entry: Entry, refusal: Refused, ended: Choice | None = None) -> None:
        """End a request with an error, unless it has ended. The scheduler itself has ended the choice `ended`."""
        if self._ledger.holds(entry):
            self._ledger.close(entry, cause(refusal))
            self.abort_running(entry, ended)
            self._measures.refused(refusal.code)
            self.send(entry.owner, refusal.answer(entry.client_rid))

    def end_aborted(self, entry: Entry) -> None:
        """End a request with a terminal row for each live choice, in place of a scheduler that does not have it."""
        now = self._clock()
        for choice in entry.choices:
            choice.finish = Finish.ABORT
            self._measures.ended(choice, Finish.ABORT, now)
        self._measures.over(entry)
        self._ledger.close(entry)
        self.abort_running(entry)
        rows = Rows()
        for choice in entry.choices:
            if entry.stream:
                choice.sent = len(choice.emitted)
            tokens, text, scores, token_bytes = choice.release()
            prompt_tokens = len(entry.prompt or ())
            rows.add(entry.client_rid, choice.index, tokens, text, Finish.ABORT, prompt_tokens, choice.cached)
            rows.add_scores(scores, token_bytes.__getitem__)
            rows.add_timing(entry.arrival, choice.started_ns, choice.first_ns)
        self.send(entry.owner, rows.batch(array("q", [now])))

    def abort_running(self, entry: Entry, ended: Choice | None = None) -> None:
        """Tell the scheduler to end the choices that it has."""
        for choice in entry.choices if entry.admitted else ():
            if choice is not ended:
                self._send_scheduler(Abort(choice.rid))

    def drop_client(self, owner: Owner) -> None:
        """A client is gone."""
        self._clients.forget(owner)
        now = self._clock()
        for entry in self._ledger.close_all_of(owner, ("client_closed", "the client closed the connection")):
            for choice in entry.choices:
                self._measures.ended(choice, Finish.ABORT, now)
            self._measures.over(entry)
            self.abort_running(entry)

    def _cut_off(self, owner: Owner) -> None:
        """A client that does not read: its requests end, and it will find an error for each when it reads again."""
        for entry in self._ledger.close_all_of(owner, cause(unread())):
            self.abort_running(entry)
            self._measures.refused(unread().code)
            self._clients.send(owner, unread().answer(entry.client_rid))


def expired(entry: Entry) -> Refused:
    problem = f"not finished {entry.deadline_ms} ms after it arrived, which was its deadline"
    return Refused(ErrorCode.DEADLINE, problem, "deadline_ms", entry.deadline_ms)


def stopping() -> Refused:
    return Refused(ErrorCode.SHUTTING_DOWN, "the cluster is stopping")


def unread() -> Refused:
    return Refused(ErrorCode.OVERLOADED, "this client does not read its answers", "", 0, RETRY_AFTER_S)
