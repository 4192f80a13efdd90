"""The GPU worker alone, beside the limits of the machine: decode, prefill, and how long the GPU idles between steps.

    python -m bench.gpu.worker --model qwen3-0.6b --model llama-8b

Random weights, bfloat16, one GPU. A decode's floor is its weights and KV over the copy bandwidth, a prefill's its
products over the matrix rate or its weights over the copy bandwidth, whichever takes longer, all measured in the same
run. Then twenty steps of the worker's ModelRunner are profiled
for each batch size: `idle` is the share of the time between their first and their last kernel in which nothing ran on
the GPU for more than 5 us, `gaps` that of shorter pauses, as there are between any two kernels. More than 3 % idle, a
call between their launches that waits for the GPU, or tokens of graphs that differ make the exit status 1. For some
sizes the ten kernels that take most time are listed. The profiles need llguidance.
"""

import sys
import time
from dataclasses import replace

import click
import torch

from bench.gpu.limits import Limits, measure, seconds
from bench.gpu.shapes import CONFIGS, make_model, weight_bytes
from bench.gpu.trace import table
from common.sampling_params import DrawParams
from worker_proc.attention.interface import ForwardBatch
from worker_proc.cuda.decoder import CudaDecoder
from worker_proc.cuda.graphs import GraphedDecoder
from worker_proc.kv_cache import KVCache, KVSpec

PAGE = 16
CONTEXT = 1024
MOST_IDLE = 0.03
TABLES = (1, 64)  # rows for which kernels are listed, and draws profiled too
DRAWS = {"greedy": DrawParams(temperature=0.0), "drawn": DrawParams(0.8, top_p=0.95, seed=1)}


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


def filled(spec: KVSpec, pages: int) -> KVCache:
    """A cache on the GPU with random numbers of about one."""
    cache = KVCache(spec, pages, PAGE, "cuda")
    for numbers in (*cache.k, *cache.v):
        numbers.random_(-127, 128) if spec.int8 else numbers.normal_()
    for scales in (*cache.k_scales, *cache.v_scales):
        scales.fill_(1 / 64)
    return cache


def decode(model: CudaDecoder, batches: list[int], limits: Limits, *, int8_kv: bool = False) -> bool:
    """Whether graphs give the tokens of plain steps, and steps neither wait nor idle."""
    spec = replace(model.kv_spec, int8=int8_kv)
    cache = filled(spec, max(batches) * CONTEXT // PAGE)
    graphed = GraphedDecoder(model, max(batches), CONTEXT)
    started = time.perf_counter()
    graphed.capture(cache)
    print(f"  graphs captured in {time.perf_counter() - started:.1f} s")
    good = True
    for rows in batches:
        batch = make_batch(rows, 1, CONTEXT)
        moved = weight_bytes(model) + rows * CONTEXT * spec.bytes_per_token
        floor = moved / limits.bandwidth
        eager = seconds(lambda b=batch: model.greedy(b, cache))
        replayed = seconds(lambda b=batch: graphed.greedy(b, cache))
        equal = torch.equal(model.greedy(batch, cache), graphed.greedy(batch, cache))
        print(
            f"  decode batch {rows:>4}: {replayed * 1e3:7.3f} ms with graphs, {eager * 1e3:7.3f} without, floor "
            f"{floor * 1e3:6.3f} ms = {floor / replayed:4.0%}  {rows / replayed:9,.0f} tok/s  "
            f"{'equal tokens' if equal else 'TOKENS DIFFER'}"
        )
        good &= equal
    return steady(graphed, cache, batches) and good


def steady(graphed: GraphedDecoder, cache: KVCache, batches: list[int]) -> bool:
    """Profiles of whole steps, draws and copies to and from the host included; whether none waits or idles."""
    try:
        from bench.gpu.steady import STEPS, SteadyDecode  # needs llguidance, which nothing else here does
    except ImportError as error:
        print(f"  steps: NOT PROFILED, {error}")
        return False
    decodes = SteadyDecode(graphed, cache, max(batches), CONTEXT)
    good = True
    for rows in batches:
        for name, draw in DRAWS.items():
            if name != "greedy" and rows not in TABLES:
                continue
            taken, trace = decodes.step_time(rows, draw) * 1e6, decodes.profile(rows, draw)
            busy = trace.span / STEPS * (1 - trace.idle)
            idle = max(0.0, 1 - busy / taken)
            fine = not trace.waits and idle < MOST_IDLE
            good &= fine
            waits = f"WAITS: {', '.join(sorted(set(trace.waits)))}" if trace.waits else "no wait between launches"
            print(
                f"  steps of {rows:>4}, {name:<6}: {taken:8.0f} us, idle {idle:5.1%} ({trace.span / STEPS:.0f} and "
                f"{trace.idle:.1%} under the profiler), gaps {trace.gaps:5.1%}, {waits}, {trace.tokens_waited_for} of "
                f"{STEPS} waited for their last tokens"
                f"{'' if fine else '  NOT STEADY'}",
                flush=True,
            )
            if rows in TABLES:
                print("\n".join(table(trace, STEPS)), flush=True)
    return good


def prefill(model: CudaDecoder, lengths: list[int], limits: Limits) -> None:
    spec = model.spec
    cache = KVCache(model.kv_spec, -(-max(lengths) // PAGE), PAGE, "cuda")
    graphed = GraphedDecoder(model, 1, PAGE, max_tokens=max(lengths))
    started = time.perf_counter()
    graphed.capture(cache)
    print(f"  pieces captured in {time.perf_counter() - started:.1f} s")
    for length in lengths:
        batch = replace(make_batch(1, length, length), num_prefill_rows=1)
        eager = seconds(lambda b=batch: model.greedy(b, cache), repeats=5)
        taken = seconds(lambda b=batch: graphed.greedy(b, cache), repeats=5)
        products = 2 * length * (weight_bytes(model) - model.weights.head.weight.nbytes) / 2
        attention = 2 * spec.num_layers * spec.num_heads * spec.head_dim * length * length  # causal: half of 4 N^2 D
        floor = max((products + attention) / limits.matrix_rate, weight_bytes(model) / limits.bandwidth)
        print(
            f"  prefill {length:>6}: {taken * 1e3:8.2f} ms with graphs, {eager * 1e3:8.2f} without, floor "
            f"{floor * 1e3:8.2f} ms = {floor / taken:4.0%}  "
            f"{length / taken:9,.0f} tok/s"
        )


@click.command()
@click.option("--model", "models", multiple=True, type=click.Choice(list(CONFIGS)), default=tuple(CONFIGS))
@click.option("--batch", "batches", multiple=True, type=int, default=(1, 8, 64, 256))
@click.option("--prompt", "prompts", multiple=True, type=int, default=(16, 128, 512, 1000, 8192))
@torch.inference_mode()
def main(models: tuple[str, ...], batches: tuple[int, ...], prompts: tuple[int, ...]) -> None:
    limits = measure()
    reached = f"{limits.bandwidth / 1e12:.2f} TB/s, {limits.matrix_rate / 1e12:.0f} TFLOP/s"
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {reached}")
    good = True
    for shape in models:
        print(shape)
        model = make_model(shape)
        good &= decode(model, sorted(batches), limits)
        prefill(model, list(prompts), limits)
        del model
        torch.cuda.empty_cache()
    sys.exit(not good)


if __name__ == "__main__":
    main()
