"""The detokenizer's state: one text stream per live request."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from common.fields import IntArray
from common.messages import Finish, OpenStream, RequestError, TextBatch, TokenBatch
from tokenizer_proc.rows import BytesOf, Rows, Scores, scores_of
from tokenizer_proc.stop_strings import StopMatcher
from tokenizer_proc.text_decoder import TextDecoder, TextDecoders

REPLAYED = 256  # tokens of a stream that goes on, from one tick to the next


@dataclass(slots=True)
class _Stream:
    decoder: TextDecoder
    matcher: StopMatcher
    not_stopping: int  # the next so many tokens cannot complete a stop string
    shows_stop: bool
    stopped: str | None = None  # the stop string that ended it; the scheduler's own end is still to come


@dataclass(slots=True)
class _Early:
    """What came for a request whose OpenStream has not: the two senders are not ordered."""

    tokens: IntArray = field(default_factory=lambda: array("i"))
    finish: int = Finish.NONE
    cached: int = 0
    times: IntArray = field(default_factory=lambda: array("q"))
    scores: Scores = field(default_factory=Scores)
    started: int = 0
    error: RequestError | None = None


class Streams:
    """Tokens in, text out. Every stream is closed by the scheduler's terminal row (a finish code or a RequestError),
    and passes exactly one terminal row on: its own when a stop string was found, else the scheduler's."""

    def __init__(self, decoders: TextDecoders, bytes_of: BytesOf):
        self._decoders = decoders
        self._bytes_of = bytes_of
        self._streams: dict[int, _Stream] = {}
        self._early: dict[int, _Early] = {}

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def early(self) -> int:
        """Requests with output before their OpenStream."""
        return len(self._early)

    def open(self, msg: OpenStream, tick: Callable[[], object] = lambda: None) -> TextBatch | RequestError | None:
        """Start a stream, or go on with one that another detokenizer had, which may take long: `tick` is called all the
        while. What has come early for it leaves at once, as one row."""
        decoder = self._decoders.new(skip_special_tokens=msg.skip_special_tokens, continues=True)
        matcher = StopMatcher(msg.stop, shows_stop=msg.shows_stop)
        stream = self._streams[msg.rid] = _Stream(decoder, matcher, msg.min_tokens, msg.shows_stop)
        for at in range(0, len(msg.emitted), REPLAYED):  # brings it to where the client is
            self._text(stream, msg.emitted[at : at + REPLAYED], Finish.NONE)
            tick()
        early = self._early.pop(msg.rid, None)
        if early is None:
            return None
        if early.error is not None:
            return self.fail(early.error)
        rows = Rows()
        self._add_row(rows, msg.rid, early.tokens, early.finish, early.cached, early.scores, early.started)
        return rows.batch(early.times[:])

    def push(self, batch: TokenBatch, received: int) -> TextBatch | None:
        """A step's text, a row for each row that is still wanted. `received` (ns) goes into `times`."""
        times = batch.times[:]
        times.append(received)
        logprobs = batch.logprobs.by_row() if batch.logprobs is not None else {}
        prompts = batch.prompt_logprobs.by_row() if batch.prompt_logprobs is not None else {}
        rows = Rows()
        at = 0
        for i, (rid, count) in enumerate(zip(batch.rids, batch.counts, strict=True)):
            tokens = batch.token_ids[at : at + count]
            at += count
            scores = scores_of(i, logprobs, prompts)
            if rid in self._streams:
                self._add_row(rows, rid, tokens, batch.finish[i], batch.cached[i], scores, batch.started.get(i, 0))
            else:
                early = self._early.setdefault(rid, _Early())
                early.tokens.extend(tokens)
                early.scores.extend(scores)
                early.finish, early.cached, early.times = batch.finish[i], batch.cached[i], times
                early.started = early.started or batch.started.get(i, 0)
        return rows.batch(times) if rows.rids else None

    def fail(self, error: RequestError) -> RequestError | None:
        """The scheduler ended a request with an error."""
        stream = self._streams.pop(error.rid, None)
        if stream is None:
            self._early.setdefault(error.rid, _Early()).error = error
            return None
        return None if stream.stopped is not None else error

    def _add_row(
        self, rows: Rows, rid: int, tokens: IntArray, finish: int, cached: int, scores: Scores, started: int
    ) -> None:
        stream = self._streams[rid]
        if finish != Finish.NONE:
            del self._streams[rid]
        if stream.stopped is not None:
            return
        text, shown = self._text(stream, tokens, finish)
        if stream.stopped is not None:
            finish = Finish.STOP
        rows.add(rid, 0, shown, text, finish, 0, cached)
        if scores.tokens is not None:
            scores.tokens = scores.tokens.first(len(shown))
        rows.add_scores(scores, self._bytes_of)
        rows.add_stop(stream.stopped)
        if started:
            rows.add_timing(started=started)

    def _text(self, stream: _Stream, tokens: IntArray, finish: int) -> tuple[str, IntArray]:
        """The text to show, and the tokens up to the one that completed a stop string."""
        # The scheduler stops at a token (end of sequence or a stop token): that one has no text, unless it is wanted.
        with_text = len(tokens) - (finish == Finish.STOP and not stream.shows_stop)
        parts: list[str] = []
        for i, token in enumerate(tokens[:with_text]):
            stream.not_stopping -= 1
            may_stop = stream.not_stopping < 0
            text, stream.stopped = stream.matcher.push(stream.decoder.push(token), may_stop=may_stop)
            parts.append(text)
            if stream.stopped is not None:
                return "".join(parts), tokens[: i + 1]
        if finish != Finish.NONE:
            text, stream.stopped = stream.matcher.push(stream.decoder.flush(), may_stop=stream.not_stopping < 0)
            parts.append(text)
            if stream.stopped is None:
                parts.append(stream.matcher.flush())
        return "".join(parts), tokens
