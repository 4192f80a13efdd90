"""Pages of the KV cache in host memory, and the copies of pages that a plan asks for.

A host page holds what all layers have of a page, layer after layer, so that all of them, or some, move in one piece.
On a CPU, device and host are the same memory, and copies are made at once. On a GPU see
`worker_proc/cuda/page_transfer.py`.
"""

import weakref
from collections.abc import Iterator, Sequence
from ctypes import memmove
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from common.fields import IntArray
from worker_proc.attention.interface import LayerLoads
from worker_proc.cpu.memory import HugePages
from worker_proc.kv_cache import KVCache
from worker_proc.staging import Staging


class Way(Enum):
    WITHIN = auto()  # from a device page to a device page
    DOWN = auto()  # to the host
    UP = auto()  # from the host


@dataclass(frozen=True, slots=True)
class Run:
    """Copies the same way, in which no page is written twice or read after it was written: they may go in parallel.
    Host pages are numbered from 0."""

    way: Way
    sources: list[int]
    targets: list[int]


class HostPages:
    """`num_pages` pages of `cache` in host memory, `bytes` uint8 `[num_pages, page_bytes]`; pinned for a GPU as long
    as this object lives, and taken at once. On a CPU the system gives memory when a page is first written."""

    def __init__(self, cache: KVCache, num_pages: int, device: torch.device | str = "cpu") -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages = {num_pages}: a host tier holds at least one page")
        self.num_pages = num_pages
        self.nbytes = num_pages * cache.page_bytes
        self.bytes = HugePages(HugePages.room(self.nbytes)).take(self.nbytes, torch.uint8).view(num_pages, -1)
        if torch.device(device).type == "cuda":
            from worker_proc.cuda.page_transfer import pin, unpin

            pin(self.bytes)
            unpinned = weakref.finalize(self, unpin, self.bytes, torch.device(device))
            unpinned.atexit = False  # the end of a process is that of everything pinned


class PageFormat:
    """Where the parts of a page are: in the tensors of a cache, and in the bytes of a page that moves."""

    def __init__(self, cache: KVCache) -> None:
        self._parts: list[tuple[Tensor, slice]] = []
        self._ends = [0]  # of layers, in `_parts`
        begin = 0
        for layer in zip(*(part for part in (cache.k, cache.v, cache.k_scales, cache.v_scales) if part), strict=True):
            for pages in layer:
                flat = pages.view(len(pages), -1).view(torch.uint8)
                self._parts.append((flat, slice(begin, begin + flat.shape[1])))
                begin += flat.shape[1]
            self._ends.append(len(self._parts))
        self.num_layers = len(self._ends) - 1
        self.page_bytes = begin

    def place(self, layers: range) -> slice:
        """Where `layers`, which follow each other, are in the bytes of a page."""
        parts = self._parts[self._ends[layers.start] : self._ends[layers.stop]]
        return slice(parts[0][1].start, parts[-1][1].stop)

    def gather(self, pages: Tensor, rows: Tensor) -> None:
        """Pages `pages` (int64 `[n]`) of the cache to `rows` (uint8 `[n, page_bytes]`)."""
        for flat, part in self._parts:
            rows[:, part] = flat.index_select(0, pages)

    def scatter(self, rows: Tensor, pages: Tensor, layers: range) -> None:
        """`rows` (uint8 `[n, bytes]`, the bytes of `layers`) to pages `pages` (int64 `[n]`) of the cache."""
        begin = self.place(layers).start
        for flat, part in self._parts[self._ends[layers.start] : self._ends[layers.stop]]:
            flat.index_copy_(0, pages, rows[:, part.start - begin : part.stop - begin])

    def places(self) -> list[tuple[int, int, int, int]]:
        """For each tensor of the cache: the address of page 0, how many bytes further the next page is, how many to
        move, and where they begin in a page that moves."""
        return [(flat.data_ptr(), flat.stride(0), flat.shape[1], part.start) for flat, part in self._parts]


class Transfer(Protocol):
    """Moves pages between a cache and its host pages when `staging` is sent. What is asked for later, here or of the
    device's own stream, sees it done."""

    def down(self, sources: list[int], targets: list[int], staging: Staging) -> None: ...

    def up(self, sources: list[int], targets: list[int], staging: Staging) -> None: ...

    def up_by_layer(self, sources: list[int], targets: list[int], staging: Staging) -> LayerLoads | None:
        """`up`, but what it returns is told when which layers must be there; None where they are there at once. Nothing
        else may be moved until it was told of the last layer."""
        ...


class MemoryTransfer:
    """Both sides are ordinary memory. Pages are moved by address: torch's indexed copies take several times as long."""

    def __init__(self, cache: KVCache, host: HostPages) -> None:
        self._kept = cache, host  # whose memory it is
        self._places = PageFormat(cache).places()
        self._host, self._page_bytes = host.bytes.data_ptr(), cache.page_bytes

    def down(self, sources: list[int], targets: list[int], staging: Staging) -> None:
        staging.then(partial(self._down, sources, targets))

    def up(self, sources: list[int], targets: list[int], staging: Staging) -> None:
        staging.then(partial(self._up, sources, targets))

    def up_by_layer(self, sources: list[int], targets: list[int], staging: Staging) -> None:
        self.up(sources, targets, staging)

    def _down(self, sources: list[int], targets: list[int]) -> None:
        for address, stride, count, begin in self._places:
            for source, target in zip(sources, targets, strict=True):
                memmove(self._host + target * self._page_bytes + begin, address + source * stride, count)

    def _up(self, sources: list[int], targets: list[int]) -> None:
        for address, stride, count, begin in self._places:
            for source, target in zip(sources, targets, strict=True):
                memmove(address + target * stride, self._host + source * self._page_bytes + begin, count)


def make_transfer(cache: KVCache, host: HostPages) -> Transfer:
    device = cache.k[0].device
    if device.type != "cuda":
        return MemoryTransfer(cache, host)
    from worker_proc.cuda.page_transfer import CudaTransfer

    return CudaTransfer(cache, host, device)


class PageCopies:
    """Makes the copies of plans (StepPlan.copies), in their order."""

    def __init__(self, cache: KVCache, host: HostPages | None = None) -> None:
        self._cache = cache
        self._host_pages = host.num_pages if host is not None else 0
        self._transfer = make_transfer(cache, host) if host is not None else None

    def stage(self, copies: IntArray, staging: Staging, *, by_layer: bool = False) -> LayerLoads | None:
        """When `staging` is sent. Raises ValueError at once if a page is outside the cache and the host tier, or a copy
        is from host to host.

        With `by_layer`, the last copies, if they are from the host, may come layer by layer: what is returned must be
        told of all layers before anything else is staged.
        """
        sources, targets = copies[::2].tolist(), copies[1::2].tolist()
        first, end = self._cache.num_pages, self._cache.num_pages + self._host_pages
        if min(*sources, *targets) < 0 or max(*sources, *targets) >= end:
            raise ValueError(f"copies: a page is outside 0..{end - 1}")
        if any(min(pair) >= first for pair in zip(sources, targets, strict=True)):
            raise ValueError(f"copies: both pages are on the host, which begins at {first}")
        several = list(runs(sources, targets, first))
        for number, run in enumerate(several):
            if by_layer and run.way is Way.UP and number == len(several) - 1:
                assert self._transfer is not None
                return self._transfer.up_by_layer(run.sources, run.targets, staging)
            if run.way is Way.WITHIN:
                self._cache.stage_copies(run.sources, run.targets, staging)
                continue
            assert self._transfer is not None
            move = self._transfer.down if run.way is Way.DOWN else self._transfer.up
            move(run.sources, run.targets, staging)
        return None


def runs(sources: Sequence[int], targets: Sequence[int], first: int) -> Iterator[Run]:
    """Copies one after another, as few runs of them as their order allows; pages from number `first` are on the
    host."""
    way, run, written = Way.WITHIN, Run(Way.WITHIN, [], []), set[int]()
    for source, target in zip(sources, targets, strict=True):
        way = Way.DOWN if target >= first else Way.UP if source >= first else Way.WITHIN
        if way is not run.way or target in written or source in written:
            if run.sources:
                yield run
            run, written = Run(way, [], []), set[int]()
        written.add(target)
        run.sources.append(source - first if way is Way.UP else source)
        run.targets.append(target - first if way is Way.DOWN else target)
    if run.sources:
        yield run
