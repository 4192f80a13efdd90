"""Steps as CUDA graphs. One of n decodes replays the smallest graph that holds so many, its other rows idle; others
replay what is between their attention, see pieces.py, where the decoder is the GPU's own.

A row without a request decodes token 0 at position 0 of the scratch page, on the scratch state, which nobody reads: it
can change no result but its own, which is cut off.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from worker_proc.attention.interface import TILE_COLUMNS, ForwardBatch, SharedPages
from worker_proc.cuda.decoder import CudaDecoder
from worker_proc.cuda.interface import CudaAttention
from worker_proc.cuda.pieces import Outputs, PieceGraphs, Recorder, launch_bound_tokens
from worker_proc.kv_cache import KVCache, KVSpec
from worker_proc.models.loading import Progress
from worker_proc.recurrent import StateRows
from worker_proc.shared_pages import max_tiles

_SHARED_FROM = 8  # rows of the smallest graph for decodes that share pages; fewer read theirs one by one
_LARGEST = 256  # rows; beyond, kernels run long enough to hide their launches


def graph_sizes(max_rows: int) -> list[int]:
    """Rows for which graphs are captured, ascending; the last one is `max_rows` or `_LARGEST`."""
    largest = min(max_rows, _LARGEST)
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, _LARGEST + 1, 16)]
    return [size for size in steps if size < largest] + [largest]


def kept_bytes(max_rows: int, vocab_size: int, dtype: torch.dtype, columns: int, *, shares_pages: bool) -> int:
    """Memory of the logits of all graphs, which each keeps from one replay to the next, and of their page table."""
    sizes = graph_sizes(max_rows)
    rows = sum(size * len(_kinds(size, shares_pages)) for size in sizes)
    return rows * vocab_size * dtype.itemsize + sizes[-1] * columns * torch.int64.itemsize


def _kinds(size: int, shares_pages: bool) -> tuple[bool, ...]:
    """Whether decodes share pages, for each graph of this size."""
    return (False, True) if shares_pages and size >= _SHARED_FROM else (False,)


# what it reads, the replay, and what that writes to: logits `[rows, vocab]`, likeliest tokens int64 `[rows]`
_Graph = tuple[ForwardBatch, Callable[[], None], Outputs]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a captured step reads, for as many rows as the largest graph."""

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    kv_lens: Tensor
    page_table: Tensor
    skipped: Tensor
    levels: Tensor
    tiles: Tensor
    states: Tensor | None  # of models with recurrent layers

    @classmethod
    def idle(cls, rows: int, columns: int, cache: KVCache) -> "StepInputs":
        device = cache.device

        def column(value: int) -> Tensor:
            return torch.full((rows,), value, dtype=torch.int64, device=device)

        table = torch.full((rows, columns), cache.scratch_page, dtype=torch.int64, device=device)
        tiles = torch.zeros(max_tiles(rows), TILE_COLUMNS, dtype=torch.int64, device=device)
        slots = column(cache.scratch_page * cache.page_size)
        states = column(cache.states.scratch) if cache.states is not None else None
        return cls(column(0), column(0), slots, column(1), table, column(0), column(0), tiles, states)

    def vectors(self, rows: slice) -> list[Tensor]:
        vectors = [self.token_ids[rows], self.positions[rows], self.slot_mapping[rows], self.kv_lens[rows]]
        return vectors if self.states is None else [*vectors, self.states[rows]]

    def batch(self, rows: int, *, shared: bool) -> ForwardBatch:
        everyone = slice(rows)
        return ForwardBatch(
            token_ids=self.token_ids[everyone],
            positions=self.positions[everyone],
            slot_mapping=self.slot_mapping[everyone],
            page_table=self.page_table[everyone],
            kv_lens=self.kv_lens[everyone],
            q_lens=[1] * rows,
            kv_lens_host=[],  # differ from replay to replay, and no kernel needs them
            num_prefill_rows=0,
            logit_rows=torch.arange(rows, device=self.token_ids.device),
            shared=self._shared(rows) if shared else None,
            states=StateRows([], index=self.states[everyone]) if self.states is not None else None,
        )

    def _shared(self, rows: int) -> SharedPages:
        return SharedPages(self.skipped[:rows], self.levels[:rows], self.tiles[: max_tiles(rows)])


class DecodeGraphs:
    """Steps of up to `max_rows` decodes and nothing else as graphs, for one cache. `step` must be free of everything
    that a CUDA graph cannot capture."""

    def __init__(
        self,
        step: Callable[[ForwardBatch, KVCache], Outputs],
        attention: CudaAttention,
        max_rows: int,
        context_len: int,
        *,
        shares_pages: bool,
    ) -> None:
        self.sizes = graph_sizes(max_rows)
        self.graphs: dict[tuple[int, bool], _Graph] = {}  # by rows, and whether they share pages
        self.inputs: StepInputs
        self.cache: KVCache | None = None  # that the graphs are for
        self._step = step
        self._attention = attention
        self._context_len = context_len
        self._shares_pages = shares_pages
        self._idle: StepInputs

    def captures(self, cache: KVCache, record: Recorder) -> list[Callable[[], None]]:
        """What captures one graph after the other, the largest first, so that the others fit in its memory."""
        columns = -(-self._context_len // cache.page_size)
        self._idle, self.inputs = (StepInputs.idle(self.sizes[-1], columns, cache) for _ in range(2))
        self.cache = cache
        wanted = [(size, shared) for size in reversed(self.sizes) for shared in _kinds(size, self._shares_pages)]
        return [partial(self._capture, size, shared, cache, record) for size, shared in wanted]

    def _capture(self, size: int, shared: bool, cache: KVCache, record: Recorder) -> None:
        batch = self.inputs.batch(size, shared=shared)
        self._attention.bind(batch)
        self.graphs[size, shared] = (batch, *record(partial(self._step, batch, cache)))

    def replay(self, batch: ForwardBatch, cache: KVCache) -> Outputs | None:
        """Logits and best tokens of a step of decodes alone; None for any other."""
        rows, states = len(batch.q_lens), batch.states
        decodes = not batch.num_prefill_rows and len(batch.token_ids) == len(batch.logit_rows) == rows
        if cache is not self.cache or not decodes or rows > self.sizes[-1] or batch.loads is not None:
            return None
        if cache.states is not None and (states is None or states.index is None):
            return None
        size = self.sizes[bisect_left(self.sizes, rows)]
        shared = batch.shared is not None and (size, True) in self.graphs
        self.fill(batch, size)
        bound, replay, (logits, best) = self.graphs[size, shared]
        self._attention.replan(bound, cache, [*batch.kv_lens_host, *[1] * (size - rows)])
        replay()
        if cache.states is not None and states is not None:
            cache.states.keep(states)
        return logits[:rows], best[:rows]

    def fill(self, batch: ForwardBatch, size: int) -> None:
        """Lay the rows of `batch` out for the graph of `size` rows, and make the rest of them idle."""
        rows = len(batch.q_lens)
        theirs, rest = slice(rows), slice(rows, size)
        vectors = [batch.token_ids, batch.positions, batch.slot_mapping, batch.kv_lens]
        if batch.states is not None and batch.states.index is not None:
            vectors.append(batch.states.index)
        torch._foreach_copy_(self.inputs.vectors(theirs), vectors)
        self.inputs.page_table[theirs, : batch.page_table.shape[1]].copy_(batch.page_table)
        if rows < size:
            torch._foreach_copy_(self.inputs.vectors(rest), self._idle.vectors(rest))
            self.inputs.page_table[rest, :1].copy_(self._idle.page_table[rest, :1])
        if batch.shared is not None:
            inputs, used = self.inputs, len(batch.shared.tiles)
            inputs.skipped[theirs].copy_(batch.shared.skipped)
            inputs.levels[theirs].copy_(batch.shared.levels)
            inputs.skipped[rest].zero_()
            inputs.levels[rest].zero_()
            inputs.tiles[:used].copy_(batch.shared.tiles)
            inputs.tiles[used : max_tiles(size)].zero_()  # a tile without tokens is idle


class GraphedDecoder:
    """A `CudaDecoder` whose steps are replayed. Implements `GreedyModel`.

    A step that loads pages from the host is not replayed as a whole, so that it can wait for them layer by layer.
    `record` is for tests without a GPU."""

    def __init__(
        self,
        model: CudaDecoder,
        max_rows: int,
        context_len: int,
        record: Recorder | None = None,
        *,
        max_tokens: int = 0,
    ) -> None:
        """For steps of up to `max_rows` decodes, and others of up to `max_tokens` tokens, which are captured as far as
        launches would take longer than kernels."""
        self._model = model
        self._max_tokens = min(max_tokens, launch_bound_tokens(model.spec, model.shard.size))
        self._pieces: PieceGraphs | None = None
        self._record = record
        shares = model.attention.shares_pages
        self._decodes = DecodeGraphs(self._step, model.attention, max_rows, context_len, shares_pages=shares)

    @property
    def kv_spec(self) -> KVSpec:
        """See `LanguageModel`."""
        return self._model.kv_spec

    @property
    def attention(self) -> CudaAttention:
        """That of the model."""
        return self._model.attention

    @property
    def vocab_size(self) -> int:
        """See `LanguageModel`."""
        return self._model.vocab_size

    @torch.inference_mode()
    def capture(self, cache: KVCache, progress: Progress | None = None) -> None:
        """Capture all graphs for `cache`.

        `progress(done, total)` counts graphs. Every rank must capture at the same time.
        """
        self._pieces = pieces = PieceGraphs(self._model, cache, self._max_tokens)
        with recorder(cache.device, self._record) as record:
            tasks = self._decodes.captures(cache, record)
            tasks += [partial(pieces.capture, size, record) for size in reversed(pieces.sizes)]
            do_all(tasks, progress)

    def _step(self, batch: ForwardBatch, cache: KVCache) -> Outputs:
        logits = self._model.step(batch, cache)
        return logits, logits.argmax(-1)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """See `LanguageModel`."""
        replayed = self._decodes.replay(batch, cache)
        if replayed is None:
            return self._others(batch, cache).float()
        return replayed[0].float()

    @torch.inference_mode()
    def greedy(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """See `GreedyModel`."""
        replayed = self._decodes.replay(batch, cache)
        if replayed is None:
            return self._others(batch, cache).argmax(-1)
        return replayed[1].clone()  # the next replay writes over it

    def _others(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Logits of a step that is not one of decodes alone, or has too many of them."""
        if self._pieces is not None and cache is self._decodes.cache and self._pieces.fits(batch):
            return self._pieces.step(batch)
        return self._model.step(batch, cache)


def do_all(tasks: Sequence[Callable[[], object]], progress: Progress | None) -> None:
    """One after the other; `progress(done, total)` counts them."""
    for done, task in enumerate(tasks):
        if progress is not None:
            progress(done, len(tasks))
        task()
    if progress is not None:
        progress(len(tasks), len(tasks))


@contextmanager
def recorder(device: torch.device, instead: Recorder | None = None) -> Iterator[Recorder]:
    """Records CUDA graphs that share one memory pool; or what is given `instead`, for tests without a GPU."""
    if instead is not None:
        yield instead
        return
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(step: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):  # compiles kernels and makes workspaces, which must not be captured
            step()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            outputs = step()
        return graph.replay, outputs

    yield record
    torch.cuda.synchronize(device)
