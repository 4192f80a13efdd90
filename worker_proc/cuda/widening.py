"""Words of codes become numbers in registers, right before they are multiplied.

A word has 32 bits and four codes of 8 bits or eight of 4, lowest bits first. They belong to as many *slices* of a tile
of 128 inputs, so that a register full of words gives registers full of neighbours for each slice, without moving
anything between threads: what Marlin's packing does for its kernels (Frantar et al., 2024).

For bfloat16 two words are widened at a time, without instructions that convert, which run at a quarter of the rate of
others or less: codes are put where bfloat16 has its bits, and one fused multiply-add makes the numbers exact (Kim et
al., "Who Says Elephants Can't Run", 2022). Subnormal codes are exact too. Other types, and Triton's interpreter, which
knows no assembly, take Triton's own conversions.
"""

import triton
import triton.language as tl

_PACKED = tl.constexpr(not triton.knobs.runtime.interpret)


def _of_two_words(constants: dict[str, int], *slices: str) -> tl.constexpr:
    """Assembly for two words: their lower halves, then their upper ones, come into `two`, a word's in 16 bits each, and
    each of `slices` makes a register of numbers of it, in `{}`."""
    count = len(slices)
    lines = [f"mov.b32 {name}, {value:#010x};" for name, value in constants.items()]
    for half, selector in enumerate(("0x5410", "0x7632")):
        lines.append(f"prmt.b32 two, ${2 * count}, ${2 * count + 1}, {selector};")
        lines += [make.format(f"${count * half + i}") for i, make in enumerate(slices)]
    registers, body = ", ".join(("two", "bits", "more", *constants)), "\n".join(lines)
    return tl.constexpr(f"{{ .reg .b32 {registers}; {body} }}")


def _shifted(to: str, by: int) -> str:
    """`two`, to the left or, where `by` is below zero, to the right."""
    return f"shl.b32 {to}, two, {by};" if by > 0 else f"shr.u32 {to}, two, {-by};"


def _floats(mask: int, factor: int, *places: tuple[int, int]) -> tl.constexpr:
    """Exponents are shifted to where bfloat16's end, by the first number of a slice, signs to the top, by the second
    one; what that is too small by, `factor`, multiplies it."""
    constants = {"factor": factor, "nought": 0x80008000}
    join = "lop3.b32 bits, more, 0x80008000, bits, 0xEA; fma.rn.bf16x2 {}, bits, factor, nought;"
    return _of_two_words(
        constants,
        *(f"{_shifted('bits', a)} and.b32 bits, bits, {mask:#010x}; {_shifted('more', b)} {join}" for a, b in places),
    )


_INT8_SLICE = (
    "lop3.b32 bits, two, 0x007F007F, 0x43004300, 0xEA; lop3.b32 more, two, 0x00800080, 0x43004300, 0xEA; "
    "fma.rn.bf16x2 {}, more, minus, bits;"
)
_INT4_SLICE = "lop3.b32 bits, bits, 0x000F000F, 0x43084308, 0x6A; fma.rn.bf16x2 {}, bits, one, less;"
# 128 + the lower seven bits, less 128 or, where the sign is set, 256
_INT8 = _of_two_words({"minus": 0xBF80BF80}, _INT8_SLICE, "shr.u32 two, two, 8; " + _INT8_SLICE)
# 136 + the number, less 136
_INT4 = _of_two_words(
    {"one": 0x3F803F80, "less": 0xC308C308}, *(f"{_shifted('bits', -4 * i)} {_INT4_SLICE}" for i in range(4))
)
_FLOAT8 = _floats(0x07F007F0, 0x7B807B80, (4, 8), (-4, 0))  # times 2^120
_FLOAT4 = _floats(0x01C001C0, 0x7E807E80, (6, 12), (2, 8), (-2, 4), (-6, 0))  # times 2^126


@triton.jit
def quarters(words, BITS: tl.constexpr, FLOAT: tl.constexpr, dtype: tl.constexpr):
    """int32 `[N, W]` as four `[N, 128 / 4]` of `dtype`, a quarter of a tile each: two's complement, or, with `FLOAT`,
    FP8 (E4M3, without its NaN) and FP4 (E2M1)."""
    if _PACKED and dtype == tl.bfloat16:
        if BITS == 8:
            assembly: tl.constexpr = _FLOAT8 if FLOAT else _INT8
            q0, q1, q2, q3 = tl.inline_asm_elementwise(
                assembly, "=r,=r,=r,=r,r,r", [words], dtype=(tl.bfloat16,) * 4, is_pure=True, pack=2
            )
        else:
            assembly: tl.constexpr = _FLOAT4 if FLOAT else _INT4
            a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
                assembly, "=r,=r,=r,=r,=r,=r,=r,=r,r,r", [words], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=2
            )
            q0, q1, q2, q3 = beside(a, b), beside(c, d), beside(e, f), beside(g, h)
    elif BITS == 8:
        q0, q1 = _slice(words, 0, 8, FLOAT, dtype), _slice(words, 1, 8, FLOAT, dtype)
        q2, q3 = _slice(words, 2, 8, FLOAT, dtype), _slice(words, 3, 8, FLOAT, dtype)
    else:
        q0 = beside(_slice(words, 0, 4, FLOAT, dtype), _slice(words, 1, 4, FLOAT, dtype))
        q1 = beside(_slice(words, 2, 4, FLOAT, dtype), _slice(words, 3, 4, FLOAT, dtype))
        q2 = beside(_slice(words, 4, 4, FLOAT, dtype), _slice(words, 5, 4, FLOAT, dtype))
        q3 = beside(_slice(words, 6, 4, FLOAT, dtype), _slice(words, 7, 4, FLOAT, dtype))
    return q0, q1, q2, q3


@triton.jit
def beside(left, right):
    """`[N, K]` twice as `[N, 2 K]`. Where a thread holds whole neighbours of both, no data moves."""
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (left.shape[0], 2 * left.shape[1]))


@triton.jit
def _slice(words, i: tl.constexpr, BITS: tl.constexpr, FLOAT: tl.constexpr, dtype: tl.constexpr):
    """Code `i` of each word."""
    if FLOAT and BITS == 8:
        return float8((words >> (8 * i)).to(tl.int8), dtype)
    if FLOAT:
        return float4((words >> (4 * i)).to(tl.int8), dtype)
    return ((words << (32 - BITS * (i + 1))) >> (32 - BITS)).to(dtype)  # the sign comes with the shift


@triton.jit
def float8(codes, dtype: tl.constexpr):
    """What `codes` (int8) stand for in FP8: seven bits further to the left, they are float16 of 2^-8 that size. GPUs
    without instructions for FP8 can do so too."""
    bits = (codes.to(tl.int16) << 7) & -0x4001
    return (bits.to(tl.float16, bitcast=True) * 256.0).to(dtype)


@triton.jit
def float4(codes, dtype: tl.constexpr):
    """What the lower halves of `codes` (int8) stand for in FP4: moved to where float16 has its bits, they are 2^-14 of
    that. It is made up for here, exactly: matrix units need not take numbers below float16's normal ones."""
    wide = codes.to(tl.int16)
    bits = ((wide & 7) << 9) | ((wide & 8) << 12)
    return (bits.to(tl.float16, bitcast=True) * 16384.0).to(dtype)
