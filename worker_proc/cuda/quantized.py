"""Quantized weights on a GPU, in the layout of linear_kernels.py, and products with them."""

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from worker_proc.cuda.linear_kernels import quantized_linear_kernel, sum_parts_kernel
from worker_proc.errors import ModelError
from worker_proc.quantization.rows import QuantizedRows, empty_order, keep_order
from worker_proc.quantization.scheme import GROUP_MULTIPLE, Scheme

_BLOCKS = (128, 64, 32)  # inputs of a tile, which has one scale per output
_SUM_BLOCK = 1024
_FEW = 64  # rows up to which reading codes takes longer than multiplying
_PROGRAMS_FEW, _PROGRAMS_MANY = 264, 132  # that an H100 or H200 should have to do, on 132 multiprocessors
_LEAST_TILES = 4  # of a program, where inputs are shared out
_MAX_SPLITS = 16
_ROOMY = 160 * 2**10  # bytes of shared memory: the data centre's GPUs since the A100


@dataclass(frozen=True, slots=True)
class Launch:
    """How a product is cut: `each` tiles of inputs a program, in `splits` parts."""

    block_m: int
    block_n: int
    splits: int
    each: int
    warps: int
    stages: int

    @classmethod
    def of(cls, rows: int, outputs: int, tiles: int, dtype: torch.dtype, *, roomy: bool = True) -> "Launch":
        """It depends on shapes only, and up to 16 rows not on their number. `roomy`: programs may take 160 KiB of
        shared memory."""
        wide, few = dtype == torch.float32, rows <= _FEW
        block_m = max(16, triton.next_power_of_2(rows)) if few else 128 if roomy and not wide else 64
        block_n = 64 if few or wide else 128
        programs = triton.cdiv(rows, block_m) * triton.cdiv(outputs, block_n)
        wanted = triton.cdiv(_PROGRAMS_FEW if few else _PROGRAMS_MANY, programs)
        each = triton.cdiv(tiles, max(1, min(wanted, _MAX_SPLITS, tiles // _LEAST_TILES)))
        return cls(
            block_m, block_n, triton.cdiv(tiles, each), each, 4 if few or wide else 8, 2 if wide else 4 if few else 3
        )


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A matrix `[outputs, inputs]` in codes. Fills the place of `QuantizedWeight` where Triton computes."""

    scheme: Scheme
    inputs: int
    block: int  # inputs of a tile
    codes: Tensor  # int8 [outputs, tiles * block * bits / 8]: codes less the middle one, FP8 and FP4 as they are
    scales: Tensor  # float32 [groups, outputs]
    zeros: Tensor | None  # as `scales`, less the middle code
    order: Tensor | None  # int64 [inputs], see `QuantizedRows`
    dtype: torch.dtype

    @classmethod
    def empty(
        cls, outputs: int, inputs: int, scheme: Scheme, dtype: torch.dtype, device: torch.device
    ) -> "PackedWeight":
        """Raises ModelError for groups that cut a tile."""
        group = scheme.group_size
        if group is not None and group % GROUP_MULTIPLE:
            raise ModelError("quantization group size", group, f"must be a multiple of {GROUP_MULTIPLE}")
        block = next(size for size in _BLOCKS if (group or size) % size == 0)
        width = triton.cdiv(inputs, block) * block * scheme.bits // 8
        codes = torch.zeros(outputs, width, dtype=torch.int8, device=device)
        scales = torch.zeros(scheme.num_groups(inputs), outputs, device=device)
        zeros = None if scheme.symmetric else torch.zeros_like(scales)
        return cls(scheme, inputs, block, codes, scales, zeros, empty_order(scheme, inputs, device), dtype)

    @property
    def nbytes(self) -> int:
        """What a product reads."""
        return self.codes.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)

    def put(self, first: int, rows: QuantizedRows) -> None:
        """Fill the rows from `first` on. Raises ModelError as `keep_order` does."""
        keep_order(self.order, rows)
        middle, count = self.scheme.middle, len(rows.codes)
        codes = F.pad(rows.whole().codes, (0, -self.inputs % self.block), value=middle) ^ middle  # two's complement
        if self.scheme.bits == 4:
            halves = codes.view(count, codes.shape[1] // self.block, 2, self.block // 2)
            codes = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
        here = slice(first, first + count)
        self.codes[here] = codes.view(torch.int8)
        self.scales[:, here] = rows.scales.T
        if self.zeros is not None and rows.zeros is not None:
            self.zeros[:, here] = rows.zeros.T - middle

    def rows(self, indices: Tensor | None = None) -> Tensor:
        """Rows `indices`, or all, `[R, in]` in `dtype`."""
        middle, pick = self.scheme.middle, slice(None) if indices is None else indices
        codes = self.codes[pick].view(torch.uint8)
        if self.scheme.bits == 4:
            halves = codes.view(len(codes), -1, self.block // 2)
            codes = torch.stack((halves & 15, halves >> 4), dim=2).flatten(1)
        codes = codes[:, : self.inputs] ^ middle
        zeros = self.zeros.T[pick] + middle if self.zeros is not None else None
        return QuantizedRows(self.scheme, codes, self.scales.T[pick], zeros, self.order).dequantize(self.dtype)

    def row_counts(self, most: int) -> list[int]:
        """Numbers of rows up to `most` whose products launch, between them, every kernel that any such number needs."""
        outputs, tiles = len(self.codes), triton.cdiv(self.inputs, self.block)
        found: dict[tuple[object, ...], int] = {}
        for rows in (*range(1, min(most, _FEW) + 1), *range(_FEW + 1, most + 1, _FEW)):  # in whole blocks of rows
            cut = Launch.of(rows, outputs, tiles, self.dtype, roomy=_is_roomy(self.codes.device))
            found.setdefault((cut.block_m, cut.block_n, cut.warps, cut.stages, cut.splits > 1), rows)
        return list(found.values())

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x @ weight.T + bias` for `x` `[T, in]`: sums in float32, rounded once. Nothing here waits for the GPU."""
        if self.order is not None:
            x = x.index_select(1, self.order)
        x = x if x.stride(1) == 1 else x.contiguous()
        rows, outputs = len(x), len(self.codes)
        tiles = triton.cdiv(self.inputs, self.block)
        out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
        if not rows:
            return out
        cut = Launch.of(rows, outputs, tiles, x.dtype, roomy=_is_roomy(x.device))
        split = cut.splits > 1
        to = torch.empty(cut.splits, rows, outputs, device=x.device) if split else out
        added = self.scales if bias is None else bias  # read where there is one only
        quantized_linear_kernel[triton.cdiv(rows, cut.block_m), triton.cdiv(outputs, cut.block_n), cut.splits](
            x, self.codes, self.scales, self.scales if self.zeros is None else self.zeros, added, to,
            rows, self.inputs, outputs, tiles, cut.each, x.stride(0), self.codes.stride(0),
            self.scheme.bits, self.scheme.floating, self.scheme.group_size or 0,
            self.zeros is not None, bias is not None and not split, self.inputs % self.block == 0,
            cut.block_m, cut.block_n, self.block, num_warps=cut.warps, num_stages=cut.stages,
        )  # fmt: skip
        if split:
            sum_parts_kernel[rows, triton.cdiv(outputs, _SUM_BLOCK)](
                to, added, out, cut.splits, rows, outputs, bias is not None, _SUM_BLOCK
            )
        return out


@lru_cache
def _is_roomy(device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 0) >= _ROOMY
