"""Where the time of a step goes, operation by operation, beside what the machine allows: the worker alone.

    python -m bench.cpu_steps --model DIR
    python -m bench.cpu_steps --model DIR --cases "decode 32 x 192" --repeats 20
    python -m bench.cpu_steps --model DIR --quantization int8

No scheduler, no sockets: the native decoder is called with steps as the worker would build them. The floor of an
operation is what its bytes and its arithmetic take at the rates that are measured in the same run.
"""

import statistics
import time
from pathlib import Path

import click
import torch

from bench.clusters import machine
from bench.limits import Limits, limits
from common.config import QUANTIZATIONS, WEIGHT_COMPRESSIONS
from worker_proc.attention.interface import ForwardBatch
from worker_proc.attention.reference import ReferenceAttention
from worker_proc.cpu.decoder import CpuDecoder
from worker_proc.cpu.decoder_structs import OPERATIONS
from worker_proc.cpu.features import LEVELS, Level, cpu_features
from worker_proc.cpu.library import NativeLibrary, load_library
from worker_proc.cpu.linear import PackedMatrix
from worker_proc.cpu.machine import num_cpus
from worker_proc.kv_cache import KVCache
from worker_proc.models.registry import load_model
from worker_proc.parallel import TensorParallel
from worker_proc.quantization.scheme import Scheme, load_time_scheme
from worker_proc.recurrent import StateRows

PAGE_SIZE = 16
# name: rows, new tokens per row, tokens per row in all, of them in common
_CASES = {
    "decode 1 x 192": (1, 1, 192, 0),
    "decode 8 x 192": (8, 1, 192, 0),
    "decode 32 x 192": (32, 1, 192, 0),
    "shared 8 x (512 + 80)": (8, 1, 592, 512),
    "prefill 1 x 128": (1, 128, 128, 0),
    "prefill 2 x 128": (2, 128, 128, 0),
    "prefill 1 x 1024": (1, 1024, 1024, 0),
    "prefill 2 x 1024": (2, 1024, 1024, 0),
    "prefill 4 x 64 after 512": (4, 64, 576, 512),
}


def load_decoder(
    path: Path, native: NativeLibrary, scheme: Scheme | None = None, compression: str = "auto"
) -> CpuDecoder:
    """A model that the native kernels compute; raises ClickException for others."""
    model = load_model(
        path, dtype=torch.bfloat16, device="cpu", tp=TensorParallel(), attention=ReferenceAttention(), native=native,
        quantization=scheme, compression=compression,
    )  # fmt: skip
    if not isinstance(model, CpuDecoder):
        raise click.ClickException("the native kernels do not compute this model")
    return model


def filled_cache(model: CpuDecoder, pages: int, rows: int) -> KVCache:
    """With random keys and values, and states of so many rows where layers are recurrent."""
    cache = KVCache(model.kv_spec, pages, PAGE_SIZE, slots=rows if model.kv_spec.states else 0)
    for memory in (*cache.k, *cache.v, *(cache.states.tensors.values() if cache.states is not None else ())):
        memory.normal_()
    return cache


def make_step(rows: int, new: int, total: int, shared: int) -> tuple[ForwardBatch, int]:
    """A step of `rows` requests that compute `new` of their `total` tokens, and the pages that it needs."""
    columns, common = -(-total // PAGE_SIZE), shared // PAGE_SIZE
    pages = torch.randperm(rows * columns, generator=torch.Generator().manual_seed(0)).view(rows, columns)
    pages[:, :common] = pages[0, :common]
    positions = torch.arange(total - new, total).repeat(rows)
    row = torch.arange(rows).repeat_interleave(new)
    batch = ForwardBatch(
        token_ids=torch.randint(0, 8000, (rows * new,), generator=torch.Generator().manual_seed(1)),
        positions=positions,
        slot_mapping=pages[row, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE,
        page_table=pages,
        kv_lens=torch.full((rows,), total),
        q_lens=[new] * rows,
        kv_lens_host=[total] * rows,
        num_prefill_rows=rows if new > 1 else 0,
        logit_rows=torch.arange(1, rows + 1) * new - 1,
        states=StateRows(list(range(rows))),
    )
    return batch, rows * columns


def floors(model: CpuDecoder, rows: int, new: int, total: int, shared: int, most: Limits) -> dict[str, float]:
    """Seconds that each operation takes at least; those that are not named move nothing but activations. The last layer
    that writes keys and values computes one token of a row to the end, as do those behind it, and of the others these
    alone. A mixture's MLPs are all in "gate_up", what comes of a layer's inputs in "down"."""
    spec, tokens, layers, last = model.spec, rows * new, model.weights.layers, model.last_whole

    def product(matrix: PackedMatrix, index: int) -> float:
        return most.product(matrix, rows if index >= last else tokens)

    def mlp(matrix: PackedMatrix, index: int) -> float:
        if spec.mixture is None or not layers[index].experts:
            return product(matrix, index)
        experts, each = spec.mixture.experts, spec.mixture.each
        count = rows if index >= last else tokens
        taken = experts * (1 - (1 - each / experts) ** count)  # of a router that prefers none
        return most.product(matrix, count * each, taken)

    qkv, o, up, down, arithmetic, read = (0.0,) * 6
    for index, (layer, window) in enumerate(zip(layers, spec.windows, strict=True)):
        qkv += most.product(layer.qkv, rows if index > last else tokens)
        o += product(layer.o, index)
        up += mlp(layer.up, index)
        down += mlp(layer.down, index)
        if layer.shared is not None:
            up += product(layer.shared.up, index)
            down += product(layer.shared.down, index)
        if layer.delta is not None:
            qkv += most.product(layer.delta.gates, tokens)
        if layer.inputs is not None:
            down += product(layer.inputs.gate, index) + product(layer.inputs.output, index)
        if not spec.attends(index):
            continue
        reach = total if window is None else window  # a token sees itself and so many before it, less one
        seen = [min(position + 1, reach) for position in range(total - new, total)]
        pairs = rows * (seen[-1] if index >= last else sum(seen))
        arithmetic += 4 * pairs * spec.num_heads * spec.head_dim_of(index)
        first = max(0, total - new + 1 - reach)
        tokens_read = max(0, shared - first) + rows * (total - max(first, shared))
        read += tokens_read * 2 * spec.kv_heads_of(index) * spec.head_dim_of(index) * model.kv_spec.dtype.itemsize
    inputs = model.weights.token_inputs
    return {
        **({"embed": most.product(inputs.projection, tokens)} if inputs is not None else {}),
        "qkv": qkv,
        "o": o,
        **({"gate_up": up + down} if spec.mixture is not None else {"gate_up": up, "down": down}),
        "head": most.product(model.weights.head, rows),
        "attention": max(read / most.bandwidth, arithmetic / most.operations),
        "recurrent": 2 * rows * model.kv_spec.bytes_per_state / most.bandwidth,  # read and written
    }


def measure(model: CpuDecoder, batch: ForwardBatch, cache: KVCache, repeats: int) -> tuple[list[float], list[float]]:
    """Medians in seconds: of the operations of a step, and of the whole step."""
    parts, whole = [], []
    for _ in range(repeats + 1):
        model.op_ns = torch.zeros(len(OPERATIONS), dtype=torch.int64)
        started = time.perf_counter()
        model.greedy(batch, cache)
        whole.append(time.perf_counter() - started)
        parts.append([ns / 1e9 for ns in model.op_ns.tolist()])
    columns = zip(*parts[1:], strict=True)
    return [statistics.median(column) for column in columns], statistics.median(whole[1:])


@click.command(context_settings={"show_default": True})
@click.option("--model", "path", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--level", type=click.Choice(LEVELS), default=cpu_features().levels()[0])
@click.option("--threads", type=int, default=num_cpus())
@click.option("--cases", default=",".join(_CASES), help="Beginnings of their names, separated by commas.")
@click.option("--repeats", default=7)
@click.option("--quantization", type=click.Choice(list(QUANTIZATIONS)), default="auto")
@click.option("--weight-compression", type=click.Choice(WEIGHT_COMPRESSIONS), default="auto")
def main(
    path: Path, level: Level, threads: int, cases: str, repeats: int, quantization: str, weight_compression: str
) -> None:
    """Print a table for each case."""
    native = load_library(level)
    native.set_threads(threads)
    model = load_decoder(path, native, load_time_scheme(quantization, None), weight_compression)
    click.echo(f"{machine()}, {level}, {threads} threads")
    for name, case in _CASES.items():
        if not name.startswith(tuple(cases.split(","))):
            continue
        batch, pages = make_step(*case)
        cache = filled_cache(model, pages, case[0])
        most = limits(native)
        parts, whole = measure(model, batch, cache, repeats)
        least = floors(model, *case, most)
        click.echo(f"\n{name}: {whole * 1e3:.1f} ms, at {most}\n")
        click.echo("| operation | ms | share | floor, ms | floor / measured |\n|---|---|---|---|---|")
        rest = whole - sum(parts)
        for operation, took in zip((*OPERATIONS, "between"), (*parts, rest), strict=True):
            floor = least.get(operation, 0.0)
            bound = f"{floor * 1e3:.2f} | {floor / took:.0%}" if floor else " | "
            click.echo(f"| {operation} | {took * 1e3:.2f} | {took / whole:.0%} | {bound} |")
        floor = sum(least.values())
        click.echo(f"| all | {whole * 1e3:.2f} | | {floor * 1e3:.2f} | {floor / whole:.0%} |")


if __name__ == "__main__":
    main()
