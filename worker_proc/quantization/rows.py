"""Numbers become codes and codes become numbers: the definition that the native kernels are tested against."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from worker_proc.errors import ModelError
from worker_proc.quantization.scheme import FP4_NUMBERS, GROUP_MULTIPLE, Scheme

_LEAST = 1e-30  # a group with smaller scales is all zeros
_MOST_FP8 = 448  # what E4M3 holds at most
FACTOR_GROUPS = 8  # groups of 32 inputs that have large factors in common


@dataclass(frozen=True, slots=True)
class ScaleFactors:
    """What scales are made of, and the numbers below zero that codes 0 stand for: `large` float16 `[R, S, 2]` times
    `small` uint8 `[R, G, 2]`, the first of two is the scale's."""

    large: Tensor
    small: Tensor

    def products(self) -> tuple[Tensor, Tensor]:
        """Scales and numbers of code 0, float32 `[R, G]`."""
        large = self.large.float().repeat_interleave(FACTOR_GROUPS, 1)[:, : self.small.shape[1]]
        both = large * self.small
        return both[..., 0], -both[..., 1]

    def select(self, rows: tuple[int, int], cols: tuple[int, int]) -> "ScaleFactors":
        """Those of a block of weights, whose first column is one of 256."""
        of_group, of_large = GROUP_MULTIPLE, FACTOR_GROUPS * GROUP_MULTIPLE
        if cols[0] % of_large:
            raise ValueError(f"columns from {cols[0]} on cut what {of_large} inputs have in common")
        large = self.large[slice(*rows), cols[0] // of_large : -(-cols[1] // of_large)]
        return ScaleFactors(large, self.small[slice(*rows), cols[0] // of_group : -(-cols[1] // of_group)])


def steps_of(scales: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and zeros of groups whose code 0 stands for `least`. Where all numbers of a group are one, its scale is 0
    and its codes are to be 0, which are one step from zero then."""
    scales = torch.where(scales == 0, least, scales)
    scales = torch.where(scales == 0, 1.0, scales)
    return scales, -least / scales


def powers_of_two(exponents: Tensor) -> Tensor:
    """float32 2^(e - 127) of bytes e (E8M0), infinity for 255, which is no number."""
    # float32 has the same exponents, but for the least one, which is a denormal number
    return (exponents.int() << 23).clamp_min_(1 << 22).view(torch.float32)


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Rows of a weight matrix: `codes` uint8 `[R, K]`, `scales` float32 `[R, G]`, and as many `zeros`, or None. Where
    the scheme is ordered, column i is that of input `order[i]` (int64 `[K]`). Where `halved`, codes of 4 bits are
    `[R, K / 2]`, two inputs a byte, the first one in the lower half. `factors` of scales and zeros are given where the
    scheme's form says so."""

    scheme: Scheme
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    order: Tensor | None = None
    halved: bool = False
    factors: ScaleFactors | None = None

    def refuse_not_finite(self, name: str) -> None:
        """Raises ModelError, with the tensor's name, where a scale or a zero is no finite number."""
        if not all(bool(part.isfinite().all()) for part in (self.scales, self.zeros) if part is not None):
            raise ModelError(name, "infinity or NaN", "a scale is not a finite number")

    def whole(self) -> "QuantizedRows":
        """The same with a byte for each code."""
        if not self.halved:
            return self
        codes = torch.stack((self.codes & 15, self.codes >> 4), dim=2).flatten(1)
        return replace(self, codes=codes, halved=False)

    def select(self, rows: tuple[int, int], cols: tuple[int, int]) -> "QuantizedRows":
        """A block. `cols` must be at the borders of groups, all columns where the scheme is ordered."""
        size = self.scheme.group_size
        groups = slice(None) if size is None else slice(cols[0] // size, -(-cols[1] // size))
        zeros = self.zeros[slice(*rows), groups] if self.zeros is not None else None
        columns = slice(cols[0] // 2, cols[1] // 2) if self.halved else slice(*cols)
        scales = self.scales[slice(*rows), groups]
        factors = self.factors.select(rows, cols) if self.factors is not None else None
        return replace(self, codes=self.codes[slice(*rows), columns], scales=scales, zeros=zeros, factors=factors)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """`[R, K]`, by input, computed in float32 and rounded to `dtype`."""
        if self.halved:
            return self.whole().dequantize(dtype)
        inputs = self.codes.shape[1]
        size = self.scheme.group_size or inputs
        scales = self.scales.repeat_interleave(size, 1)[:, :inputs]
        if self.scheme.floating:
            numbers = floating_numbers(self.scheme, self.codes)
        else:
            zeros = self.zeros.repeat_interleave(size, 1)[:, :inputs] if self.zeros is not None else self.scheme.middle
            numbers = self.codes.float() - zeros
        weights = (numbers * scales).to(dtype)
        return weights if self.order is None else weights[:, self.order.argsort()]


def empty_order(scheme: Scheme, inputs: int, device: torch.device | None = None) -> Tensor | None:
    """Room for the order of a matrix's inputs where the scheme has one, for `keep_order`."""
    return torch.full((inputs,), -1, device=device) if scheme.ordered else None


def keep_order(order: Tensor | None, rows: QuantizedRows) -> None:
    """Note down the order of `rows`, which all rows of a matrix have in common. Raises ModelError where they do not."""
    if order is None or rows.order is None:
        if order is not rows.order:
            raise ValueError("rows have an order if, and only if, their matrix has")
        return
    if bool((order == -1).all()):
        order.copy_(rows.order)
    if not torch.equal(order, rows.order.to(order.device)):
        raise ModelError("g_idx", "...", "projections that are computed together must have their inputs in one order")


def floating_numbers(scheme: Scheme, codes: Tensor) -> Tensor:
    """What uint8 `codes` of a floating scheme are before the scale, in float32."""
    if scheme.bits == 4:
        return torch.tensor(FP4_NUMBERS, device=codes.device)[codes.long()]
    return codes.view(torch.float8_e4m3fn).float()


def quantize_rows(rows: Tensor, scheme: Scheme) -> QuantizedRows:
    """Round `rows` `[R, K]` to the nearest codes of a symmetric scheme.

    With 8 bits the largest magnitude of a group becomes 127, or 448 where the scheme is floating. With 4 bits the
    number of the largest magnitude becomes code 0, 8 steps from zero on its side (the other side has 7), as in
    llama.cpp's Q4_0.
    """
    if not scheme.symmetric or (scheme.floating and scheme.bits == 4):
        raise ValueError(f"rows are not quantized to {scheme}")
    count, inputs = rows.shape
    size = scheme.group_size or inputs
    groups = scheme.num_groups(inputs)
    padded = F.pad(rows.float(), (0, groups * size - inputs)).view(count, groups, size)
    low, high = padded.aminmax(dim=2)
    if scheme.bits == 4:
        scales = torch.where(-low > high, -low, -high) / 8
    else:
        scales = torch.maximum(-low, high) / (_MOST_FP8 if scheme.floating else 127)
    scales = torch.where(scales.abs() < _LEAST, 0, scales)
    inverse = torch.where(scales == 0, 0, 1 / scales)
    steps = padded * inverse[:, :, None]
    if scheme.floating:
        codes = steps.clamp_(-_MOST_FP8, _MOST_FP8).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        codes = steps.round_().add_(scheme.middle).clamp_(0, 2**scheme.bits - 1).to(torch.uint8)
    return QuantizedRows(scheme, codes.view(count, -1)[:, :inputs], scales)


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A matrix `[out, in]` that torch dequantizes whenever it is used: the reference of the native kernels."""

    scheme: Scheme
    inputs: int
    codes: Tensor  # uint8 [out, inputs], or [out, inputs / 2] with 4 bits, the even inputs in the low halves
    scales: Tensor  # float32 [out, groups]
    zeros: Tensor | None
    order: Tensor | None  # int64 [inputs], see `QuantizedRows`
    dtype: torch.dtype

    @classmethod
    def empty(
        cls, outputs: int, inputs: int, scheme: Scheme, dtype: torch.dtype, device: torch.device
    ) -> "QuantizedWeight":
        width = -(-inputs // 2) if scheme.bits == 4 else inputs
        codes = torch.zeros(outputs, width, dtype=torch.uint8, device=device)
        scales = torch.zeros(outputs, scheme.num_groups(inputs), device=device)
        zeros = None if scheme.symmetric else torch.zeros_like(scales)
        return cls(scheme, inputs, codes, scales, zeros, empty_order(scheme, inputs, device), dtype)

    def put(self, first: int, rows: QuantizedRows) -> None:
        """Fill the rows from `first` on. Raises ModelError as `keep_order` does."""
        keep_order(self.order, rows)
        codes = rows.whole().codes
        if self.scheme.bits == 4:
            codes = F.pad(codes, (0, codes.shape[1] % 2))
            codes = codes[:, ::2] | codes[:, 1::2] << 4
        here = slice(first, first + len(codes))
        self.codes[here] = codes
        self.scales[here] = rows.scales
        if self.zeros is not None and rows.zeros is not None:
            self.zeros[here] = rows.zeros

    @property
    def nbytes(self) -> int:
        """What a product reads."""
        return self.codes.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x @ weight.T + bias`, with `x` `[T, in]`."""
        return F.linear(x, self.rows(), bias)

    def rows(self, indices: Tensor | None = None) -> Tensor:
        """Rows `indices`, or all, `[R, in]` in `dtype`."""
        pick = slice(None) if indices is None else indices
        codes = self.codes[pick]
        if self.scheme.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), dim=2).flatten(1)[:, : self.inputs]
        zeros = self.zeros[pick] if self.zeros is not None else None
        return QuantizedRows(self.scheme, codes, self.scales[pick], zeros, self.order).dequantize(self.dtype)
