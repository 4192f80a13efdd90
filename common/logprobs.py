"""Log probabilities of tokens: as columns on the wire, and one by one as a client sees them."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from common.codec import Struct
from common.fields import FieldError, FloatArray, Floats, IntArray, Ints, Maybe
from common.sampling_params import MAX_DRAW_LOGPROBS, MAX_TOKEN_ID

_MOST = 2**22


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """A likely token, its raw bytes, and the natural logarithm of its probability."""

    token_id: int
    token: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token of an answer or a prompt. `rank` 1 is the likeliest token of the vocabulary; `top` holds the likeliest
    ones, best first, whether or not this one is among them. An id or rank of -1 is not known (over HTTP)."""

    token_id: int
    token: bytes
    logprob: float
    rank: int
    top: tuple[TopLogprob, ...]

    def as_dict(self) -> dict[str, object]:
        """JSON-ready; bytes that are not UTF-8 by themselves show as the replacement character."""
        top = [_known({"token_id": t.token_id, "token": _shown(t.token), "logprob": t.logprob}) for t in self.top]
        own = {"token_id": self.token_id, "token": _shown(self.token), "logprob": self.logprob, "rank": self.rank}
        return _known(own) | {"top": top}


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Entries as columns. Entry i has the next `top_counts[i]` of `top_ids` and `top_logprobs`, best first."""

    token_ids: Annotated[IntArray, Ints(_MOST, 0, MAX_TOKEN_ID)]
    logprobs: Annotated[FloatArray, Floats(_MOST)]
    ranks: Annotated[IntArray, Ints(_MOST, 1)]
    top_counts: Annotated[IntArray, Ints(_MOST, 0, MAX_DRAW_LOGPROBS)]
    top_ids: Annotated[IntArray, Ints(_MOST, 0, MAX_TOKEN_ID)]
    top_logprobs: Annotated[FloatArray, Floats(_MOST)]

    def __post_init__(self) -> None:
        if len({len(self.token_ids), len(self.logprobs), len(self.ranks), len(self.top_counts)}) > 1:
            raise FieldError("logprobs", "columns must have the same length")
        if not sum(self.top_counts) == len(self.top_ids) == len(self.top_logprobs):
            raise FieldError("top_ids", "as many as top_counts say")

    @classmethod
    def empty(cls) -> "Logprobs":
        return cls(array("i"), array("f"), array("i"), array("i"), array("i"), array("f"))

    def __len__(self) -> int:
        return len(self.token_ids)

    def extend(self, other: "Logprobs") -> None:
        """Append the entries of `other`."""
        self.token_ids.extend(other.token_ids)
        self.logprobs.extend(other.logprobs)
        self.ranks.extend(other.ranks)
        self.top_counts.extend(other.top_counts)
        self.top_ids.extend(other.top_ids)
        self.top_logprobs.extend(other.top_logprobs)

    def first(self, count: int) -> "Logprobs":
        """The first `count` entries."""
        return self if count >= len(self) else self.split([count])[0]

    def split(self, counts: IntArray | list[int]) -> "list[Logprobs]":
        """The entries in runs of `counts`."""
        parts, at, top_at = [], 0, 0
        for count in counts:
            end = at + count
            top_end = top_at + sum(self.top_counts[at:end])
            own, top = slice(at, end), slice(top_at, top_end)
            parts.append(
                Logprobs(
                    self.token_ids[own],
                    self.logprobs[own],
                    self.ranks[own],
                    self.top_counts[own],
                    self.top_ids[top],
                    self.top_logprobs[top],
                )
            )
            at, top_at = end, top_end
        return parts

    def entries(self, texts: Mapping[int, bytes]) -> list[TokenLogprobs]:
        """The entries one by one, with the raw bytes of each token (none for unknown ones)."""
        result, at = [], 0
        for i, token in enumerate(self.token_ids):
            end = at + self.top_counts[i]
            ids, values = self.top_ids[at:end], self.top_logprobs[at:end]
            top = tuple(TopLogprob(t, texts.get(t, b""), v) for t, v in zip(ids, values, strict=True))
            result.append(TokenLogprobs(token, texts.get(token, b""), self.logprobs[i], self.ranks[i], top))
            at = end
        return result


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """The entries of some rows of a batch: row `rows[i]` has the next `counts[i]` of `entries`."""

    rows: Annotated[IntArray, Ints(2**14)]
    counts: Annotated[IntArray, Ints(2**14)]
    entries: Annotated[Logprobs, Struct(Logprobs)]

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.counts) or len(set(self.rows)) != len(self.rows):
            raise FieldError("rows", "must be different, and as many as counts")
        if sum(self.counts) != len(self.entries):
            raise FieldError("entries", "as many as counts say")

    @classmethod
    def of(cls, by_row: Mapping[int, Logprobs]) -> "LogprobRows | None":
        """None where no row has any, which costs nothing on the wire."""
        if not by_row:
            return None
        entries = Logprobs.empty()
        for own in by_row.values():
            entries.extend(own)
        return cls(array("i", by_row), array("i", map(len, by_row.values())), entries)

    def by_row(self) -> dict[int, Logprobs]:
        return dict(zip(self.rows, self.entries.split(self.counts), strict=True))


def _known(entry: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in entry.items() if value != -1 or name == "logprob"}


def _shown(token: bytes) -> str:
    return token.decode(errors="replace")


LOGPROB_ROWS = Maybe(Struct(LogprobRows))
