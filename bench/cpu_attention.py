"""How near native attention comes to what the machine can do, measured in the same run.

    python -m bench.cpu_attention                     # the reference shape, all threads
    python -m bench.cpu_attention --level avx512bf16 --threads 1 --cases decode,shared
    python -m bench.cpu_attention --int8              # a KV cache in codes

K and V are streamed from more memory than the caches hold: as many layers as fill it are used in turn. Bandwidth and
matrix rate are measured anew before each case, as others may use the machine.
"""

import random
import time
from dataclasses import replace

import click
import torch

from bench.limits import limits
from worker_proc.attention.interface import ForwardBatch
from worker_proc.cpu.attention import NativeAttention
from worker_proc.cpu.features import LEVELS, Level, cpu_features
from worker_proc.cpu.library import NativeLibrary, load_library
from worker_proc.cpu.machine import num_cpus
from worker_proc.kv_cache import KVCache, KVSpec

_HEADS, _KV_HEADS, _HEAD_DIM, _PAGE_SIZE = 16, 8, 128, 16
_MEMORY = 2**30  # bytes of K and V
_REPEATS = 5
# name: rows, new tokens per row, tokens per row, of them in common
_CASES = {
    **{
        f"decode {rows} x {total}": (rows, 1, total, 0)
        for rows in (1, 8, 32)
        for total in (128, 512, 1024, 4096)
        if rows * total < 2**17
    },
    "shared 8 x (512 + 64)": (8, 1, 576, 512),
    "shared 32 x (512 + 64)": (32, 1, 576, 512),
    "prefill 1 x 1024": (1, 1024, 1024, 0),
    "prefill 4 x 256": (4, 256, 256, 0),
    "prefill 8 x 64 after 512": (8, 64, 576, 512),
}


def make_batch(rows: int, new: int, total: int, shared: int) -> tuple[ForwardBatch, int]:
    """A step over shuffled pages, and how many pages there are."""
    columns, common = -(-total // _PAGE_SIZE), shared // _PAGE_SIZE
    free = list(range(rows * columns))
    random.Random(0).shuffle(free)
    tables = torch.tensor(free).view(rows, columns)
    tables[:, :common] = tables[0, :common]
    tokens = torch.zeros(rows * new, dtype=torch.int64)
    batch = ForwardBatch(
        token_ids=tokens,
        positions=tokens,
        slot_mapping=tokens,
        page_table=tables,
        kv_lens=torch.full((rows,), total),
        q_lens=[new] * rows,
        kv_lens_host=[total] * rows,
        num_prefill_rows=rows if new > 1 else 0,
        logit_rows=tokens[:0],
    )
    return batch, rows * columns


def seconds(native: NativeLibrary, batch: ForwardBatch, cache: KVCache, *, share: bool) -> float:
    """Best time of one layer over all layers: what is measured is the code, not who else uses the machine."""
    q = torch.randn(len(batch.token_ids), _HEADS, _HEAD_DIM).to(torch.bfloat16)
    step = NativeAttention(native, share=share).step(batch, cache, _HEADS)
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        for layer in range(cache.spec.num_layers):
            step.attend(layer, q, scale=_HEAD_DIM**-0.5)
        times.append((time.perf_counter() - start) / cache.spec.num_layers)
    return min(times)


@click.command()
@click.option("--level", type=click.Choice(LEVELS), default=cpu_features().levels()[0])
@click.option("--threads", type=int, default=num_cpus())
@click.option("--cases", default="decode,shared,prefill", help="Beginnings of their names, separated by commas.")
@click.option("--int8", is_flag=True, help="K and V as int8 codes with a scale per token and head.")
def main(level: Level, threads: int, cases: str, int8: bool) -> None:
    native = load_library(level)
    native.set_threads(threads)
    kept = "KV in int8" if int8 else "bfloat16"
    click.echo(f"{level}, {threads} threads, {_HEADS} heads, {_KV_HEADS} KV heads of {_HEAD_DIM}, {kept}")
    click.echo(f"{'case':26} {'us/layer':>9} {'GB/s':>6} {'of':>6} {'GFLOP/s':>8} {'of':>6} {'alone':>9}")
    for name, (rows, new, total, shared) in _CASES.items():
        if not name.startswith(tuple(cases.split(","))):
            continue
        batch, pages = make_batch(rows, new, total, shared)
        one_layer = KVSpec.uniform(1, _KV_HEADS, _HEAD_DIM, _HEAD_DIM, torch.bfloat16, int8)
        bytes_per_token = one_layer.bytes_per_token
        layers = max(1, _MEMORY // (pages * _PAGE_SIZE * bytes_per_token)) if new == 1 else 4
        cache = KVCache(replace(one_layer, layers=one_layer.layers * layers), pages, _PAGE_SIZE)
        for memory in (*cache.k, *cache.v):
            memory.random_(-127, 128) if int8 else memory.normal_()
        for memory in (*cache.k_scales, *cache.v_scales):
            memory.fill_(1 / 50)
        most = limits(native)
        took = seconds(native, batch, cache, share=True)
        alone = seconds(native, batch, cache, share=False) if shared and new == 1 else None
        read = (shared + rows * (total - shared)) * bytes_per_token
        operations = 4 * _HEADS * _HEAD_DIM * rows * (new * total - new * (new - 1) / 2)
        click.echo(
            f"{name:26} {took * 1e6:9.1f} {read / took / 1e9:6.1f} {read / took / most.bandwidth:6.0%} "
            f"{operations / took / 1e9:8.1f} {operations / took / most.operations:6.0%} "
            + (f"{alone * 1e6:9.1f}" if alone is not None else "")
        )


if __name__ == "__main__":
    main()
