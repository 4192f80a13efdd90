"""Pages of the KV cache between a GPU and pinned host memory, beside the stream that computes.

Down: the computing stream gathers pages into a staging buffer, a copy within the GPU; then it goes on, and may write to
those pages, while another stream brings the buffer to the host. Up: a third stream fills a staging buffer from the
host; the computing stream waits for it and spreads it over the pages. Where a step that is not a graph computes with
what comes up, it does so for a quarter of the layers at a time, just before the first of them. The host waits for
nothing.
"""

from collections import deque
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from worker_proc.host_tier import HostPages, PageFormat
from worker_proc.kv_cache import KVCache
from worker_proc.staging import Staged, Staging

STAGING_BYTES = 2**25  # of each of four buffers, two for each direction: one is filled while the other one is emptied
_BUFFERS = 2
_GROUPS = 4  # of layers that come from the host one after another: a wait for each, and a copy for each page and group


def pin(memory: Tensor) -> None:
    """Lock host memory in place, for copies that the GPU makes by itself. torch's own pinned allocations would be
    rounded up to a power of two. Raises torch.cuda.CudaError when the system refuses."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))


def unpin(memory: Tensor, device: torch.device) -> None:
    """Undo `pin` when all that was asked of the GPU `device` is done. Memory that is freed without it counts as pinned
    still, and what the system puts at its address cannot be (CUDA's error 712). Raises torch.cuda.CudaError."""
    torch.cuda.synchronize(device)
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(runtime.cudaHostUnregister(memory.data_ptr()))


@dataclass(slots=True)
class Buffer:
    """A buffer uint8 `[pages, page_bytes]` on the GPU; `free` comes when what was in it has been read."""

    rows: Tensor
    free: Any = None


class CudaTransfer:
    """See the module's docstring. Streams and events are made by `streams`, so that their use can be tested without."""

    def __init__(self, cache: KVCache, host: HostPages, device: torch.device, streams: Any = None) -> None:
        self.format = PageFormat(cache)
        self._kept = host  # which unpins its memory when nobody has it any more
        self._host = host.bytes
        self._streams = streams if streams is not None else CudaStreams(device)
        self._downward, self._upward = self._streams.new(), self._streams.new()
        pages = max(1, STAGING_BYTES // self.format.page_bytes)
        self._pages = pages
        self._buffer_bytes = pages * self.format.page_bytes

        def buffers() -> list[Buffer]:
            shape = (pages, self.format.page_bytes)
            return [Buffer(torch.empty(shape, dtype=torch.uint8, device=device)) for _ in range(_BUFFERS)]

        self._down_buffers, self._up_buffers = buffers(), buffers()
        self._last_down: Any = None  # events: everything asked for so far has reached the host, has left it
        self._last_up: Any = None

    def down(self, sources: list[int], targets: list[int], staging: Staging) -> None:
        staging.then(partial(self._down, staging.put(torch.tensor(sources)), targets))

    def up(self, sources: list[int], targets: list[int], staging: Staging) -> None:
        staging.then(partial(self._up, sources, staging.put(torch.tensor(targets))))

    def _down(self, sources: Staged, targets: list[int]) -> None:
        streams, computing = self._streams, self._streams.current()
        streams.wait(self._downward, self._last_up)  # a host page is not written before it was read
        for begin in range(0, len(targets), self._pages):
            pages, rows = sources.tensor[begin : begin + self._pages], targets[begin : begin + self._pages]
            buffer = self._next(self._down_buffers)
            streams.wait(computing, buffer.free)
            self.gather(pages, buffer)
            streams.wait(self._downward, streams.record(computing))
            with streams.using(self._downward):
                self.to_host(buffer, rows)
            buffer.free = self._last_down = streams.record(self._downward)

    def up_by_layer(self, sources: list[int], targets: list[int], staging: Staging) -> "LayeredLoad":
        load = LayeredLoad(self, sources, staging.put(torch.tensor(targets)), layer_groups(self.format.num_layers))
        staging.then(load.start)
        return load

    def _up(self, sources: list[int], targets: Staged) -> None:
        LayeredLoad(self, sources, targets, [range(self.format.num_layers)]).before(0)

    def gather(self, pages: Tensor, buffer: Buffer) -> None:
        self.format.gather(pages, buffer.rows[: len(pages)])

    def scatter(self, buffer: Buffer, pages: Tensor, layers: range) -> None:
        self.format.scatter(self._part(buffer, layers, len(pages)), pages, layers)

    def to_host(self, buffer: Buffer, rows: list[int]) -> None:
        for at, row in enumerate(rows):
            self._host[row].copy_(buffer.rows[at], non_blocking=True)

    def from_host(self, rows: list[int], buffer: Buffer, layers: range) -> None:
        place, to = self.format.place(layers), self._part(buffer, layers, len(rows))
        for at, row in enumerate(rows):
            to[at].copy_(self._host[row, place], non_blocking=True)

    def _part(self, buffer: Buffer, layers: range, count: int) -> Tensor:
        """The first bytes of a buffer, as those of `layers` of `count` pages."""
        place = self.format.place(layers)
        width = place.stop - place.start
        return buffer.rows.view(-1)[: count * width].view(count, width)

    def pages_at_once(self, layers: range) -> int:
        """Pages of which a buffer holds these layers."""
        place = self.format.place(layers)
        width: int = place.stop - place.start
        return self._buffer_bytes // width

    def take_off(self, rows: list[int], layers: range) -> tuple[Buffer, Any]:
        """Begin to bring some layers of host pages to a buffer, and what to wait for until they are there."""
        streams, buffer = self._streams, self._next(self._up_buffers)
        streams.wait(self._upward, self._last_down)  # a host page is not read before it was written
        streams.wait(self._upward, buffer.free)
        with streams.using(self._upward):
            self.from_host(rows, buffer, layers)
        self._last_up = streams.record(self._upward)
        return buffer, self._last_up

    def land(self, buffer: Buffer, arrived: Any, pages: Tensor, layers: range) -> None:
        """What is in a buffer, or will be, goes to these pages."""
        streams, computing = self._streams, self._streams.current()
        streams.wait(computing, arrived)
        self.scatter(buffer, pages, layers)
        buffer.free = streams.record(computing)

    def _next(self, buffers: list[Buffer]) -> Buffer:
        """The buffer that was used longer ago."""
        buffers.reverse()
        return buffers[0]


class LayeredLoad:
    """Pages that come from the host, first all of them in the first layers, then in the next ones. Implements
    `LayerLoads`: two buffers are filled ahead of what is computed."""

    def __init__(self, transfer: CudaTransfer, sources: list[int], targets: Staged, groups: list[range]) -> None:
        self._transfer, self._sources, self._targets = transfer, sources, targets
        self._to_come = deque[tuple[range, slice]]()  # layers, and which of the pages
        for layers in groups:
            count = transfer.pages_at_once(layers)
            for begin in range(0, len(sources), count):
                self._to_come.append((layers, slice(begin, begin + count)))
        self._flying = deque[tuple[range, slice, Buffer, Any]]()

    def start(self) -> None:
        """Fill what buffers are free."""
        while self._to_come and len(self._flying) < _BUFFERS:
            layers, pages = self._to_come.popleft()
            self._flying.append((layers, pages, *self._transfer.take_off(self._sources[pages], layers)))

    def before(self, layer: int) -> None:
        """See `LayerLoads`."""
        self.start()
        while self._flying and self._flying[0][0].start <= layer:
            layers, pages, buffer, arrived = self._flying.popleft()
            self._transfer.land(buffer, arrived, self._targets.tensor[pages], layers)
            self.start()


def layer_groups(num_layers: int) -> list[range]:
    """Layers that are waited for together."""
    borders = [num_layers * i // _GROUPS for i in range(_GROUPS + 1)]
    return [range(begin, end) for begin, end in pairwise(borders) if begin < end]


class CudaStreams:
    """The streams of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> Any:
        return torch.cuda.current_stream(self._device)

    def new(self) -> Any:
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def record(self, stream: Any) -> Any:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        """What `stream` is told from now on comes after `event`; None is the past."""
        if event is not None:
            stream.wait_event(event)

    def using(self, stream: Any) -> Any:
        return torch.cuda.stream(stream)
