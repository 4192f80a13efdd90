"""Sums over GPUs that read each other's memory: what tensor parallelism adds up in a decode is small for NCCL's rings.

torch's symmetric memory (`torch.distributed._symmetric_memory`, alpha) holds a buffer of which every rank can read all
copies. One shot: each rank reads all copies and adds. Two shots: each adds its share, then all read the shares. With
multicast, the switch adds (multimem). All of them wait for the others on the device, on the stream of the step.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed
from torch import Tensor

log = logging.getLogger(__name__)

_Made = TypeVar("_Made")

DTYPES = (torch.float32, torch.bfloat16)  # of which torch's kernels know the sum
_BYTES = 2**23  # of the buffer: 1,024 tokens of a hidden size of 4,096 in bfloat16
_ONE_SHOT_BYTES = 2**18  # beyond, reading every copy whole costs more than a second exchange
_ALIGNMENT = 16  # bytes that a thread moves at once
_MULTICAST_RANKS = 4  # with fewer, the switch adds too little


class SymmetricSum:
    """The sum over the ranks of a group, for tensors that `takes` accepts. All ranks must ask for the same sums."""

    def __init__(self, buffer: Tensor, group: str, size: int, *, multicast: bool, ops: Any = None) -> None:
        """`buffer` is uint8, the same on each of `size` ranks; `ops` is torch.ops.symm_mem."""
        self._buffer = buffer
        self._group = group
        self._multicast = multicast and size >= _MULTICAST_RANKS
        self._ops = torch.ops.symm_mem if ops is None else ops

    @classmethod
    def connect(
        cls, group: Any, rank: int, size: int, device: torch.device, agree: Callable[[int], int]
    ) -> "SymmetricSum | None":
        """For the ranks of `group`, all on this machine, or None on all of them. `agree` gives the smallest number that
        a rank passes to it: each step waits for all ranks, so nobody goes on to one that another has not reached."""
        if not agree(int(_reachable(size, device))):
            return None
        buffer = _attempt(partial(_allocate, device))
        if not agree(int(buffer is not None)):
            return None
        assert buffer is not None
        made = _attempt(partial(cls._join, buffer, group, size))
        if not agree(int(made is not None)):
            return None
        assert made is not None
        right = _attempt(partial(made._is_right, rank, size, device))
        return made if agree(int(bool(right))) else None

    @classmethod
    def _join(cls, buffer: Tensor, group: Any, size: int) -> "SymmetricSum":
        import torch.distributed._symmetric_memory as symmetric

        handle = symmetric.rendezvous(buffer, group.group_name)
        return cls(buffer, group.group_name, size, multicast=bool(getattr(handle, "multicast_ptr", 0)))

    def _is_right(self, rank: int, size: int, device: torch.device) -> bool:
        """Whether sums of both sizes are what they should be. All are made before one is looked at: for the others'
        sake, who wait on the device."""
        counts = (64, _ONE_SHOT_BYTES)  # numbers of four bytes
        sums = [self.all_reduce(torch.full((count,), float(rank + 1), device=device)) for count in counts]
        right = all(bool((found == size * (size + 1) / 2).all()) for found in sums)
        if not right:
            log.warning("sums through symmetric memory are wrong, they go through NCCL")
        return right

    def takes(self, tensor: Tensor) -> bool:
        """Whether the sum of such tensors can be had here."""
        size = tensor.nbytes
        return tensor.dtype in DTYPES and 0 < size <= len(self._buffer) and size % _ALIGNMENT == 0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Replace `tensor` (contiguous, see `takes`) by the sum over ranks, and return it."""
        shared = self._buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        shared.copy_(tensor)
        if self._multicast:
            self._ops.multimem_all_reduce_(shared, "sum", self._group)
        elif tensor.nbytes <= _ONE_SHOT_BYTES:
            self._ops.one_shot_all_reduce_out(shared, "sum", self._group, tensor)
            return tensor
        else:
            self._ops.two_shot_all_reduce_(shared, "sum", self._group)
        return tensor.copy_(shared)


def _attempt(step: Callable[[], _Made]) -> _Made | None:
    """None where it fails."""
    try:
        return step()
    except Exception as error:  # drivers, container limits and torch's alpha API all have their own errors
        log.warning("no symmetric memory between GPUs, sums go through NCCL: %s", error)
        return None


def _allocate(device: torch.device) -> Tensor:
    import torch.distributed._symmetric_memory as symmetric

    buffer: Tensor = symmetric.empty(_BYTES, dtype=torch.uint8, device=device)
    return buffer


def _reachable(size: int, device: torch.device) -> bool:
    """Whether GPUs 0 .. size - 1 can read each other's memory, and are Hopper's or newer."""
    if device.type != "cuda" or torch.cuda.device_count() < size or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    others = (other for other in range(size) if other != device.index)
    return all(torch.cuda.can_device_access_peer(device.index, other) for other in others)
