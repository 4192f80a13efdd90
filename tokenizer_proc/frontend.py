"""What the tokenizer process does with each message: from clients, from the detokenizer, and as time passes.

Sockets are outside: answers leave through `Clients`, the rest through `send_scheduler` and `send_detokenizer`, which
never wait. All methods run in the event loop's thread; only `PromptEncoder.encode` runs in a pool.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace
from typing import TypeVar

from common.codec import FrameError, Message, RefusedFrames, decode
from common.fields import IntArray
from common.messages import (
    Abort,
    Beat,
    Detokenize,
    ErrorCode,
    Finish,
    Generate,
    GetInfo,
    GetStats,
    Info,
    RequestError,
    Stats,
    TextBatch,
    Tokenize,
)
from common.stamps import Lost
from tokenizer_proc.answers import Answers, expired, stopping, unread
from tokenizer_proc.beams import Beams
from tokenizer_proc.clients import Clients
from tokenizer_proc.grammar_check import GrammarCheck
from tokenizer_proc.handover import Handover
from tokenizer_proc.ledger import Choice, Entry, Ledger, Owner
from tokenizer_proc.limits import RETRY_AFTER_S, Limits, Refused
from tokenizer_proc.measures import Measures
from tokenizer_proc.outgoing import Outgoing
from tokenizer_proc.prompt import PromptEncoder, chars_of
from tokenizer_proc.questions import Questions
from tokenizer_proc.rows import MAX_SCORED, TextRow, rows_of
from tokenizer_proc.sampling_checks import check_sampling, stop_token
from tokenizer_proc.shared_scores import SharedScores
from tokenizer_proc.stats_questions import StatsQuestions
from tokenizer_proc.stories import Stories, cause

log = logging.getLogger(__name__)

MAX_PENDING_CHARS = 2**26  # text waiting for tokenization, all requests together
OVERDUE_NS = 500_000_000  # after a deadline, when the scheduler should have answered
_FROM_CLIENTS = frozenset({Generate, Abort, GetStats, Tokenize, Detokenize, GetInfo})

Send = Callable[[Message], None]
_Asked = TypeVar("_Asked")
_Result = TypeVar("_Result")


class Frontend:
    def __init__(
        self,
        *,
        limits: Limits,
        encoder: PromptEncoder,
        grammars: GrammarCheck,
        eos_token_ids: IntArray,
        ledger: Ledger,
        clients: Clients,
        send_scheduler: Send,
        send_detokenizer: Send,
        clock: Callable[[], int],
        pool: Executor,
        info: Info,
        stories: Stories,
    ):
        self._limits = limits
        self._encoder = encoder
        self._grammars = grammars
        self._eos = eos_token_ids
        self._ledger = ledger
        self._clients = clients
        self._send_scheduler = send_scheduler
        self._clock = clock
        self._pool = pool
        self._preparing: set[asyncio.Task[None]] = set()
        self._pending_chars = 0
        self._stopping = False
        self._ignored = 0
        self._resubmitted = 0
        self.restarts: dict[str, int] = {}  # by process, as the launcher says
        self.refused_elsewhere: dict[str, int] = {}  # frames by process, as the launcher says
        self.refused = RefusedFrames()
        self.measures = Measures()
        self._answers = Answers(ledger, clients, self.measures, send_scheduler, clock)
        self._stories = stories
        self._handover = Handover(limits, eos_token_ids, self.measures, send_scheduler, send_detokenizer, clock)
        self._questions = Questions(encoder, info, pool, self._answers.send)
        self._stats = StatsQuestions(send_scheduler, self._answers.send)

    # ---- from clients ---------------------------------------------------------------------------------------------

    def on_client(self, owner: Owner, frame: bytes) -> None:
        """Handle one frame from a client. Never raises for what is in it."""
        if self._clients.deaf(owner):
            self._ignored += 1
            return
        try:
            msg = decode(frame, _FROM_CLIENTS, max_bytes=self._limits.max_frame)
        except FrameError as error:
            self.refused.count(error)
            problem = f"{error.field}: {error.problem}" if error.field else error.problem
            refusal = Refused(ErrorCode.INVALID, problem, error.field)
            if error.cause == "oversized":
                refusal = self._limits.too_large(problem)
            for rid in error.rids:
                self._answers.send(owner, refusal.answer(rid))
            return
        match msg:
            case Generate():
                self._generate(owner, msg)
            case Abort():
                self._abort(owner, msg.rid)
            case GetStats():
                if self._clients.overflowing(owner) or not self._stats.ask(owner, msg.query):
                    self._ignored += 1
            case Tokenize() | Detokenize() | GetInfo():
                if self._clients.overflowing(owner):
                    self._answers.send(owner, unread().answer(msg.rid))
                else:
                    self._questions.ask(owner, msg)

    def _generate(self, owner: Owner, msg: Generate) -> None:
        try:
            self._check_admission(owner, msg)
        except Refused as refusal:
            self.measures.refused(refusal.code)
            self._stories.refused(owner, msg, refusal)
            self._answers.send(owner, refusal.answer(msg.rid))
            return
        entry = self._ledger.open(owner, msg, self._clock())
        self._pending_chars += chars_of(msg)  # now: several messages may arrive before a task begins
        task = asyncio.get_running_loop().create_task(self._prepare(entry, msg))
        self._preparing.add(task)
        task.add_done_callback(self._preparing.discard)

    def _check_admission(self, owner: Owner, msg: Generate) -> None:
        """All that can be said before the prompt is tokenized."""
        if self._stopping:
            raise stopping()
        if self._clients.overflowing(owner):
            raise unread()
        if self._ledger.find(owner, msg.rid) is not None:
            raise Refused(ErrorCode.INVALID, f"rid: {msg.rid} is in use by a live request of this client", "rid")
        self._limits.check_live(self._ledger.choices, msg.n)
        check_sampling(msg, self._limits, self._eos)
        field = "text" if msg.text is not None else "chat"
        if msg.truncate_prompt_tokens is None:
            self._limits.check_chars(chars_of(msg), field)
        if self._pending_chars and self._pending_chars + chars_of(msg) > MAX_PENDING_CHARS:
            problem = "too much text waits for tokenization; try again later"
            raise Refused(ErrorCode.OVERLOADED, problem, field, MAX_PENDING_CHARS, RETRY_AFTER_S)

    async def _prepare(self, entry: Entry, msg: Generate) -> None:
        """Tokenize prompt and bad words and check the grammar, then hand over to detokenizer and scheduler, unless the
        request has ended in the meantime."""
        try:
            if msg.params.grammar is not None:
                checking = asyncio.ensure_future(self._grammars.check(msg.params.grammar))
                grammar = await self._in_time(entry, checking)
                entry.params = replace(entry.params, grammar=grammar)
            if msg.params.bad_words:
                entry.bad_words = await self._in_pool(entry, self._encoder.bad_words, msg.params.bad_words)
            prompt = (
                self._encoder.encode(msg)
                if msg.token_ids is not None
                else await self._in_pool(entry, self._encoder.encode, msg)
            )
            if self._ledger.holds(entry):
                self._handover.admit(entry, prompt)
        except Refused as refusal:
            self._answers.refuse(entry, refusal)
        except Exception:
            log.exception("request %d of a client failed", entry.client_rid)
            failure = Refused(ErrorCode.INTERNAL, "an internal error in the tokenizer; its log says more")
            self._answers.refuse(entry, failure)
        finally:
            self._pending_chars -= chars_of(msg)

    async def _in_pool(self, entry: Entry, encode: Callable[[_Asked], _Result], asked: _Asked) -> _Result:
        """Tokenize in the pool."""
        return await self._in_time(entry, asyncio.get_running_loop().run_in_executor(self._pool, encode, asked))

    async def _in_time(self, entry: Entry, work: "asyncio.Future[_Result]") -> _Result:
        """The result of some work. A request whose deadline passes meanwhile is answered at once."""
        if entry.deadline_ms:
            await asyncio.wait({work}, timeout=entry.time_left(self._clock()) / 1e9)
            if not work.done():
                self._answers.refuse(entry, expired(entry))
        return await work

    def _abort(self, owner: Owner, client_rid: int) -> None:
        entry = self._ledger.find(owner, client_rid)
        if entry is None:
            return  # it has just ended
        if entry.admitted and entry.beams is None and entry.begun == entry.choices:
            if not entry.aborting:
                entry.aborting = True
                self._answers.abort_running(entry)  # the scheduler answers with the terminal rows
            return
        self._answers.end_aborted(entry)

    # ---- after a loss ---------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """A new term has begun: detokenizer and scheduler know of nothing. Hand every live choice over again, each from
        the last token that its client was sent."""
        for entry in self._ledger.admitted:
            if entry.aborting:
                self._answers.end_aborted(entry)
                continue
            try:
                self._handover.again(entry)
            except Refused as refusal:
                self._answers.refuse(entry, refusal)
                continue
            self._resubmitted += len(entry.begun)
        self._stats.again()

    # ---- from the detokenizer -------------------------------------------------------------------------------------

    def on_detokenizer(self, msg: Message) -> None:
        match msg:
            case TextBatch():
                self._on_text(msg)
            case RequestError():
                self._on_error(msg)
            case Stats():
                self._on_stats(msg)

    def on_lost(self, lost: Lost) -> None:
        """Something that the detokenizer said cannot be read: those of whom it spoke end, a new term saves the rest."""
        for rid in lost.rids:
            choice = self._ledger.get(rid)
            if choice is not None:
                self._answers.refuse(choice.entry, Refused(ErrorCode.INTERNAL, lost.words))

    def _on_error(self, error: RequestError) -> None:
        choice = self._ledger.get(error.rid)
        if choice is None:
            return
        refusal = Refused(ErrorCode(error.code), error.problem, error.field, error.limit, error.retry_after_s)
        if error.code == ErrorCode.DEADLINE:
            refusal = expired(choice.entry)  # the scheduler knows only the time that was left for it
        # An internal error may be the detokenizer's, of which the scheduler knows nothing.
        self._answers.refuse(choice.entry, refusal, ended=choice if error.code != ErrorCode.INTERNAL else None)

    def _on_text(self, batch: TextBatch) -> None:
        times, now = batch.times[:], self._clock()
        times.append(now)
        outgoing = Outgoing(self._ledger, self._answers, times)
        for row in rows_of(batch):
            choice = self._ledger.get(row.rid)
            if choice is None:
                continue  # its client is gone, or the request ended with an error
            entry = choice.entry
            choice.started_ns = choice.started_ns or row.started
            if entry.beams is not None and not entry.beams.search.done:
                self._advance(entry.beams, choice, row, batch.times)
                continue
            if not choice.emitted:  # what is found later, after a loss, is its own
                choice.cached = max(choice.cached, row.cached)
            if entry.shared is not None and not self._share(entry.shared, choice, row, batch, outgoing):
                continue
            choice.emitted.extend(row.tokens)
            choice.scored += len(row.scores.prompt or ())
            begins = not choice.first_ns
            self.measures.tokens(choice, len(row.tokens), now)
            if row.finish != Finish.NONE:
                self._end(choice, row.finish)
                self.measures.ended(choice, row.finish, now)
                if not entry.choices:
                    self.measures.over(entry)
            tokens, text, scores, token_bytes = row.tokens, row.text, row.scores, batch.token_bytes
            if not entry.stream:
                choice.hold(row, token_bytes)
                if row.finish == Finish.NONE and len(choice.scores) < MAX_SCORED:
                    continue
                tokens, text, scores, token_bytes = choice.release()
            rows = outgoing.rows_for(entry)
            if rows is None:
                continue
            prompt_tokens = len(entry.prompt or ())
            rows.add(entry.client_rid, choice.index, tokens, text, row.finish, prompt_tokens, choice.cached)
            rows.add_scores(scores, token_bytes.__getitem__)
            if row.finish != Finish.NONE or (begins and choice.first_ns):
                rows.add_timing(entry.arrival, choice.started_ns, choice.first_ns)
            if row.finish == Finish.STOP:
                rows.add_stop(row.string, stop_token(entry.params, self._eos, choice.emitted))
        outgoing.send()

    def _share(self, shared: SharedScores, choice: Choice, row: TextRow, batch: TextBatch, outgoing: Outgoing) -> bool:
        """Take what the prompt's tokens predict from a row of the first choice, and have the others begin when that is
        all; put it before the first row of each of these. False where the request has ended meanwhile."""
        if choice.index:
            begins = not choice.scored and bool(row.tokens or row.finish)
            return outgoing.add_shared(shared, choice) if begins else True
        if row.scores.prompt is not None:
            shared.add(row.scores.prompt, batch.token_bytes)
            if shared.complete:
                try:
                    self._handover.begin_others(choice.entry)
                except Refused as refusal:
                    self._answers.refuse(choice.entry, refusal)
        return self._ledger.holds(choice.entry)

    def _advance(self, beams: Beams, choice: Choice, row: TextRow, times: IntArray) -> None:
        if not beams.take(choice, row):
            return
        if beams.search.done:
            beams.finish(times[:-2])  # without those of detokenizer and tokenizer
            return
        try:
            beams.step(self._handover.left_ms(beams.entry), self._handover.waited_ms(beams.entry))
        except Refused as refusal:
            self._answers.refuse(beams.entry, refusal)

    def _end(self, choice: Choice, finish: int) -> None:
        choice.finish = finish
        self._ledger.end(choice)
        if finish == Finish.STOP and choice.entry.params.stop:
            # Perhaps the detokenizer found a stop string, of which the scheduler knows nothing.
            self._send_scheduler(Abort(choice.rid))

    def _on_stats(self, stats: Stats) -> None:
        own = {
            "tokenizer.live_requests": len(self._ledger),
            "tokenizer.live_choices": self._ledger.choices,
            "tokenizer.clients": len(self._ledger.owners),
            "tokenizer.slow_clients": self._clients.backlogs,
            "tokenizer.refused_frames": self.refused.total,
            "tokenizer.ignored_frames": self._ignored,
            "tokenizer.resubmitted": self._resubmitted,
            **{f"launcher.restarts.{name}": count for name, count in self.restarts.items()},
            **{f"{name}.refused_frames": count for name, count in self.refused_elsewhere.items()},
            **self.measures.flat(),
        }
        self._stats.answer(stats, own)

    @property
    def preparing(self) -> int:
        """Requests whose prompt is being tokenized, and questions in work."""
        return len(self._preparing) + len(self._questions)

    @property
    def has_backlog(self) -> bool:
        return self._clients.backlogs > 0

    # ---- as time passes -------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Try again to send what slow clients did not take."""
        for owner in self._clients.flush():
            self._answers.drop_client(owner)

    def beat(self) -> None:
        """Tell silent clients with live requests that the cluster lives, and find those that do not."""
        fed = self._clients.take_fed()
        for owner in self._ledger.owners:
            if owner not in fed:
                self._answers.send(owner, Beat())
        self._clients.take_fed()
        self._end_overdue()

    def _end_overdue(self) -> None:
        """The scheduler ends requests at their deadlines, unless it hangs or is being replaced."""
        latest = self._clock() - OVERDUE_NS
        for entry in self._ledger.admitted:
            if entry.deadline_ms and entry.time_left(latest) <= 0:
                self._answers.refuse(entry, expired(entry))

    def drain(self) -> None:
        """Refuse new requests from now on; those that are here go on."""
        self._stopping = True

    @property
    def drained(self) -> bool:
        """Whether nothing is left to be answered."""
        return self._stopping and not len(self._ledger) and not self.preparing and not self.has_backlog

    def shut_down(self) -> None:
        """End every live request with an answer; those that still come are refused."""
        self._stopping = True
        for owner in self._ledger.owners:
            for entry in self._ledger.close_all_of(owner, cause(stopping())):
                self._answers.send(owner, stopping().answer(entry.client_rid))
