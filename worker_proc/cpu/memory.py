"""Memory in huge pages: weights are streamed from end to end in every step, and each small page costs a look-up."""

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

HUGE_PAGE = 2**21
_ALIGNMENT = 64


class HugePages:
    """One zeroed block of memory, handed out piece by piece. It lives as long as any piece of it."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, nbytes + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                self._map.madvise(mmap.MADV_HUGEPAGE)
            except OSError:  # a kernel without transparent huge pages
                pass
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        begin = -whole.data_ptr() % HUGE_PAGE
        self._bytes = whole[begin : begin + nbytes]
        self._used = 0

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """A zeroed vector of `count` elements, aligned to 64 bytes. Raises ValueError when the block is used up."""
        begin = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        end = begin + count * dtype.itemsize
        if end > len(self._bytes):
            raise ValueError(f"{end} bytes are wanted of a block of {len(self._bytes)}")
        self._used = end
        return self._bytes[begin:end].view(dtype)

    @staticmethod
    def room(nbytes: int) -> int:
        """What `take` may use for a piece of `nbytes`."""
        return nbytes + _ALIGNMENT


def make_tensors(kinds: Sequence[tuple[tuple[int, ...], torch.dtype]], device: torch.device) -> list[Tensor]:
    """Tensors of these shapes and dtypes that hold anything. On a CPU in huge pages: each step reads many scattered
    pieces of them. All of it is one block, as a block for each would waste up to a huge page of each, and the system
    hands out memory only when a page of it is first written."""
    if device.type != "cpu":
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in kinds]
    counts = [math.prod(shape) for shape, _ in kinds]
    sizes = [count * dtype.itemsize for count, (_, dtype) in zip(counts, kinds, strict=True)]
    memory = HugePages(sum(map(HugePages.room, sizes)))
    return [memory.take(count, dtype).view(shape) for count, (shape, dtype) in zip(counts, kinds, strict=True)]
