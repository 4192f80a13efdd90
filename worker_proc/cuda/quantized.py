"""Quantized weights on a GPU, in the layout of linear_kernels.py, and products with them."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from worker_proc.cuda.attention import is_roomy
from worker_proc.cuda.linear_kernels import TILE, quantized_linear_kernel, sum_parts_kernel, widen_kernel
from worker_proc.errors import ModelError
from worker_proc.quantization.rows import QuantizedRows, empty_order, keep_order
from worker_proc.quantization.scheme import GROUP_MULTIPLE, Scheme

_TILE: int = TILE.value  # inputs that a program widens together
_QUARTER = _TILE // 4  # of them, which have one scale per output at least
_SUM_BLOCK = 1024
_WIDEN_BLOCK = 64
_FEW = 64  # rows up to which reading codes takes longer than multiplying
_MANY = 512  # rows from which on it is quicker to widen all weights first, in 16 bits, and to leave the rest to cuBLAS
# programs that an H100 or H200 should have to do, on 132 multiprocessors
_PROGRAMS_FEW, _PROGRAMS_FINE, _PROGRAMS_MANY = 264, 528, 132
_LEAST_TILES = 4  # of a program, where inputs are shared out
_MAX_SPLITS = 16


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
    def of(
        cls, rows: int, outputs: int, tiles: int, dtype: torch.dtype, *, group: int = 0, roomy: bool = True
    ) -> "Launch":
        """It depends on shapes only, and up to 16 rows not on their number. `group`: inputs of a scale, see
        `held_group`. `roomy`: see `is_roomy`. Sizes are from `python -m bench.gpu.tune`."""
        wide, fine = dtype == torch.float32, group in (_QUARTER, 2 * _QUARTER)  # several scales a tile
        most = 128 if roomy and not wide and not fine else _FEW
        block_m, block_n = min(most, max(16, triton.next_power_of_2(rows))), 64
        programs = _PROGRAMS_MANY if rows > _FEW else _PROGRAMS_FINE if fine else _PROGRAMS_FEW
        return cls.cut(rows, outputs, tiles, block_m, block_n, 4, 2 if wide else 3, programs)

    @classmethod
    def cut(
        cls, rows: int, outputs: int, tiles: int, block_m: int, block_n: int, warps: int, stages: int, programs: int
    ) -> "Launch":
        """Inputs shared out so that there are about `programs` to run."""
        parts = triton.cdiv(programs, triton.cdiv(rows, block_m) * triton.cdiv(outputs, block_n))
        each = triton.cdiv(tiles, max(1, min(parts, _MAX_SPLITS, tiles // _LEAST_TILES)))
        return cls(block_m, block_n, triton.cdiv(tiles, each), each, warps, stages)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A matrix `[outputs, inputs]` in codes. Fills the place of `QuantizedWeight` where Triton computes."""

    scheme: Scheme
    inputs: int
    codes: Tensor  # int32 [outputs, words]: codes less the middle one, FP8 and FP4 as they are
    scales: Tensor  # float32 [groups, outputs], of `group` inputs each
    zeros: Tensor | None  # as `scales`, less the middle code
    order: Tensor | None  # int64 [inputs], see `QuantizedRows`
    dtype: torch.dtype

    @classmethod
    def empty(
        cls, outputs: int, inputs: int, scheme: Scheme, dtype: torch.dtype, device: torch.device
    ) -> "PackedWeight":
        """Raises ModelError for groups that cut a quarter of a tile."""
        if scheme.group_size is not None and scheme.group_size % GROUP_MULTIPLE:
            raise ModelError("quantization group size", scheme.group_size, f"must be a multiple of {GROUP_MULTIPLE}")
        words = triton.cdiv(inputs, _TILE) * _TILE * scheme.bits // 32
        codes = torch.zeros(outputs, words, dtype=torch.int32, device=device)
        group = held_group(scheme)
        groups = triton.cdiv(inputs, group) if group else 1
        scales = torch.zeros(groups, outputs, device=device)
        zeros = None if scheme.symmetric else torch.zeros_like(scales)
        return cls(scheme, inputs, codes, scales, zeros, empty_order(scheme, inputs, device), dtype)

    @property
    def nbytes(self) -> int:
        """What a product reads."""
        return self.codes.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)

    @property
    def group(self) -> int:
        """Inputs of a scale that is held, 0 where all have one."""
        return held_group(self.scheme)

    @property
    def _repeats(self) -> int:
        """How often a scale is held."""
        return (self.scheme.group_size or 1) // (self.group or 1)

    def put(self, first: int, rows: QuantizedRows) -> None:
        """Fill the rows from `first` on. Raises ModelError as `keep_order` does."""
        keep_order(self.order, rows)
        middle, count, bits = self.scheme.middle, len(rows.codes), self.scheme.bits
        codes = F.pad(rows.whole().codes, (0, -self.inputs % _TILE), value=middle) ^ middle  # two's complement
        tiles = codes.shape[1] // _TILE
        slices = codes.view(count, tiles, 32 // bits, _TILE * bits // 32).transpose(2, 3)  # tiles, words, codes of each
        if bits == 4:
            slices = slices[..., 0::2] | slices[..., 1::2] << 4
        here = slice(first, first + count)
        self.codes[here] = slices.clone(memory_format=torch.contiguous_format).view(torch.int32).flatten(1)
        held = len(self.scales)
        self.scales[:, here] = rows.scales.T.repeat_interleave(self._repeats, 0)[:held]
        if self.zeros is not None and rows.zeros is not None:
            self.zeros[:, here] = rows.zeros.T.repeat_interleave(self._repeats, 0)[:held] - middle

    def rows(self, indices: Tensor | None = None) -> Tensor:
        """Rows `indices`, or all, `[R, in]` in `dtype`."""
        middle, bits = self.scheme.middle, self.scheme.bits
        pick = slice(None) if indices is None else indices
        codes = self.codes[pick]
        tiles = triton.cdiv(self.inputs, _TILE)
        slices = codes.view(torch.uint8).view(len(codes), tiles, _TILE * bits // 32, 4)
        if bits == 4:
            slices = torch.stack((slices & 15, slices >> 4), dim=4).flatten(3)
        whole = slices.transpose(2, 3).flatten(1)[:, : self.inputs] ^ middle
        zeros = self.zeros[:: self._repeats].T[pick] + middle if self.zeros is not None else None
        scales = self.scales[:: self._repeats].T[pick]
        return QuantizedRows(self.scheme, whole, scales, zeros, self.order).dequantize(self.dtype)

    def row_counts(self, most: int) -> list[int]:
        """Numbers of rows up to `most` whose products launch, between them, every kernel that any such number needs."""
        found: dict[tuple[object, ...], int] = {}
        for rows in (*range(1, min(most, _FEW) + 1), *range(_FEW + 1, most + 1, _FEW)):  # in whole blocks of rows
            if self._widens(rows):
                found.setdefault(("widened",), rows)
                break
            cut = self._cut(rows)
            found.setdefault((cut.block_m, cut.block_n, cut.warps, cut.stages, cut.splits > 1), rows)
        return list(found.values())

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x @ weight.T + bias` for `x` `[T, in]`: sums in float32, rounded once; of many rows with
        rounded weights. Nothing here waits for the GPU."""
        if self.order is not None:
            x = x.index_select(1, self.order)
        x = x if x.stride(1) == 1 else x.contiguous()
        rows, outputs = len(x), len(self.codes)
        if not rows:
            return torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
        if self._widens(rows):
            return F.linear(x, self.widened(), bias)
        return self.multiply(x, bias, self._cut(rows))

    def _cut(self, rows: int) -> Launch:
        tiles, roomy = triton.cdiv(self.inputs, _TILE), is_roomy(self.codes.device)
        return Launch.of(rows, len(self.codes), tiles, self.dtype, group=self.group, roomy=roomy)

    def _widens(self, rows: int) -> bool:
        return rows >= _MANY and self.dtype != torch.float32

    def multiply(self, x: Tensor, bias: Tensor | None, cut: Launch) -> Tensor:
        """`linear` for inputs in order and at least one row, cut in a given way."""
        rows, outputs, tiles = len(x), len(self.codes), triton.cdiv(self.inputs, _TILE)
        out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
        split = cut.splits > 1
        to = torch.empty(cut.splits, rows, outputs, device=x.device) if split else out
        added = self.scales if bias is None else bias  # read where there is one only
        quantized_linear_kernel[triton.cdiv(rows, cut.block_m), triton.cdiv(outputs, cut.block_n), cut.splits](
            x, self.codes, self.scales, self.scales if self.zeros is None else self.zeros, added, to,
            rows, self.inputs, outputs, tiles, cut.each, x.stride(0), self.codes.stride(0),
            self.scheme.bits, self.scheme.floating, self.group,
            self.zeros is not None, bias is not None and not split, self.inputs % _TILE == 0,
            cut.block_m, cut.block_n, num_warps=cut.warps, num_stages=cut.stages,
        )  # fmt: skip
        if split:
            sum_parts_kernel[rows, triton.cdiv(outputs, _SUM_BLOCK)](
                to, added, out, cut.splits, rows, outputs, bias is not None, _SUM_BLOCK
            )
        return out

    def widened(self) -> Tensor:
        """All weights, inputs in the order of codes, `[outputs, inputs]` in `dtype`."""
        outputs = len(self.codes)
        out = torch.empty(outputs, self.inputs, dtype=self.dtype, device=self.codes.device)
        widen_kernel[triton.cdiv(self.inputs, _TILE), triton.cdiv(outputs, _WIDEN_BLOCK)](
            self.codes, self.scales, self.scales if self.zeros is None else self.zeros, out,
            self.inputs, outputs, self.codes.stride(0),
            self.scheme.bits, self.scheme.floating, self.group, self.zeros is not None, _WIDEN_BLOCK,
        )  # fmt: skip
        return out


def held_group(scheme: Scheme) -> int:
    """Inputs of a scale as kernels have it: those of the scheme, or a quarter of a tile where they do not fit tiles; 0
    where all have one."""
    group = scheme.group_size
    if group is None:
        return 0
    return group if group % _TILE == 0 or _TILE % group == 0 else _QUARTER
