"""How weights are held in fewer bits. Needs no torch."""

from dataclasses import dataclass
from enum import IntEnum

from worker_proc.errors import ModelError

DEFAULT_GROUP_SIZE = 128
GROUP_MULTIPLE = 32  # of inputs: what the native kernels widen at once


class ScaleForm(IntEnum):
    """How the native kernels hold scales, as in `native/linear.h`. FACTORS: a scale is a float16 that 256 inputs have
    in common times a whole number of a group of 32, and so is the number that code 0 stands for (GGUF's Q4_K)."""

    FLOAT32 = 0
    FLOAT16 = 1
    FACTORS = 2


@dataclass(frozen=True, slots=True)
class Scheme:
    """A weight is (code - zero) * scale, with codes 0 .. 2**bits - 1. `group_size` inputs of an output have a scale in
    common, the last group may be smaller; None: all inputs. Zeros are 2**(bits - 1) where `symmetric`, else there is
    one per scale. Where `floating`, a code is a number of FP8 (8 bits: E4M3, as torch.float8_e4m3fn has it) or FP4 (4
    bits: E2M1, see `FP4_NUMBERS`) that the scale multiplies, and schemes are symmetric. Where `ordered`, inputs of a
    matrix have an order of their own, in which groups follow each other (GPTQ's order of activations). Where `dynamic`,
    the rows that weights are multiplied with are rounded to int8, too: with int8 by channel (W8A8) with a scale per
    row; with others (W4A8) with one for every group of weights, or 256 inputs of a larger one, by kernels that multiply
    bytes in groups, while those without leave rows as they are. `scale_form` says in what form scales come, so that
    they can be held in it."""

    bits: int
    group_size: int | None = None
    symmetric: bool = True
    floating: bool = False
    ordered: bool = False
    dynamic: bool = False
    scale_form: ScaleForm = ScaleForm.FLOAT32

    @property
    def middle(self) -> int:
        """The code of zero where the scheme is symmetric."""
        return 0 if self.floating else int(2 ** (self.bits - 1))

    @property
    def by_channel(self) -> bool:
        """8 bits with nothing but a scale per output: what multiplies the sums instead of the weights."""
        return self.bits == 8 and self.group_size is None and self.symmetric

    @property
    def name(self) -> str:
        """That of launch.py's --quantization."""
        if self.floating:
            return f"fp{self.bits}" + ("a8" if self.dynamic else "")
        return f"w{self.bits}a8" if self.dynamic else f"int{self.bits}"

    def __str__(self) -> str:
        groups = "" if self.group_size is None else f", groups of {self.group_size}"
        return self.name + groups + (" in order" if self.ordered else "")

    def num_groups(self, inputs: int) -> int:
        return 1 if self.group_size is None else -(-inputs // self.group_size)

    def check_columns(self, name: str, cols: tuple[int, int], inputs: int) -> None:
        """Refuse columns `cols` of a matrix with `inputs` of them that begin or end inside a group."""
        size = self.group_size
        if self.ordered and cols != (0, inputs):
            reason = "inputs in the order of activations cannot be shared out over ranks: take tp = 1"
            raise ModelError(name, list(cols), reason)
        if size is not None and any(edge % size and edge != inputs for edge in cols):
            reason = f"columns of this rank cut a quantization group of {size}: take a smaller group size or tp"
            raise ModelError(name, list(cols), reason)


FP8 = Scheme(8, floating=True)
MXFP4 = Scheme(4, 32, floating=True)  # whose scales are powers of two (OCP Microscaling Formats, 2023)
FP4_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # by code
W8A8 = Scheme(8, dynamic=True)
HEAD_SCHEME = Scheme(8)  # of the output head when weights are quantized while they are loaded
ROUNDED_HEAD = Scheme(8, 256, dynamic=True)  # the same where activations are rounded: not a whole row of them together


def load_time_scheme(method: str, group_size: int | None) -> Scheme | None:
    """The scheme of launch.py's --quantization, None for "auto", which takes weights as they are stored."""
    if method in ("int8", "fp8"):
        return Scheme(8, floating=method == "fp8")
    if method == "w8a8":
        return W8A8
    if method in ("int4", "w4a8"):
        return Scheme(4, group_size or DEFAULT_GROUP_SIZE, dynamic=method == "w4a8")
    return None
