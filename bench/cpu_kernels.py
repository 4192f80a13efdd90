"""How near the native CPU kernels come to what the machine can do, measured in the same run.

    python -m bench.cpu_kernels                    # the reference shape, all threads
    python -m bench.cpu_kernels --level avx512bf16 --threads 1
    python -m bench.cpu_kernels --quantization int4 --group-size 128

Weights are streamed from more memory than the caches hold: `copies` of each matrix are used in turn.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace

import click
import torch

from bench.limits import limits, seconds
from worker_proc.cpu.compressed import CompressedMatrix
from worker_proc.cpu.features import LEVELS, Level, cpu_features
from worker_proc.cpu.library import NativeLibrary, load_library
from worker_proc.cpu.linear import Finish, PackedMatrix, Pairing
from worker_proc.cpu.machine import num_cpus
from worker_proc.cpu.matrices import MatrixForm
from worker_proc.cpu.memory import HugePages
from worker_proc.cpu.quantized import NativeQuantizer, QuantizedMatrix
from worker_proc.quantization.rows import FACTOR_GROUPS, QuantizedRows, ScaleFactors, steps_of
from worker_proc.quantization.scheme import MXFP4, ScaleForm, Scheme

_ROWS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
# outputs, inputs, paired: the projections of the reference shape
_SHAPES = {
    "qkv": (4096, 1024, False),
    "o": (1024, 2048, False),
    "gate_up": (6144, 1024, True),
    "down": (1024, 3072, False),
    "head": (151936, 1024, False),
}
_MEMORY = 2**29  # bytes of weights per shape


def matrices(
    native: NativeLibrary,
    outputs: int,
    inputs: int,
    paired: bool,
    scheme: Scheme | None = None,
    compress: bool = False,
) -> list[PackedMatrix]:
    """Equal ones of random weights, in codes where there is a scheme, else in 12 bits with `compress`."""
    form = MatrixForm(outputs, inputs, scheme, compress, paired=paired)
    copies = max(1, _MEMORY // form.room())
    memory = HugePages(copies * form.room())
    weight = torch.randn(outputs, inputs).to(torch.bfloat16)
    made = []
    for _ in range(copies):
        matrix = form.make(native, memory)
        if paired:
            gate, up = weight.chunk(2)
            fill(matrix, gate, Pairing.GATE)
            fill(matrix, up, Pairing.UP)
        else:
            fill(matrix, weight, Pairing.NONE)
        if isinstance(matrix, CompressedMatrix):
            matrix.seal()
        made.append(matrix)
    return made


def fill(matrix: PackedMatrix, weight: torch.Tensor, pairing: Pairing) -> None:
    if isinstance(matrix, QuantizedMatrix) and replace(matrix.scheme, dynamic=False) == MXFP4:  # not made of weights
        codes = torch.randint(0, 16, weight.shape, dtype=torch.uint8)
        matrix.pack_rows(
            QuantizedRows(MXFP4, codes, torch.full((len(codes), codes.shape[1] // 32), 2.0**-7)), 0, pairing
        )
    elif isinstance(matrix, QuantizedMatrix) and matrix.scheme.scale_form == ScaleForm.FACTORS:  # nor is it
        small = torch.randint(1, 64, (len(weight), matrix.scheme.num_groups(weight.shape[1]), 2), dtype=torch.uint8)
        large = torch.full((len(weight), -(-small.shape[1] // FACTOR_GROUPS), 2), 2.0**-12, dtype=torch.float16)
        factors = ScaleFactors(large, small)
        codes = torch.randint(0, 16, weight.shape, dtype=torch.uint8)
        rows = QuantizedRows(matrix.scheme, codes, *steps_of(*factors.products()), factors=factors)
        matrix.pack_rows(rows, 0, pairing)
    elif isinstance(matrix, QuantizedMatrix):
        rows = NativeQuantizer(matrix.native)(weight, matrix.scheme)
        if matrix.scheme.scale_form == ScaleForm.FLOAT16:
            rows = replace(rows, scales=rows.scales.half().float())
        if not matrix.scheme.symmetric:
            rows = replace(rows, zeros=torch.full_like(rows.scales, matrix.scheme.middle))
        matrix.pack_rows(rows, 0, pairing)
    else:
        matrix.pack(weight, 0, pairing)


@click.command()
@click.option("--level", type=click.Choice(LEVELS), default=cpu_features().levels()[0])
@click.option("--threads", type=int, default=num_cpus())
@click.option("--rows", default=",".join(map(str, _ROWS)), help="Batch sizes, separated by commas.")
@click.option("--shapes", default=",".join(_SHAPES), help="Of the projections of the reference shape.")
@click.option(
    "--quantization",
    type=click.Choice(["int8", "int4", "fp8", "mxfp4", "w8a8", "w4a8", "mxfp4a8"]),
    default=None,
    help="Weights in codes; rows in int8, too, where it ends in a8.",
)
@click.option("--compressed", is_flag=True, help="Weights in bfloat16 take 12 bits.")
@click.option("--group-size", type=int, default=None, help="Inputs with one scale.  [default: all]")
@click.option("--zeros", is_flag=True, help="Each group has its zero.")
@click.option(
    "--scales",
    type=click.Choice(["float32", "float16", "factors"]),
    default="float32",
    help="As in Q4_0 or, with --zeros, Q4_K.",
)
def main(
    level: Level,
    threads: int,
    rows: str,
    shapes: str,
    quantization: str | None,
    compressed: bool,
    group_size: int | None,
    zeros: bool,
    scales: str,
) -> None:
    scheme = None
    if quantization is not None:
        bits, dynamic = 8 if quantization in ("int8", "fp8", "w8a8") else 4, quantization.endswith("a8")
        form = ScaleForm[scales.upper()]
        scheme = Scheme(bits, group_size, not zeros, floating="fp" in quantization, dynamic=dynamic, scale_form=form)
    if scheme is not None and scheme.bits == 4 and scheme.floating:
        scheme = replace(MXFP4, dynamic=scheme.dynamic)
    native = load_library(level)
    native.set_threads(threads)
    most = limits(native)
    print(f"{level}, {threads} threads, {scheme or 'bfloat16'}{' in 12 bits' if compressed else ''}: {most}")
    print("shape     rows        ms    GB/s  GFLOP/s  of the floor")
    for name in shapes.split(","):
        outputs, inputs, paired = _SHAPES[name]
        stack = matrices(native, outputs, inputs, paired, scheme, compressed)
        for count in map(int, rows.split(",")):
            if name == "head" and count > 256:
                continue
            took = seconds(product(stack, count))
            size, operations = stack[0].nbytes, 2 * outputs * inputs * count
            floor = most.product(stack[0], count)
            print(
                f"{name:8} {count:5} {took * 1e3:9.3f} {size / took / 1e9:7.1f} {operations / took / 1e9:8.0f}"
                f"  {floor / took:7.0%}"
            )
        del stack


def product(stack: list[PackedMatrix], rows: int) -> Callable[[], object]:
    """The product of `rows` rows with the next matrix of the stack at every call; the likeliest token of a head."""
    turns = itertools.cycle(stack)
    first = stack[0]
    x = _rows(rows, first.inputs)
    if first.outputs == _SHAPES["head"][0]:
        return lambda: next(turns).argmax(x)
    finish = Finish.SILU_MUL if first.paired else Finish.STORE
    out = _rows(rows, first.outputs // 2 if first.paired else first.outputs)
    return lambda: next(turns).linear(x, finish, out)


def _rows(rows: int, columns: int) -> torch.Tensor:
    """Random bfloat16 `[rows, columns]`, an odd number of cache lines from row to row as in the decoder: rows a power
    of two apart would share the few places of a cache where such addresses go."""
    lines = (columns + 31) // 32 | 1
    return torch.randn(rows, lines * 32).to(torch.bfloat16)[:, :columns]


if __name__ == "__main__":
    main()
