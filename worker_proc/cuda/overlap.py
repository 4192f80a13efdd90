"""Kernels whose start overlaps the end of the one before them: programmatic dependent launch, on Hopper and later.

Between two short kernels a GPU idles for a microsecond: the last program must end before the first one of the next
kernel is placed. A kernel that calls `take_turn` lets the next one be placed as soon as its own last program is, and
waits itself until the one before it has ended and its results are there to see. Before `take_turn`, it may write
nothing, and read weights and what a step is told (lengths, pages, positions): that is there before the embedding is
looked up, which overlaps with nothing. Every kernel that is launched so must call it. Products with codes are not:
they took half as long again on an H200 when they asked for codes ahead.
(CUDA programming guide, "Programmatic Dependent Launch and Synchronization".)
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MOST_ROWS = 16  # beyond, kernels are long enough that nothing is gained, and waiting programs take room from others


def options(device: torch.device, rows: int = 1) -> dict[str, bool]:
    """How a kernel with a constant `OVERLAP` is launched on `device` for so many rows of tokens."""
    return {"OVERLAP": True, "launch_pdl": True} if rows <= MOST_ROWS and possible(device) else {"OVERLAP": False}


@lru_cache
def possible(device: torch.device) -> bool:
    """Whether the GPU has it."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit  # type: ignore[untyped-decorator]
def take_turn(OVERLAP: tl.constexpr) -> None:
    """Wait for the kernel before, and let the next one come."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit  # type: ignore[untyped-decorator]
def fetch(pointers: tl.tensor) -> None:
    """Bring the lines of 128 bytes at `pointers` to the L2 cache; nobody waits for them."""
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; // $0", "=r,l", [pointers], tl.int32, is_pure=False, pack=1)
