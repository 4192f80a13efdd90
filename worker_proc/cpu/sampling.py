"""What is made of logits natively: draws (native/sampling.h) as `worker_proc/sampler.py` has them, log probabilities
(native/logprobs.h) as `worker_proc/logprobs.py` does, a row of logits at a time in the caches.

The weights are made, added up by blocks of 128 tokens and filtered without sorting the vocabulary: the block with the
k-th largest of the blocks' largest weights bounds the k-th largest weight from below, so few blocks need a closer look.
Given the same weights the tokens are those of the sampler to the last one; weights may differ in the last bit of e**x.
"""

import ctypes
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from worker_proc.cpu.library import NativeLibrary
from worker_proc.logprobs import Scores


class _BatchStruct(ctypes.Structure):
    """`DrawBatch` of native/sampling.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("logits", "best", "params", "seeds", "index", "tokens")),
        *((name, c_int64) for name in ("rows", "vocab", "logits_stride", "params_stride", "index_stride")),
    )


class _ScoreStruct(ctypes.Structure):
    """`ScoreBatch` of native/logprobs.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("logits", "tokens", "own", "ranks", "top_ids", "top_values")),
        *((name, c_int64) for name in ("rows", "vocab", "logits_stride", "most")),
    )


class NativeDraws:
    """`draw` is a `DrawRows`, `best` a `BestRows` (of several largest the first), `score` a `ScoreRows`; all tensors
    are on the CPU."""

    def __init__(self, library: NativeLibrary) -> None:
        self._functions = library.functions

    def best(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The largest of each row of `logits` (float32 `[S, vocab]`) and its index, int64."""
        rows, vocab = logits.shape
        logits = _in_rows(logits)
        best, index = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
        self._functions.rhizome_best(
            logits.data_ptr(), logits.stride(0), rows, vocab, best.data_ptr(), index.data_ptr()
        )
        return best, index

    def draw(self, logits: Tensor, best: Tensor, params: Tensor, seeds: Tensor, index: Tensor, tokens: Tensor) -> None:
        """See `DrawRows`."""
        logits = _in_rows(logits)
        batch = _BatchStruct(
            logits=logits.data_ptr(),
            best=best.data_ptr(),
            params=params.data_ptr(),
            seeds=seeds.data_ptr(),
            index=index.data_ptr(),
            tokens=tokens.data_ptr(),
            rows=index.shape[1],
            vocab=logits.shape[1],
            logits_stride=logits.stride(0),
            params_stride=params.stride(0),
            index_stride=index.stride(0),
        )
        self._functions.rhizome_draw(ctypes.addressof(batch))

    def score(self, logits: Tensor, tokens: Tensor, most: int) -> Scores:
        """See `ScoreRows`."""
        logits, tokens = _in_rows(logits), tokens.contiguous()
        rows, vocab = logits.shape
        own, ranks = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
        top_ids, top_values = torch.empty(rows, most, dtype=torch.int64), torch.empty(rows, most)
        batch = _ScoreStruct(
            logits=logits.data_ptr(),
            tokens=tokens.data_ptr(),
            own=own.data_ptr(),
            ranks=ranks.data_ptr(),
            top_ids=top_ids.data_ptr(),
            top_values=top_values.data_ptr(),
            rows=rows,
            vocab=vocab,
            logits_stride=logits.stride(0),
            most=most,
        )
        self._functions.rhizome_score(ctypes.addressof(batch))
        return Scores(own, ranks, top_ids, top_values)

    def weights(self, logits: Tensor, temperature: float) -> Tensor:
        """For tests: what one row of logits (float32 `[vocab]`) is drawn from, whole numbers up to `sampler.UNIT`."""
        weights, best = torch.empty_like(logits), float(self.best(logits[None])[0])
        self._functions.rhizome_draw_weights(logits.data_ptr(), len(logits), best, temperature, weights.data_ptr())
        return weights

    def uniform(self, seed: int, position: int) -> float:
        """For tests: `random.uniforms` of one seed and position."""
        return float(self._functions.rhizome_draw_uniform(seed, position))


def _in_rows(logits: Tensor) -> Tensor:
    """The numbers of a row side by side."""
    return logits if logits.stride(1) == 1 else logits.contiguous()
