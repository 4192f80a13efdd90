"""Products of a few rows with bfloat16 weights: how they should be cut, and from which size on cuBLAS is quicker.

    python -m bench.gpu.few_rows

For every matrix of two models, and every number of rows: with a norm before it, or SiLU behind it, as its layer has
them, in one CUDA graph over as many matrices as do not fit the caches, best first. "kernels" are cuBLAS's and those of
layer_kernels.py; "in turn" nothing overlaps. The floor is reading the weights at the copy bandwidth of the same run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import click
import torch

from bench.gpu.limits import measure, seconds
from bench.gpu.quantized import graph
from bench.gpu.shapes import random_matrix
from bench.gpu.tune import compile_side_by_side
from worker_proc.cuda import overlap
from worker_proc.cuda.few_rows import MOST, Cut, few_rows_linear
from worker_proc.cuda.layers import add_rms_norm, silu_mul
from worker_proc.models.layers import Linear, RMSNorm

# hidden, outputs of q, k and v, inputs of o, of down, and the vocabulary
MODELS = {"qwen3-0.6b": (1024, 4096, 2048, 3072, 151936), "llama-8b": (4096, 6144, 4096, 14336, 128256)}
READ = 2**29  # bytes of weights in a graph, more than the caches hold
TILES, INPUTS = (2048, 4096, 8192), (512, 1024, 2048)  # of a program
SHOWN = 3


@dataclass(frozen=True, slots=True)
class Product:
    """`count` matrices of a kind; `gated` ones have twice the outputs."""

    outputs: int
    inputs: int
    normed: bool
    gated: bool = False

    def load(self, rows: int, count: int) -> "Loaded":
        linears = [Linear(random_matrix(self.outputs, self.inputs), None) for _ in range(count)]
        x, delta = (torch.randn(rows, self.inputs, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        norm = RMSNorm(torch.ones(self.inputs, dtype=torch.bfloat16, device="cuda"), 1e-6)
        return Loaded(linears, x, delta if self.normed else None, norm if self.normed else None, self.gated)

    def cuts(self, rows: int) -> list[Cut]:
        """What is worth trying."""
        if rows > 1 and self.gated:
            return []
        sizes = [(tile // block_k // (2 if self.gated else 1), block_k) for tile in TILES for block_k in INPUTS]
        return [Cut(block_n, block_k) for block_n, block_k in sizes if block_n and block_k <= self.inputs]


@dataclass(frozen=True, slots=True)
class Loaded:
    linears: list[Linear]
    x: torch.Tensor
    delta: torch.Tensor | None
    norm: RMSNorm | None
    gated: bool

    def kernels(self) -> None:
        for linear in self.linears:
            out = linear(self.x if self.norm is None else add_rms_norm(self.x, self.delta, self.norm))
            if self.gated:
                silu_mul(out)

    def few(self, cut: Cut | None) -> None:
        for linear in self.linears:
            x = self.x if self.norm is None else add_rms_norm(self.x, self.delta, self.norm)
            few_rows_linear(x, linear, gated=self.gated, cut=cut)


def products(model: str) -> dict[str, Product]:
    hidden, qkv, attended, inner, vocabulary = MODELS[model]
    return {
        "qkv": Product(qkv, hidden, True), "o": Product(hidden, attended, False),
        "up": Product(2 * inner, hidden, True, True), "down": Product(hidden, inner, False),
        "head": Product(vocabulary, hidden, True),
    }  # fmt: skip


def in_turn(run: Callable[[], object]) -> float:
    """Seconds of `run` with kernels that wait for each other."""
    possible = overlap.possible
    overlap.possible = lambda device: False  # type: ignore[assignment]
    try:
        return seconds(graph(run), 5)
    finally:
        overlap.possible = possible


def compile_cut(rows: int, product: Product, cut: Cut) -> None:
    small = Product(16 * cut.block_n * (2 if product.gated else 1), product.inputs, product.normed, product.gated)
    small.load(rows, 1).few(cut)


def compare(title: str, product: Product, rows: int, bandwidth: float) -> None:
    size = 2 * product.outputs * product.inputs
    count = min(64, max(2, READ // size))
    loaded = product.load(rows, count)
    found = [(seconds(graph(loaded.kernels), 5), "kernels"), (in_turn(loaded.kernels), "kernels in turn")]
    cuts = product.cuts(rows)
    if cuts:
        found.append((in_turn(partial(loaded.few, None)), f"{Cut.of(rows, product.inputs, product.gated)} in turn"))
    for cut in cuts:
        found.append((seconds(graph(partial(loaded.few, cut)), 5), str(cut)))
    found.sort()
    print(f"{title} {product.outputs} x {product.inputs}, {rows} rows, floor {size / bandwidth * 1e6:.1f} us:")
    for place, (taken, what) in enumerate(found):
        if place < SHOWN or what.startswith("kernels") or what.endswith("in turn"):
            print(f"    {taken / count * 1e6:7.2f} us  {what}", flush=True)


@click.command()
@click.option("--model", "models", multiple=True, type=click.Choice(list(MODELS)), default=tuple(MODELS))
@click.option("--rows", "all_rows", multiple=True, type=click.IntRange(1, MOST), default=(1, 2, 4))
@torch.inference_mode()
def main(models: tuple[str, ...], all_rows: tuple[int, ...]) -> None:
    wanted = {
        (rows, product.gated, cut): partial(compile_cut, rows, product, cut)
        for model in models for product in products(model).values() for rows in all_rows for cut in product.cuts(rows)
    }  # fmt: skip
    compile_side_by_side(list(wanted.values()))
    limits = measure()
    print(f"{torch.cuda.get_device_name()}: {limits.bandwidth / 1e12:.2f} TB/s")
    for model in models:
        for name, product in products(model).items():
            for rows in all_rows:
                compare(f"{model} {name}", product, rows, limits.bandwidth)


if __name__ == "__main__":
    main()
