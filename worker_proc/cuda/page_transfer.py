"""Pages of the KV cache between a GPU and pinned host memory, beside the stream that computes.

Down: the computing stream gathers pages into a staging buffer, a copy within the GPU; then it goes on, and may write to
those pages, while another stream brings the buffer to the host. Up: a third stream fills a staging buffer from the
host; the computing stream waits for it and spreads it over the pages. The host waits for nothing.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from worker_proc.host_tier import HostPages, PageFormat
from worker_proc.kv_cache import KVCache
from worker_proc.staging import Staged, Staging

STAGING_BYTES = 2**25  # of each of four buffers, two for each direction: one is filled while the other one is emptied


def pin(memory: Tensor) -> None:
    """Lock host memory in place, for copies that the GPU makes by itself. torch's own pinned allocations would be
    rounded up to a power of two. Raises torch.cuda.CudaError when the system refuses."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))


@dataclass(slots=True)
class Buffer:
    """A buffer uint8 `[pages, page_bytes]` on the GPU; `free` comes when what was in it has been read."""

    rows: Tensor
    free: Any = None


class CudaTransfer:
    """See the module's docstring. Streams and events are made by `streams`, so that their use can be tested without."""

    def __init__(self, cache: KVCache, host: HostPages, device: torch.device, streams: Any = None) -> None:
        self._format = PageFormat(cache)
        self._host = host.bytes
        self._streams = streams if streams is not None else CudaStreams(device)
        self._downward, self._upward = self._streams.new(), self._streams.new()
        pages = max(1, STAGING_BYTES // self._format.page_bytes)
        self._pages = pages

        def buffers() -> list[Buffer]:
            shape = (pages, self._format.page_bytes)
            return [Buffer(torch.empty(shape, dtype=torch.uint8, device=device)) for _ in range(2)]

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

    def _up(self, sources: list[int], targets: Staged) -> None:
        streams, computing = self._streams, self._streams.current()
        streams.wait(self._upward, self._last_down)  # a host page is not read before it was written
        for begin in range(0, len(sources), self._pages):
            rows, pages = sources[begin : begin + self._pages], targets.tensor[begin : begin + self._pages]
            buffer = self._next(self._up_buffers)
            streams.wait(self._upward, buffer.free)
            with streams.using(self._upward):
                self.from_host(rows, buffer)
            self._last_up = streams.record(self._upward)
            streams.wait(computing, self._last_up)
            self.scatter(buffer, pages)
            buffer.free = streams.record(computing)

    def gather(self, pages: Tensor, buffer: Buffer) -> None:
        self._format.gather(pages, buffer.rows[: len(pages)])

    def scatter(self, buffer: Buffer, pages: Tensor) -> None:
        self._format.scatter(buffer.rows[: len(pages)], pages)

    def to_host(self, buffer: Buffer, rows: list[int]) -> None:
        for at, row in enumerate(rows):
            self._host[row].copy_(buffer.rows[at], non_blocking=True)

    def from_host(self, rows: list[int], buffer: Buffer) -> None:
        for at, row in enumerate(rows):
            buffer.rows[at].copy_(self._host[row], non_blocking=True)

    def _next(self, buffers: list[Buffer]) -> Buffer:
        """The buffer that was used longer ago."""
        buffers.reverse()
        return buffers[0]


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
