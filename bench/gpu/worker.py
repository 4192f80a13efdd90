"""The GPU worker alone, beside the limits of the machine: decode, prefill, and how long the GPU idles between steps.

    python -m bench.gpu.worker --model qwen3-0.6b --model llama-8b

Random weights, bfloat16, one GPU. A decode's floor is its weights and KV over the copy bandwidth, a prefill's its
products over the matrix rate, both measured in the same run. `idle` is the share of the time between the first and the
last kernel of twenty decode steps in which no kernel ran, from a profiler trace.
"""

import time
from dataclasses import replace

import click
import torch
from torch.profiler import ProfilerActivity, profile

from bench.gpu.limits import Limits, measure, seconds
from bench.gpu.shapes import CONFIGS, make_model, weight_bytes
from worker_proc.attention.interface import ForwardBatch
from worker_proc.cuda.decoder import CudaDecoder
from worker_proc.cuda.graphs import GraphedDecoder
from worker_proc.kv_cache import KVCache

PAGE = 16
CONTEXT = 1024


def make_batch(rows: int, new: int, total: int) -> ForwardBatch:
    """`rows` requests of `total` tokens each, of which the last `new` are computed."""
    pages = -(-total // PAGE)
    table = torch.randperm(rows * pages, device="cuda").view(rows, pages)
    positions = torch.arange(total - new, total, device="cuda").repeat(rows)
    row_of_token = torch.arange(rows, device="cuda").repeat_interleave(new)
    return ForwardBatch(
        token_ids=torch.randint(0, 30_000, (rows * new,), device="cuda"),
        positions=positions,
        slot_mapping=table[row_of_token, positions // PAGE] * PAGE + positions % PAGE,
        page_table=table,
        kv_lens=torch.full((rows,), total, device="cuda"),
        q_lens=[new] * rows,
        kv_lens_host=[total] * rows,
        num_prefill_rows=0 if new == 1 else rows,
        logit_rows=torch.arange(1, rows + 1, device="cuda") * new - 1,
    )


def decode(model: CudaDecoder, batches: list[int], limits: Limits) -> None:
    spec = model.kv_spec
    cache = KVCache(spec, max(batches) * CONTEXT // PAGE, PAGE, "cuda")
    for pages in (*cache.k, *cache.v):
        pages.normal_()
    graphed = GraphedDecoder(model, max(batches), CONTEXT)
    started = time.perf_counter()
    graphed.capture(cache)
    print(f"  graphs captured in {time.perf_counter() - started:.1f} s")
    for rows in batches:
        batch = make_batch(rows, 1, CONTEXT)
        moved = weight_bytes(model) + rows * CONTEXT * spec.bytes_per_token
        floor = moved / limits.bandwidth
        eager = seconds(lambda b=batch: model.greedy(b, cache))
        replayed = seconds(lambda b=batch: graphed.greedy(b, cache))
        equal = torch.equal(model.greedy(batch, cache), graphed.greedy(batch, cache))
        print(
            f"  decode batch {rows:>4}: {replayed * 1e3:7.3f} ms with graphs, {eager * 1e3:7.3f} without, floor "
            f"{floor * 1e3:6.3f} ms = {floor / replayed:4.0%}  {rows / replayed:9,.0f} tok/s  idle "
            f"{idle_share(graphed, batch, cache):5.1%}  {'equal tokens' if equal else 'TOKENS DIFFER'}"
        )


def idle_share(model: GraphedDecoder, batch: ForwardBatch, cache: KVCache, steps: int = 20) -> float:
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            model.greedy(batch, cache)
        torch.cuda.synchronize()
    spans = sorted((e.time_range.start, e.time_range.end) for e in profiler.events() if e.device_type.name == "CUDA")
    busy, reached = 0.0, spans[0][0]
    for begin, end in spans:
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return 1 - busy / (reached - spans[0][0])


def prefill(model: CudaDecoder, lengths: list[int], limits: Limits) -> None:
    spec = model.spec
    for length in lengths:
        cache = KVCache(model.kv_spec, -(-length // PAGE), PAGE, "cuda")
        batch = replace(make_batch(1, length, length), num_prefill_rows=1)
        taken = seconds(lambda b=batch, c=cache: model.greedy(b, c), repeats=5)
        products = 2 * length * (weight_bytes(model) - model.weights.head.weight.nbytes) / 2
        attention = 2 * spec.num_layers * spec.num_heads * spec.head_dim * length * length  # causal: half of 4 N^2 D
        floor = (products + attention) / limits.matrix_rate
        print(
            f"  prefill {length:>6}: {taken * 1e3:8.2f} ms, floor {floor * 1e3:8.2f} ms = {floor / taken:4.0%}  "
            f"{length / taken:9,.0f} tok/s"
        )


@click.command()
@click.option("--model", "models", multiple=True, type=click.Choice(list(CONFIGS)), default=tuple(CONFIGS))
@click.option("--batch", "batches", multiple=True, type=int, default=(1, 8, 64, 256))
@click.option("--prompt", "prompts", multiple=True, type=int, default=(1024, 8192))
@torch.inference_mode()
def main(models: tuple[str, ...], batches: tuple[int, ...], prompts: tuple[int, ...]) -> None:
    limits = measure()
    reached = f"{limits.bandwidth / 1e12:.2f} TB/s, {limits.matrix_rate / 1e12:.0f} TFLOP/s"
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {reached}")
    for shape in models:
        print(shape)
        model = make_model(shape)
        decode(model, sorted(batches), limits)
        prefill(model, list(prompts), limits)
        del model
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
