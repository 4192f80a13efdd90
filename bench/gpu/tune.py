"""How products with codes and attention should be cut: sweeps over what the kernels leave open, best first.

    python -m bench.gpu.tune [--only linear|prefill|decode]

Shapes are those of an 8B Llama, bfloat16. Kernels are compiled by processes side by side before they are timed. The
constants in worker_proc/cuda/quantized.py and attention.py come from here.
"""

import itertools
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial

import click
import torch
import triton

from bench.gpu.limits import Limits, measure, seconds
from bench.gpu.quantized import LAYERS, graph, shapes
from bench.gpu.worker import PAGE, filled, make_batch
from worker_proc.cuda import attention
from worker_proc.cuda.linear_kernels import TILE
from worker_proc.cuda.quantized import Launch, PackedWeight
from worker_proc.kv_cache import KVSpec
from worker_proc.quantization.scheme import FP8, MXFP4, Scheme

SCHEMES = (Scheme(4, 128), Scheme(8), FP8, MXFP4)
ROWS = (1, 64, 128, 256)
DIM = 128
Timed = tuple[float, str]


def launches(rows: int) -> list[tuple[int, int, int, int, int]]:
    """Rows and outputs of a program, warps, stages, programs wanted."""
    if rows <= 64:
        block = max(16, triton.next_power_of_2(rows))
        return list(itertools.product((block,), (64, 128), (4, 8), (3, 4, 6), (264, 528, 1056)))
    return list(itertools.product((64, 128), (64, 128), (4, 8), (3, 4), (132, 264)))


def cut(launch: tuple[int, int, int, int, int], rows: int, outputs: int, inputs: int) -> Launch:
    return Launch.cut(rows, outputs, triton.cdiv(inputs, TILE.value), *launch)


def random_codes(outputs: int, inputs: int, scheme: Scheme) -> PackedWeight:
    weight = PackedWeight.empty(outputs, inputs, scheme, torch.bfloat16, torch.device("cuda"))
    weight.codes.random_(-(2**31), 2**31 - 1)
    if scheme.floating:
        weight.codes.bitwise_and_(0x37373737)  # no NaN
    weight.scales.normal_()
    return weight


def linear(name: str, rows: int, launch: tuple[int, int, int, int, int]) -> None:
    """One product of the kind, so that Triton has it on disk."""
    scheme = next(s for s in SCHEMES if str(s) == name)
    weight = random_codes(128, 1024, scheme)
    x = torch.zeros(rows, 1024, dtype=torch.bfloat16, device="cuda")
    for splits in (1, 2):
        done = replace(cut(launch, rows, 128, 1024), splits=splits, each=8 // splits)
        weight.multiply(x, None, done)


def time_linear(limits: Limits, scheme: Scheme, rows: int) -> list[Timed]:
    weights = [random_codes(*shape, scheme) for _ in range(LAYERS) for shape in shapes()]
    inputs = [torch.randn(rows, w.inputs, dtype=torch.bfloat16, device="cuda") for w in weights]
    read = sum(w.nbytes for w in weights) / LAYERS / limits.bandwidth
    found = []
    for launch in launches(rows):

        def step(launch: tuple[int, int, int, int, int] = launch) -> None:
            for weight, x in zip(weights, inputs, strict=True):
                weight.multiply(x, None, cut(launch, rows, len(weight.codes), weight.inputs))

        found.append(attempt(graphed(step), str(launch), 1 / LAYERS, read))
    if rows > 64:
        found.append(attempt(graphed(lambda: [w.widened() for w in weights]), "widened only", 1 / LAYERS, read))
    return sorted(found)


def graphed(step: Callable[[], object]) -> Callable[[], float]:
    return lambda: seconds(graph(step), repeats=5)


def attempt(run: Callable[[], float], name: str, share: float, floor: float) -> Timed:
    try:
        taken = run() * share
    except Exception as error:  # too much shared memory
        torch.cuda.synchronize()
        return 1.0, f"{name}: {str(error)[:60]}"
    return taken, f"{name}: {taken * 1e6:8.1f} us, floor {floor * 1e6:8.1f} = {floor / taken:4.0%}"


def prefills() -> list[attention.Tiles]:
    return [attention.Tiles(*t) for t in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4))]


def decodes() -> list[attention.Tiles]:
    return [attention.Tiles(16, *t) for t in itertools.product((32, 64, 128), (2, 4, 8), (2, 3, 4))]


def run_prefill(tiles: attention.Tiles, heads: int, new: int, total: int, *, int8: bool = False) -> Callable[[], None]:
    batch = make_batch(1, new, total)
    cache = filled(KVSpec.uniform(1, 8, DIM, DIM, torch.bfloat16, int8), batch.page_table.shape[1])
    q = torch.randn(new, heads, DIM, dtype=torch.bfloat16, device="cuda")
    out, starts = torch.empty_like(q), torch.tensor([0, new], device="cuda")
    limits = (DIM**-0.5, None, None, None)
    return lambda: attention.prefill(
        q, out, batch.page_table, batch.kv_lens, starts, new, cache, 0, *limits, tiles=tiles
    )


def run_decode(tiles: attention.Tiles, rows: int, total: int, *, int8: bool = False) -> Callable[[], None]:
    batch = make_batch(rows, 1, total)
    cache = filled(KVSpec.uniform(1, 8, DIM, DIM, torch.bfloat16, int8), rows * total // PAGE)
    q = torch.randn(rows, 32, DIM, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(q)
    limits = (DIM**-0.5, None, None, None)
    return lambda: attention.decode(q, out, batch.page_table, batch.kv_lens, cache, 0, *limits, tiles=tiles)


def compile_attention(kind: str, tiles: attention.Tiles, int8: bool) -> None:
    try:
        if kind == "prefill":
            for heads in (16, 32):
                run_prefill(tiles, heads, 64, 128, int8=int8)()
        else:
            run_decode(tiles, 2, 64, int8=int8)()
    except Exception as error:  # too much shared memory
        print(kind, tiles, str(error)[:80])


def compile_side_by_side(tasks: list[Callable[[], None]]) -> None:
    """So that Triton has kernels on disk. What does not compile is told of, and fails once more when it is timed."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 2), mp_context=context) as pool:
        for done in [pool.submit(task) for task in tasks]:
            if done.exception() is not None:
                print(str(done.exception())[:100])


def best(title: str, found: list[Timed]) -> None:
    print(title)
    for _, line in found[:8]:
        print(f"    {line}", flush=True)


@click.command()
@click.option("--only", type=click.Choice(["linear", "prefill", "decode"]))
@torch.inference_mode()
def main(only: str | None) -> None:
    tasks: list[Callable[[], None]] = []
    wanted = (only,) if only else ("linear", "prefill", "decode")
    if "linear" in wanted:
        kernels = {la[:4]: (rows, la) for rows in ROWS for la in launches(rows)}
        tasks += [partial(linear, str(scheme), rows, la) for scheme in SCHEMES for rows, la in kernels.values()]
    for kind, tiles in (("prefill", prefills()), ("decode", decodes())):
        if kind in wanted:
            tasks += [partial(compile_attention, kind, t, int8) for t in tiles for int8 in (False, True)]
    compile_side_by_side(tasks)
    limits = measure()
    print(
        f"{torch.cuda.get_device_name()}: {limits.bandwidth / 1e12:.2f} TB/s, {limits.matrix_rate / 1e12:.0f} TFLOP/s"
    )
    if "linear" in wanted:
        for scheme in SCHEMES:
            for rows in ROWS:
                best(f"{scheme}, {rows} rows", time_linear(limits, scheme, rows))
    if "prefill" in wanted:
        for heads, new, total, int8 in (
            (32, 8192, 8192, False), (16, 8192, 8192, False), (32, 512, 4096, False), (32, 8192, 8192, True),
        ):  # fmt: skip
            floor = 4 * heads * DIM * new * (total - new / 2) / limits.matrix_rate
            found = []
            for tiles in prefills():
                run = partial(run_prefill, tiles, heads, new, total, int8=int8)
                found.append(attempt(lambda r=run: seconds(r(), 5), str(tiles), 1, floor))  # type: ignore[misc]
            best(f"prefill, {heads} heads, {new} of {total}{', int8' * int8}", sorted(found))
    if "decode" in wanted:
        for rows, total, int8 in ((64, 1024, False), (8, 8192, False), (64, 1024, True)):
            floor = rows * total * 8 * DIM * (2 if int8 else 4) / limits.bandwidth
            found = []
            for tiles in decodes():
                run = partial(run_decode, tiles, rows, total, int8=int8)
                found.append(attempt(lambda r=run: seconds(r(), 10, queued=True), str(tiles), 1, floor))
            best(f"decode, {rows} rows of {total}{', int8' * int8}", sorted(found))


if __name__ == "__main__":
    main()
