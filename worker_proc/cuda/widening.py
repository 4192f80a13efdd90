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


@triton.jit
def quarters(words, BITS: tl.constexpr, FLOAT: tl.constexpr, dtype: tl.constexpr):
    """int32 `[N, W]` as four `[N, 128 / 4]` of `dtype`, a quarter of a tile each: two's complement, or, with `FLOAT`,
    FP8 (E4M3, without its NaN) and FP4 (E2M1)."""
    if _PACKED and dtype == tl.bfloat16:
        if BITS == 8:
            if FLOAT:
                q0, q1, q2, q3 = _float8_pairs(words)
            else:
                q0, q1, q2, q3 = _int8_pairs(words)
        else:
            if FLOAT:
                a, b, c, d, e, f, g, h = _float4_pairs(words)
            else:
                a, b, c, d, e, f, g, h = _int4_pairs(words)
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


@triton.jit
def _int8_pairs(words):
    """128 + the lower seven bits, less 128 or, where the sign is set, 256."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 two, low, sign, minus;
        mov.b32 minus, 0xBF80BF80;
        prmt.b32 two, $4, $5, 0x5410;
        lop3.b32 low, two, 0x007F007F, 0x43004300, 0xEA;
        lop3.b32 sign, two, 0x00800080, 0x43004300, 0xEA;
        fma.rn.bf16x2 $0, sign, minus, low;
        shr.u32 two, two, 8;
        lop3.b32 low, two, 0x007F007F, 0x43004300, 0xEA;
        lop3.b32 sign, two, 0x00800080, 0x43004300, 0xEA;
        fma.rn.bf16x2 $1, sign, minus, low;
        prmt.b32 two, $4, $5, 0x7632;
        lop3.b32 low, two, 0x007F007F, 0x43004300, 0xEA;
        lop3.b32 sign, two, 0x00800080, 0x43004300, 0xEA;
        fma.rn.bf16x2 $2, sign, minus, low;
        shr.u32 two, two, 8;
        lop3.b32 low, two, 0x007F007F, 0x43004300, 0xEA;
        lop3.b32 sign, two, 0x00800080, 0x43004300, 0xEA;
        fma.rn.bf16x2 $3, sign, minus, low;
        }
        """,
        "=r,=r,=r,=r,r,r",
        [words],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _int4_pairs(words):
    """136 + the number, less 136."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 low, high, bits, one, less;
        mov.b32 one, 0x3F803F80;
        mov.b32 less, 0xC308C308;
        prmt.b32 low, $8, $9, 0x5410;
        prmt.b32 high, $8, $9, 0x7632;
        lop3.b32 bits, low, 0x000F000F, 0x43084308, 0x6A;
        fma.rn.bf16x2 $0, bits, one, less;
        shr.u32 bits, low, 4;
        lop3.b32 bits, bits, 0x000F000F, 0x43084308, 0x6A;
        fma.rn.bf16x2 $1, bits, one, less;
        shr.u32 bits, low, 8;
        lop3.b32 bits, bits, 0x000F000F, 0x43084308, 0x6A;
        fma.rn.bf16x2 $2, bits, one, less;
        shr.u32 bits, low, 12;
        lop3.b32 bits, bits, 0x000F000F, 0x43084308, 0x6A;
        fma.rn.bf16x2 $3, bits, one, less;
        lop3.b32 bits, high, 0x000F000F, 0x43084308, 0x6A;
        fma.rn.bf16x2 $4, bits, one, less;
        shr.u32 bits, high, 4;
        lop3.b32 bits, bits, 0x000F000F, 0x43084308, 0x6A;
        fma.rn.bf16x2 $5, bits, one, less;
        shr.u32 bits, high, 8;
        lop3.b32 bits, bits, 0x000F000F, 0x43084308, 0x6A;
        fma.rn.bf16x2 $6, bits, one, less;
        shr.u32 bits, high, 12;
        lop3.b32 bits, bits, 0x000F000F, 0x43084308, 0x6A;
        fma.rn.bf16x2 $7, bits, one, less;
        }
        """,
        "=r,=r,=r,=r,=r,=r,=r,=r,r,r",
        [words],
        dtype=(
            tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
        ),
        is_pure=True,
        pack=2,
    )  # fmt: skip


@triton.jit
def _float8_pairs(words):
    """The exponent where bfloat16's ends, times 2^120."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 two, bits, up, more, none;
        mov.b32 more, 0x7B807B80;
        mov.b32 none, 0x80008000;
        prmt.b32 two, $4, $5, 0x5410;
        shl.b32 bits, two, 4;
        and.b32 bits, bits, 0x07F007F0;
        shl.b32 up, two, 8;
        lop3.b32 bits, up, 0x80008000, bits, 0xEA;
        fma.rn.bf16x2 $0, bits, more, none;
        shr.u32 bits, two, 4;
        and.b32 bits, bits, 0x07F007F0;
        lop3.b32 bits, two, 0x80008000, bits, 0xEA;
        fma.rn.bf16x2 $1, bits, more, none;
        prmt.b32 two, $4, $5, 0x7632;
        shl.b32 bits, two, 4;
        and.b32 bits, bits, 0x07F007F0;
        shl.b32 up, two, 8;
        lop3.b32 bits, up, 0x80008000, bits, 0xEA;
        fma.rn.bf16x2 $2, bits, more, none;
        shr.u32 bits, two, 4;
        and.b32 bits, bits, 0x07F007F0;
        lop3.b32 bits, two, 0x80008000, bits, 0xEA;
        fma.rn.bf16x2 $3, bits, more, none;
        }
        """,
        "=r,=r,=r,=r,r,r",
        [words],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _float4_pairs(words):
    """As FP8, times 2^126."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 two, bits, up, more, none;
        mov.b32 more, 0x7E807E80;
        mov.b32 none, 0x80008000;
        prmt.b32 two, $8, $9, 0x5410;
        shl.b32 bits, two, 6;
        and.b32 bits, bits, 0x01C001C0;
        shl.b32 up, two, 12;
        lop3.b32 bits, up, 0x80008000, bits, 0xEA;
        fma.rn.bf16x2 $0, bits, more, none;
        shl.b32 bits, two, 2;
        and.b32 bits, bits, 0x01C001C0;
        shl.b32 up, two, 8;
        lop3.b32 bits, up, 0x80008000, bits, 0xEA;
        fma.rn.bf16x2 $1, bits, more, none;
        shr.u32 bits, two, 2;
        and.b32 bits, bits, 0x01C001C0;
        shl.b32 up, two, 4;
        lop3.b32 bits, up, 0x80008000, bits, 0xEA;
        fma.rn.bf16x2 $2, bits, more, none;
        shr.u32 bits, two, 6;
        and.b32 bits, bits, 0x01C001C0;
        lop3.b32 bits, two, 0x80008000, bits, 0xEA;
        fma.rn.bf16x2 $3, bits, more, none;
        prmt.b32 two, $8, $9, 0x7632;
        shl.b32 bits, two, 6;
        and.b32 bits, bits, 0x01C001C0;
        shl.b32 up, two, 12;
        lop3.b32 bits, up, 0x80008000, bits, 0xEA;
        fma.rn.bf16x2 $4, bits, more, none;
        shl.b32 bits, two, 2;
        and.b32 bits, bits, 0x01C001C0;
        shl.b32 up, two, 8;
        lop3.b32 bits, up, 0x80008000, bits, 0xEA;
        fma.rn.bf16x2 $5, bits, more, none;
        shr.u32 bits, two, 2;
        and.b32 bits, bits, 0x01C001C0;
        shl.b32 up, two, 4;
        lop3.b32 bits, up, 0x80008000, bits, 0xEA;
        fma.rn.bf16x2 $6, bits, more, none;
        shr.u32 bits, two, 6;
        and.b32 bits, bits, 0x01C001C0;
        lop3.b32 bits, two, 0x80008000, bits, 0xEA;
        fma.rn.bf16x2 $7, bits, more, none;
        }
        """,
        "=r,=r,=r,=r,=r,=r,=r,=r,r,r",
        [words],
        dtype=(
            tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
        ),
        is_pure=True,
        pack=2,
    )  # fmt: skip
