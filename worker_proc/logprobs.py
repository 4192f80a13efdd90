"""Log probabilities of tokens under the model's own distribution, in float32.

Tokens are ordered by their logits, equal ones by their ids: rounding a logarithm can make equal what was not. A row
without a distribution, which holds NaN or infinity or nothing but -inf, has its tokens by their ids, each of rank 1.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from common.fields import FloatArray
from common.logprobs import Logprobs

_LEAST = -9999.0  # stands for the logarithm of nothing, which JSON cannot carry
_MAX_ELEMENTS = 2**24  # log probabilities that are worked on at once
_MAX_TIED = 2**21  # where tokens are equal to the last one that is wanted, and some of them are left out


@dataclass(frozen=True, slots=True)
class Scores:
    """Of R tokens. Rows without a distribution have NaN."""

    own: Tensor  # float32 [R]: log probability
    ranks: Tensor  # int64 [R]: 1 and the number of larger logits
    top_ids: Tensor  # int64 [R, most]
    top_values: Tensor  # float32 [R, most]


ScoreRows = Callable[[Tensor, Tensor, int], Scores]
"""Scores a token of each row: logits (float32 `[R, vocab]`, unchanged), tokens (int64 `[R]`), how many of the likeliest
tokens are wanted beside (at most `vocab`)."""


def of_tokens(logits: Tensor, tokens: Tensor, tops: list[int], score_rows: ScoreRows | None = None) -> Logprobs:
    """An entry per row of `logits` (float32 `[R, vocab]`): `tokens[i]` (int64 `[R]`) and the `tops[i]` likeliest ones.

    Everything but `tops` is on the device; this waits for it. It works in memory that does not grow with the number of
    rows. `score_rows` scores instead of this module.
    """
    entries, score = Logprobs.empty(), score_with_torch if score_rows is None else score_rows
    step = max(1, _MAX_ELEMENTS // logits.shape[1])
    for start in range(0, len(tops), step):
        part = slice(start, start + step)
        entries.extend(_entries(score, logits[part], tokens[part], tops[part]))
    return entries


def _entries(score: ScoreRows, logits: Tensor, tokens: Tensor, tops: list[int]) -> Logprobs:
    most = min(max(tops), logits.shape[1])
    scores = score(logits, tokens, most)
    top_counts = array("i", (min(top, most) for top in tops))
    top_ids, top_values = array("i"), array("f")
    if most:
        found = zip(top_counts, scores.top_ids.tolist(), _finite(scores.top_values).tolist(), strict=True)
        for count, ids, values in found:
            top_ids.extend(ids[:count])
            top_values.extend(values[:count])
    return Logprobs(
        array("i", tokens.tolist()),
        _floats(scores.own),
        array("i", scores.ranks.tolist()),
        top_counts,
        top_ids,
        top_values,
    )


def score_with_torch(logits: Tensor, tokens: Tensor, most: int) -> Scores:
    """A `ScoreRows`, on any device."""
    logprobs = logits.log_softmax(-1)
    lost = logprobs[:, :1].isnan()
    if bool(lost.any()):
        logits = logits.masked_fill(lost, 0.0)
    ranks = (logits > logits.gather(1, tokens[:, None])).sum(1) + 1
    ids = _likeliest(logits, most) if most else tokens.new_empty(len(tokens), 0)
    return Scores(logprobs.gather(1, tokens[:, None]).squeeze(1), ranks, ids, logprobs.gather(1, ids))


def _likeliest(logits: Tensor, count: int) -> Tensor:
    """The ids of the `count` largest of each row, int64 `[R, count]`, the first of equal ones first; `topk` does not
    say which of them it takes."""
    top = logits.topk(count)
    ids, edge = top.indices, top.values[:, -1:]
    cut = ((logits >= edge).sum(1) > count).nonzero().squeeze(1)
    for tied in torch.split(cut, max(1, _MAX_TIED // logits.shape[1])) if len(cut) else ():
        part, last = logits[tied], edge[tied]  # rows with more of those equal to the last one than fit
        more, equal = part > last, part == last
        first = equal & (equal.cumsum(1) <= count - more.sum(1, keepdim=True))
        ids[tied] = (more | first).nonzero()[:, 1].view(-1, count)
    ids = ids.sort(1).values
    return ids.gather(1, logits.gather(1, ids).sort(dim=1, descending=True, stable=True).indices)


def _finite(values: Tensor) -> Tensor:
    return torch.nan_to_num(values, nan=_LEAST, neginf=_LEAST).clamp_min_(_LEAST)


def _floats(values: Tensor) -> FloatArray:
    return array("f", _finite(values).tolist())
