"""Collectives through memory that the ranks of one machine share, for CPUs.

gloo sends every small sum through sockets and threads of its own, about a millisecond each where cores are few. Here a
rank copies its part to its place in the shared memory, raises its counter, and waits until all counters are up; then
everybody adds the parts in rank order, so all ranks hold the same bits.

There are two sets of places, used in turn. A rank writes the set of round n + 2 only after it has seen everybody's
counter of round n + 1, which they raise when they have read round n: nothing is overwritten that is still to be read.
Counters are plain stores, which x86 makes visible in program order, after the data before them; other processors do
not promise that, so they keep gloo (see `supported`).
"""

import mmap
import os
import platform
import select
import time
from pathlib import Path

import torch
from torch import Tensor

_PART_BYTES = 2**20  # of one rank in one set; larger tensors go in pieces
_COUNTER_BYTES = 64  # a cache line each, so that ranks do not disturb each other
_SPINS = 200  # looks at a counter before the core is offered to others
_LOOK_AFTER_PEERS_S = 0.05


def supported() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64") and hasattr(os, "memfd_create")


class SharedMemory:
    """One rank's end. All ranks call the same methods in the same order.

    `path` leads to the memory that rank 0 made with `create`. Every method raises RuntimeError when a peer has died, or
    has not come within `timeout` seconds.
    """

    def __init__(self, path: Path, rank: int, size: int, pids: list[int], timeout: float):
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._round = 0
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), self.bytes_for(size))
        self._counters = memoryview(self._map)[: size * _COUNTER_BYTES].cast("q")
        self._stride = _COUNTER_BYTES // 8
        self._peers = {r: _open_pid(pid) for r, pid in enumerate(pids) if r != rank}

    @staticmethod
    def bytes_for(size: int) -> int:
        return size * (_COUNTER_BYTES + 2 * _PART_BYTES)

    @classmethod
    def create(cls, size: int) -> tuple[int, Path]:
        """Memory without a name in any file system, so that nothing of it can be left behind.

        Returns a descriptor, to be closed when all ranks have opened the path. Raises OSError if it cannot be had.
        """
        handle = os.memfd_create("rhizome-ranks")
        os.ftruncate(handle, cls.bytes_for(size))
        return handle, Path(f"/proc/{os.getpid()}/fd/{handle}")

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace a contiguous tensor by the sum over ranks."""
        flat = tensor.view(-1)
        for piece in torch.split(flat, _PART_BYTES // tensor.element_size()):
            parts = self._exchange(piece)
            torch.add(parts[0], parts[1], out=piece)
            for part in parts[2:]:
                piece += part

    def broadcast(self, tensor: Tensor) -> None:
        """Replace a contiguous tensor by that of rank 0."""
        for piece in torch.split(tensor.view(-1), _PART_BYTES // tensor.element_size()):
            parts = self._exchange(piece, writes=self._rank == 0)
            if self._rank != 0:
                piece.copy_(parts[0])

    def gather(self, tensor: Tensor) -> list[Tensor] | None:
        """The contiguous tensors of all ranks, on rank 0; None elsewhere."""
        flat = tensor.view(-1)
        gathered = [torch.empty_like(flat) for _ in range(self._size)] if self._rank == 0 else []
        at = 0
        for piece in torch.split(flat, _PART_BYTES // tensor.element_size()):
            parts = self._exchange(piece)
            for whole, part in zip(gathered, parts, strict=False):
                whole[at : at + len(piece)] = part
            at += len(piece)
        return [whole.view(tensor.shape) for whole in gathered] if self._rank == 0 else None

    def _exchange(self, piece: Tensor, *, writes: bool = True) -> list[Tensor]:
        """Show `piece` to all, wait for all, and return everybody's, to be read before the next call."""
        if piece.numel() == 0:  # a step that samples nothing has no logits; all ranks know that, so none waits
            return [piece] * self._size
        self._round += 1
        places = [self._place(rank, piece) for rank in range(self._size)]
        if writes:
            places[self._rank].copy_(piece)
        self._counters[self._rank * self._stride] = self._round
        for rank in self._peers:
            self._wait_for(rank)
        return places

    def _place(self, rank: int, like: Tensor) -> Tensor:
        begin = self._size * _COUNTER_BYTES + (2 * rank + self._round % 2) * _PART_BYTES
        return torch.frombuffer(self._map, dtype=like.dtype, count=like.numel(), offset=begin)

    def _wait_for(self, rank: int) -> None:
        counters, at, awaited = self._counters, rank * self._stride, self._round
        for _ in range(_SPINS):
            if counters[at] >= awaited:
                return
        deadline = time.monotonic() + self._timeout
        look = time.monotonic() + _LOOK_AFTER_PEERS_S
        while counters[at] < awaited:
            os.sched_yield()
            now = time.monotonic()
            if now >= look:
                look = now + _LOOK_AFTER_PEERS_S
                if self._has_died(rank) and counters[at] < awaited:
                    raise RuntimeError(f"rank {rank} has died")
                if now >= deadline:
                    raise RuntimeError(f"rank {rank} did not come to a collective within {self._timeout:g} s")

    def _has_died(self, rank: int) -> bool:
        handle = self._peers[rank]
        return handle is not None and bool(select.select([handle], [], [], 0)[0])


def _open_pid(pid: int) -> int | None:
    """A handle that becomes readable when the process ends; None where the kernel has no such thing."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None
