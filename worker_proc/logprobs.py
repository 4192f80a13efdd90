"""Log probabilities of tokens under the model's own distribution, in float32."""

from array import array

import torch
from torch import Tensor

from common.fields import FloatArray
from common.logprobs import Logprobs

_LEAST = -9999.0  # stands for the logarithm of nothing, which JSON cannot carry
_MAX_ELEMENTS = 2**24  # log probabilities that are worked on at once


def of_tokens(logprobs: Tensor, tokens: Tensor, tops: list[int]) -> Logprobs:
    """An entry per row: `tokens[i]` (int64 `[R]`) and the `tops[i]` likeliest ones, of `logprobs` (`[R, vocab]`).

    Everything but `tops` is on the device; this waits for it.
    """
    own = logprobs.gather(1, tokens[:, None])
    ranks = (logprobs > own).sum(1) + 1
    most = min(max(tops, default=0), logprobs.shape[1])
    top_counts = array("i", (min(top, most) for top in tops))
    top_ids, top_values = array("i"), array("f")
    if most:
        best = logprobs.topk(most)
        for count, ids, values in zip(top_counts, best.indices.tolist(), _finite(best.values).tolist(), strict=True):
            top_ids.extend(ids[:count])
            top_values.extend(values[:count])
    return Logprobs(
        array("i", tokens.tolist()),
        _floats(own.squeeze(1)),
        array("i", ranks.tolist()),
        top_counts,
        top_ids,
        top_values,
    )


def of_targets(logits: Tensor, targets: Tensor, tops: list[int]) -> Logprobs:
    """As `of_tokens`, from logits `[R, vocab]`, and in memory that does not grow with the number of rows."""
    entries = Logprobs.empty()
    step = max(1, _MAX_ELEMENTS // logits.shape[1])
    for start in range(0, len(tops), step):
        part = slice(start, start + step)
        entries.extend(of_tokens(logits[part].log_softmax(-1), targets[part], tops[part]))
    return entries


def _finite(values: Tensor) -> Tensor:
    return torch.nan_to_num(values, nan=_LEAST, neginf=_LEAST).clamp_min_(_LEAST)


def _floats(values: Tensor) -> FloatArray:
    return array("f", _finite(values).tolist())
