"""Rows of a TextBatch: taken apart, and its columns while it is put together."""

from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from common.fields import IntArray
from common.logprobs import LogprobRows, Logprobs
from common.messages import Stopped, TextBatch, Timing

MAX_SCORED = 2**16  # tokens named in log probabilities, after which rows are sent
MAX_SIZE = 2**23  # bytes of tokens and texts, likewise
TOKEN_BYTES, UTF8_BYTES = 4, 4

BytesOf = Callable[[int], bytes]


def _column() -> IntArray:
    return array("i")


@dataclass(slots=True)
class Scores:
    """The log probabilities of a row: those of its tokens and those of prompt tokens, where they were asked for."""

    tokens: Logprobs | None = None
    prompt: Logprobs | None = None

    def __len__(self) -> int:
        """Tokens that are named, alternatives included."""
        parts = [part for part in (self.tokens, self.prompt) if part is not None]
        return sum(len(part) + len(part.top_ids) for part in parts)

    @property
    def named(self) -> set[int]:
        """The tokens themselves."""
        parts = [part for part in (self.tokens, self.prompt) if part is not None]
        return {token for part in parts for column in (part.token_ids, part.top_ids) for token in column}

    def extend(self, other: "Scores") -> None:
        """Append what `other` has."""
        if other.tokens is not None:
            self.tokens = self.tokens or Logprobs.empty()
            self.tokens.extend(other.tokens)
        if other.prompt is not None:
            self.prompt = self.prompt or Logprobs.empty()
            self.prompt.extend(other.prompt)


_NO_SCORES: Final = Scores()  # of most rows; it stays empty


def scores_of(row: int, logprobs: Mapping[int, Logprobs], prompts: Mapping[int, Logprobs]) -> Scores:
    """What a batch has for one of its rows."""
    if row in logprobs or row in prompts:
        return Scores(logprobs.get(row), prompts.get(row))
    return _NO_SCORES


class TextRow(NamedTuple):  # cheaper to make than a dataclass, for every token
    """A row that the detokenizer sent; `string` is the stop string that ended it, `started` (ns) is in the row of a
    first token."""

    rid: int
    tokens: IntArray
    text: str
    finish: int
    cached: int
    scores: Scores
    string: str | None
    started: int


def rows_of(batch: TextBatch) -> Iterator[TextRow]:
    logprobs = batch.logprobs.by_row() if batch.logprobs is not None else {}
    prompts = batch.prompt_logprobs.by_row() if batch.prompt_logprobs is not None else {}
    strings = {stopped.row: stopped.string for stopped in batch.stopped}
    started = {timing.row: timing.started for timing in batch.timings}
    at = 0
    for i, rid in enumerate(batch.rids):
        tokens = batch.token_ids[at : at + batch.counts[i]]
        at += batch.counts[i]
        scores = scores_of(i, logprobs, prompts)
        yield TextRow(
            rid, tokens, batch.texts[i], batch.finish[i], batch.cached[i], scores, strings.get(i), started.get(i, 0)
        )


@dataclass(slots=True)
class Rows:
    rids: IntArray = field(default_factory=_column)
    choices: IntArray = field(default_factory=_column)
    counts: IntArray = field(default_factory=_column)
    token_ids: IntArray = field(default_factory=_column)
    texts: list[str] = field(default_factory=list)
    finish: bytearray = field(default_factory=bytearray)
    prompt_tokens: IntArray = field(default_factory=_column)
    cached: IntArray = field(default_factory=_column)
    logprobs: dict[int, Logprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, Logprobs] = field(default_factory=dict)
    token_bytes: dict[int, bytes] = field(default_factory=dict)
    stopped: list[Stopped] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    scored: int = 0  # tokens named in log probabilities
    size: int = 0  # bytes of tokens and texts, at most

    @property
    def full(self) -> bool:
        """What follows goes into another batch, so that none is larger than a frame."""
        return self.scored > MAX_SCORED or self.size > MAX_SIZE

    def add(
        self, rid: int, choice: int, tokens: IntArray, text: str, finish: int, prompt_tokens: int, cached: int
    ) -> None:
        self.rids.append(rid)
        self.choices.append(choice)
        self.counts.append(len(tokens))
        self.token_ids.extend(tokens)
        self.texts.append(text)
        self.size += TOKEN_BYTES * len(tokens) + (len(text) if text.isascii() else UTF8_BYTES * len(text))
        self.finish.append(finish)
        self.prompt_tokens.append(prompt_tokens)
        self.cached.append(cached)

    def add_scores(self, scores: Scores, bytes_of: BytesOf) -> None:
        """Log probabilities of the row added last."""
        if scores is _NO_SCORES:
            return
        row = len(self.rids) - 1
        self.scored += len(scores)
        for column, own in ((self.logprobs, scores.tokens), (self.prompt_logprobs, scores.prompt)):
            if own is not None:
                column[row] = own
        for token in scores.named:
            if token not in self.token_bytes:
                self.token_bytes[token] = bytes_of(token)

    def add_stop(self, string: str | None, token: int | None = None) -> None:
        """The stop string or else the stop token that ended the row added last, if one did."""
        if string is not None or token is not None:
            self.stopped.append(Stopped(len(self.rids) - 1, token if string is None else None, string))

    def add_timing(self, arrived: int = 0, started: int = 0, first: int = 0) -> None:
        """When what happened to the choice of the row added last, in ns."""
        self.timings.append(Timing(len(self.rids) - 1, arrived, started, first))

    def batch(self, times: IntArray) -> TextBatch:
        return TextBatch(
            self.rids,
            self.choices,
            self.counts,
            self.token_ids,
            tuple(self.texts),
            bytes(self.finish),
            self.prompt_tokens,
            self.cached,
            times,
            LogprobRows.of(self.logprobs),
            LogprobRows.of(self.prompt_logprobs),
            self.token_bytes,
            tuple(self.stopped),
            tuple(self.timings),
        )
