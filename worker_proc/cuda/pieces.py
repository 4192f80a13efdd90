"""Steps with prompts as CUDA graphs, attention aside: a small model's kernels take less time than their launches.

How attention is launched depends on the lengths of a step's rows, and what is between two layers' attention only on how
many tokens there are. So that is what is captured, for some numbers of tokens, as vLLM does ("piecewise CUDA graphs"):
a step replays the pieces for the next larger number, and launches attention between them. Tokens in excess are those
of the scratch page, which no request reads.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from worker_proc.attention.interface import ForwardBatch
from worker_proc.cuda.decoder import CudaDecoder
from worker_proc.kv_cache import KVCache
from worker_proc.models.spec import DecoderSpec

Outputs = tuple[Tensor, Tensor]
Recorder = Callable[[Callable[[], Outputs]], tuple[Callable[[], None], Outputs]]
"""Turns a step into a replay that computes it again, and the outputs that every replay writes to."""

_SMALLEST = 16  # tokens
_LAUNCHES_S = 3e-4  # that the launches of a layer take on the host, measured beside an H100
_RATE = 5e14  # floating-point operations per second of its products


def launch_bound_tokens(spec: DecoderSpec, ranks: int) -> int:
    """The most tokens whose products take no longer than their launches."""
    attention = (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    weights = spec.hidden_size * (attention + 3 * spec.intermediate_size) / ranks
    return int(_LAUNCHES_S * _RATE / (2 * weights))


def piece_sizes(most: int) -> list[int]:
    """Numbers of tokens for which pieces are captured, ascending, up to `most`: eight between a power of two and the
    next, so that less than an eighth is computed in excess."""
    sizes, size = [], _SMALLEST
    while size <= most:
        sizes.append(size)
        size += max(_SMALLEST, 1 << (size.bit_length() - 4))
    return sizes


@dataclass(frozen=True, slots=True)
class _Tokens:
    """What a step tells of its tokens, int64 `[most]` each."""

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor

    @classmethod
    def idle(cls, most: int, cache: KVCache) -> "_Tokens":
        device = cache.k[0].device
        nought = torch.zeros(most, dtype=torch.int64, device=device)
        return cls(nought, nought.clone(), torch.full_like(nought, cache.scratch_page * cache.page_size))

    def some(self, tokens: slice) -> list[Tensor]:
        return [self.token_ids[tokens], self.positions[tokens], self.slot_mapping[tokens]]


class PieceGraphs:
    """The pieces of a model for one cache. Between replays, numbers are where all sizes have them, `most` tokens each:
    the residual stream and what is still to be added to it, queries, and what they have seen."""

    def __init__(self, model: CudaDecoder, cache: KVCache, most: int) -> None:
        self._model = model
        self._cache = cache
        self._sizes = piece_sizes(most)
        largest = self._sizes[-1] if self._sizes else 0
        self._idle, self._tokens = _Tokens.idle(largest, cache), _Tokens.idle(largest, cache)
        heads, spec, dtype = model.shard.heads[1] - model.shard.heads[0], model.spec, model.kv_spec.dtype
        device = cache.k[0].device
        self._x, self._delta = (torch.zeros(largest, spec.hidden_size, dtype=dtype, device=device) for _ in range(2))
        self._q, self._seen = (torch.zeros(largest, heads, spec.head_dim, dtype=dtype, device=device) for _ in range(2))
        self._replays: dict[int, list[Callable[[], None]]] = {}

    @property
    def sizes(self) -> list[int]:
        """Numbers of tokens, ascending."""
        return self._sizes

    def capture(self, size: int, record: Recorder) -> None:
        """Capture the pieces of `size` tokens. Every rank must do so at the same time."""
        here, layers = slice(size), self._model.spec.num_layers
        self._replays[size] = [
            record(lambda index=index: self._piece(index, here))[0]  # type: ignore[misc]
            for index in range(layers + 1)
        ]

    def _piece(self, index: int, here: slice) -> Outputs:
        """What is before the attention of layer `index`, and behind that of the layer before it."""
        model, x, delta = self._model, self._x[here], None
        if index == 0:
            x.copy_(model.embed(self._tokens.token_ids[here]))
        else:
            delta = model.leave(index - 1, x, self._seen[here])
        if index == model.spec.num_layers:
            self._delta[here].copy_(delta)  # type: ignore[arg-type]
        else:
            _, positions, slots = self._tokens.some(here)
            model.enter(index, x, delta, positions, slots, self._cache, out=self._q[here])
        return self._x, self._delta

    def fits(self, batch: ForwardBatch) -> bool:
        """Whether there are pieces for a step."""
        return bool(self._sizes) and 0 < len(batch.token_ids) <= self._sizes[-1]

    def step(self, batch: ForwardBatch) -> Tensor:
        """As `CudaDecoder.step`, for a step that `fits`."""
        model, tokens = self._model, len(batch.token_ids)
        size = self._sizes[bisect_left(self._sizes, tokens)]
        here, rest = slice(tokens), slice(tokens, size)
        torch._foreach_copy_(self._tokens.some(here), [batch.token_ids, batch.positions, batch.slot_mapping])
        if tokens < size:
            torch._foreach_copy_(self._tokens.some(rest), self._idle.some(rest))
        *before, last = self._replays[size]
        for index, replay in enumerate(before):
            if batch.loads is not None:
                batch.loads.before(index)  # a piece writes the keys and values of its layer
            replay()
            model.attend(index, self._q[here], batch, self._cache, out=self._seen[here])
        last()
        return model.finish(self._x[here], self._delta[here], batch)
