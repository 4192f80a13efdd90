"""The loop of the serving benchmark: send what is due, note what arrives."""

import heapq
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from client_cli.bench_load import Conversation, text_of
from client_cli.bench_metrics import Record
from client_cli.link import Link
from client_cli.runs import POLL_S, describe
from common.connection import Row
from common.messages import Finish, RequestError
from common.sampling_params import SamplingParams

Clock = Callable[[], int]


@dataclass(slots=True)
class _Talk:
    """A conversation on its way: what was said, as token ids or as text, and the turn that is next."""

    conversation: Conversation
    as_text: bool
    turn: int = 0
    ids: list[int] = field(default_factory=list)
    text: str = ""

    def next_prompt(self) -> str | list[int]:
        tokens = self.conversation.turns[self.turn].tokens
        self.turn += 1
        if self.as_text:
            self.text += text_of(tokens)
            return self.text
        self.ids += tokens
        return list(self.ids)

    def answered(self, row: Row) -> None:
        if self.turn < len(self.conversation.turns):  # otherwise nobody will read it
            self.text += row.text
            self.ids += row.token_ids

    @property
    def next_at_s(self) -> float | None:
        turns = self.conversation.turns
        return turns[self.turn].at_s if self.turn < len(turns) else None


class Bench:
    """Runs conversations over a link: each turn when it is due, at most `concurrency` conversations at once.

    With `as_text` prompts are text, for servers that take no token ids or do not name those of their answers.
    """

    def __init__(
        self, link: Link, *, as_text: bool, params: Callable[[int], SamplingParams], clock: Clock = time.monotonic_ns
    ):
        self._link = link
        self._as_text = as_text
        self._params = params
        self._clock = clock
        self._live: dict[int, tuple[_Talk, Record]] = {}

    def run(
        self,
        conversations: Sequence[Conversation],
        concurrency: int | None,
        check: Callable[[], None],
        on_end: Callable[[Record], None] = lambda record: None,
    ) -> tuple[list[Record], float]:
        """All requests in the order of their sending, and the seconds from the first send to the last arrival.

        Raises ConnectionLost when the cluster goes away.
        """
        start = self._clock()
        timed = any(c.start_s for c in conversations)  # an arrival that waits for room is late
        waiting = deque(sorted(conversations, key=lambda c: c.start_s))
        later: list[tuple[int, int, _Talk]] = []  # due, a number that decides between equals, who
        active = numbers = 0
        records: list[Record] = []
        while waiting or later or self._live:
            check()
            now = self._clock()
            while later and later[0][0] <= now:
                due, _, talk = heapq.heappop(later)
                records.append(self._send(talk, due))
            room = concurrency is None or active < concurrency
            while waiting and room and (due := start + int(waiting[0].start_s * 1e9)) <= now:
                talk = _Talk(waiting.popleft(), self._as_text)
                active += 1
                room = concurrency is None or active < concurrency
                records.append(self._send(talk, due if timed or concurrency is None else now))
            for talk, record in self._receive(self._patience(now, start, waiting if room else (), later)):
                on_end(record)
                at_s = talk.next_at_s if record.error is None else None
                if at_s is None:
                    active -= 1
                    continue
                numbers += 1
                heapq.heappush(later, (max(start + int(at_s * 1e9), self._clock()), numbers, talk))
        first = min((r.sent_ns for r in records), default=start)  # the times of a trace need not begin at 0
        last = max((r.last_ns for r in records if r.last_ns), default=self._clock())
        return records, max(1, last - first) / 1e9

    def _patience(
        self, now: int, start: int, waiting: Sequence[Conversation], later: list[tuple[int, int, _Talk]]
    ) -> float:
        """Seconds until something is due, at most POLL_S."""
        due = [start + int(waiting[0].start_s * 1e9)] if waiting else []
        due += [later[0][0]] if later else []
        return min([POLL_S, *(max(0, at - now) / 1e9 for at in due)])

    def _send(self, talk: _Talk, due: int) -> Record:
        asked = talk.conversation.turns[talk.turn].output_len
        prompt = talk.next_prompt()
        record = Record(due, self._clock(), asked)
        rid = self._link.submit(prompt, self._params(asked))
        self._live[rid] = (talk, record)
        return record

    def _receive(self, timeout_s: float) -> list[tuple[_Talk, Record]]:
        """Take what arrives; returns who has ended."""
        ended = []
        for row in self._link.poll(timeout_s):
            talk, record = self._live[row.rid]
            if isinstance(row, RequestError):
                record.error = describe(row)
            else:
                _take(record, row)
                talk.answered(row)
                if row.finish is Finish.NONE:
                    continue
                if row.finish is Finish.ABORT:
                    record.error = "aborted by the server"
                elif not record.first_ns:
                    record.error = "the answer has no tokens"
            del self._live[row.rid]
            ended.append((talk, record))
        return ended


def _take(record: Record, row: Row) -> None:
    # A token may have no text of its own yet, and the end of the sequence never has one.
    if row.token_ids or row.text or row.finish in (Finish.NONE, Finish.STOP):
        record.arrived(row.received_ns)
    record.output_tokens += len(row.token_ids)
    if row.tokens_so_far is not None:
        record.output_tokens = row.tokens_so_far
    record.prompt_tokens = row.prompt_tokens or record.prompt_tokens
    record.cached_tokens = row.cached_tokens or record.cached_tokens
