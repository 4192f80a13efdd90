"""What the assembly makes of every code, instruction by instruction: Triton's interpreter knows no assembly."""

import re

import pytest
import torch

pytest.importorskip("triton")

from worker_proc.cuda import widening
from worker_proc.quantization.rows import floating_numbers
from worker_proc.quantization.scheme import FP8, MXFP4

WORDS = torch.randint(0, 2**32, (256, 2), generator=torch.Generator().manual_seed(1))
WORDS[:, 0] = torch.arange(256) * 0x01010101  # all codes, in every place of a word
LOOK_UPS = {"0xEA": lambda a, b, c: (a & b) | c, "0x6A": lambda a, b, c: (a & b) ^ c}


def two_numbers(register: torch.Tensor) -> torch.Tensor:
    """bfloat16 `[256, 2]`, the lower half first."""
    return torch.stack((register & 0xFFFF, register >> 16), 1).to(torch.uint16).view(torch.bfloat16)


def run(assembly: str) -> list[torch.Tensor]:
    """The registers that are put out for `WORDS`, as pairs of numbers."""
    lines = [line.split(None, 1) for line in re.split(r"[;\n]\s*", assembly.strip(" {}")) if line.strip()]
    outputs = 1 + max(int(number) for number in re.findall(r"fma\S+ \$(\d+)", assembly))
    held = {f"${outputs}": WORDS[:, 0], f"${outputs + 1}": WORDS[:, 1]}
    made: dict[str, torch.Tensor] = {}

    def value(name: str) -> torch.Tensor:
        return held[name] if name in held else torch.full((256,), int(name, 0))

    for name, rest in lines:
        if name == ".reg":
            continue
        to, *names = [part.strip() for part in rest.split(",")]
        if name == "lop3.b32":
            held[to] = LOOK_UPS[names[3]](*map(value, names[:3]))
        elif name == "prmt.b32":
            all_bytes = [value(word) >> 8 * i & 0xFF for word in names[:2] for i in range(4)]
            held[to] = sum(all_bytes[int(names[2], 0) >> 4 * i & 15] << 8 * i for i in range(4))
        elif name == "fma.rn.bf16x2":
            a, b, c = (two_numbers(value(part)).double() for part in names)
            made[to] = (a * b + c).bfloat16()
        else:
            moved = {"mov.b32": lambda a: a, "and.b32": lambda a, b: a & b, "shl.b32": lambda a, b: a << b,
                     "shr.u32": lambda a, b: a >> b}[name]  # fmt: skip
            held[to] = moved(*map(value, names)) & 0xFFFFFFFF
    return [made[f"${i}"] for i in range(outputs)]


@pytest.mark.parametrize("floating", [False, True], ids=["whole", "floating"])
@pytest.mark.parametrize("bits", [8, 4])
def test_every_code_becomes_its_number(bits: int, floating: bool) -> None:
    """Exactly, the sign of zero too; slice i of a tile has code i of each word."""
    chosen = {
        (8, False): widening._INT8,
        (8, True): widening._FLOAT8,
        (4, False): widening._INT4,
        (4, True): widening._FLOAT4,
    }
    found = run(chosen[bits, floating].value)
    assert len(found) == 32 // bits
    for i, numbers in enumerate(found):
        codes = WORDS >> bits * i & (2**bits - 1)
        if floating:
            want = floating_numbers(FP8 if bits == 8 else MXFP4, codes.to(torch.uint8))
            real = (codes & 127) != 127 if bits == 8 else torch.ones_like(codes, dtype=torch.bool)  # FP8 has NaN there
        else:
            want, real = codes - (codes >> bits - 1 << bits), torch.ones_like(codes, dtype=torch.bool)
        assert torch.equal(numbers.double()[real], want.double()[real])
        assert not floating or torch.equal(numbers.signbit()[real], want.signbit()[real])
