"""How GGUF files hold numbers. Needs neither torch nor the package gguf."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """Rows are blocks of `numbers` in `nbytes` each."""

    numbers: int
    nbytes: int


PLAIN = {0: "F32", 1: "F16", 28: "F64", 30: "BF16"}  # named as in safetensors
PLAIN_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_CODED = {  # type number, name in ggml, numbers of a block, its bytes
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    39: ("MXFP4", 32, 17),
}
NAMES = PLAIN | {number: name for number, (name, _, _) in _CODED.items()}
CODED = {name: Kind(numbers, nbytes) for name, numbers, nbytes in _CODED.values()}
KINDS = {name: Kind(1, nbytes) for name, nbytes in PLAIN_BYTES.items()} | CODED
EXACT_IN_4_BITS = ("Q4_0", "Q4_1", "Q4_K")  # codes of 4 bits, with a scale (and a zero) for 32 or fewer inputs
