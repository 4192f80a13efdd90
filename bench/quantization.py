"""What quantization costs and gives: perplexity of a model in each precision, and speed against its own bytes.

    python -m bench.quantization accuracy                                   # the demo model, text it has not seen
    python -m bench.quantization speed --model DIRECTORY                    # decode steps in the worker's process

Perplexity is over the held-out part of the demo model's corpus (bench/demo_corpus.py), documents one after another in
windows of the context length; the second half of each window after the first counts, so every token is scored once with
at least half a window before it. Speed is the median time of a decode step of B requests with `--context` tokens each,
and the floor is the bytes of weights and KV that the step must read over what all threads read in the same run.
"""

import itertools
import math
import platform
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path

import click
import torch

from bench.demo_corpus import build_corpus
from bench.limits import limits
from tokenizer_proc.tokenizer_files import load_tokenizer
from worker_proc.attention.interface import ForwardBatch
from worker_proc.attention.reference import ReferenceAttention
from worker_proc.cpu.decoder import CpuDecoder
from worker_proc.cpu.features import cpu_features
from worker_proc.cpu.library import load_library
from worker_proc.cpu.machine import num_cpus
from worker_proc.kv_cache import KVCache
from worker_proc.models.registry import load_model
from worker_proc.parallel import TensorParallel
from worker_proc.quantization.scheme import FP8, W8A8, Scheme

DEMO = Path(__file__).parents[1] / "demo_model"
PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class Precision:
    name: str
    scheme: Scheme | None = None
    int8_kv: bool = False


PRECISIONS = (
    Precision("bfloat16"),
    Precision("bfloat16, KV int8", None, True),
    Precision("int8", Scheme(8)),
    Precision("int8, KV int8", Scheme(8), True),
    Precision("w8a8", W8A8),
    Precision("fp8", FP8),
    Precision("fp8 g128", Scheme(8, 128, floating=True)),
    Precision("int4 g32", Scheme(4, 32)),
    Precision("int4 g64", Scheme(4, 64)),
    Precision("int4 g128", Scheme(4, 128)),
    Precision("int4 g128, KV int8", Scheme(4, 128), True),
    Precision("w4a8 g32", Scheme(4, 32, dynamic=True)),
    Precision("w4a8 g64", Scheme(4, 64, dynamic=True)),
    Precision("w4a8 g128", Scheme(4, 128, dynamic=True)),
)


def load(path: Path, precision: Precision) -> CpuDecoder:
    native = load_library(cpu_features().levels()[0])
    native.set_threads(num_cpus())
    model = load_model(
        path, dtype=torch.bfloat16, device="cpu", tp=TensorParallel(), attention=ReferenceAttention(), native=native,
        quantization=precision.scheme,
    )  # fmt: skip
    if not isinstance(model, CpuDecoder):
        raise click.ClickException(f"{path}: not a model of the native decoder")
    return model


def batch_of(tokens: list[list[int]], cached: int, per_row: int, logits_from: int | None = None) -> ForwardBatch:
    """A step of the rows `tokens`, of which `cached` are in the cache; row r has the r-th `per_row` pages. With
    `logits_from` the logits of all tokens from there on, else those of the last ones."""
    counts = [len(row) for row in tokens]
    slots = [r * per_row * PAGE_SIZE + cached + i for r, count in enumerate(counts) for i in range(count)]
    lens = [cached + count for count in counts]
    last = torch.tensor(list(itertools.accumulate(counts))) - 1
    return ForwardBatch(
        token_ids=torch.tensor([token for row in tokens for token in row]),
        positions=torch.tensor([cached + i for count in counts for i in range(count)]),
        slot_mapping=torch.tensor(slots),
        page_table=torch.arange(len(tokens) * per_row).view(len(tokens), per_row),
        kv_lens=torch.tensor(lens),
        q_lens=counts,
        kv_lens_host=lens,
        num_prefill_rows=sum(count > 1 for count in counts),
        logit_rows=last if logits_from is None else torch.arange(logits_from, counts[0]),
    )


def machine() -> str:
    flags = "/proc/cpuinfo"
    names = [
        line.split(":")[1].strip() for line in Path(flags).read_text().splitlines() if line.startswith("model name")
    ]
    return f"{names[0] if names else platform.machine()}, {num_cpus()} CPUs, torch {torch.__version__}"


@click.group()
def main() -> None:
    """Accuracy and speed of quantized models."""


@main.command()
@click.option("--model", type=click.Path(path_type=Path), default=DEMO)
@click.option("--tokens", default=65536, help="Held-out tokens at most.")
@click.option("--only", default="", help="Names of precisions, separated by semicolons.  [default: all]")
def accuracy(model: Path, tokens: int, only: str) -> None:
    """Perplexity of held-out text."""
    corpus = build_corpus()
    tokenizer = load_tokenizer(model)
    ids = [0, *itertools.chain.from_iterable(tokenizer.encode(text).ids for text in corpus.held_out)][:tokens]
    click.echo(f"{len(ids)} held-out tokens; {machine()}")
    click.echo("precision             perplexity   to bfloat16")
    base = 0.0
    for precision in PRECISIONS:
        if only and precision.name not in only.split(";"):
            continue
        found = perplexity(load(model, precision), ids, precision.int8_kv)
        base = base or found
        click.echo(f"{precision.name:20}  {found:10.4f}   {found / base - 1:+11.2%}")


def perplexity(model: CpuDecoder, ids: list[int], int8_kv: bool) -> float:
    window = model.spec.context_length
    half, pages = window // 2, -(-window // PAGE_SIZE)
    cache = KVCache(replace(model.kv_spec, int8=int8_kv), pages, PAGE_SIZE)
    nats, count = 0.0, 0
    for begin in range(0, len(ids) - half, half):
        part = ids[begin : begin + window]
        skipped = 0 if begin == 0 else half - 1  # the token before the first one that counts
        logits = model.forward(batch_of([part], 0, pages, skipped), cache)
        wanted = torch.tensor(part[skipped + 1 :])
        nats += float(torch.nn.functional.cross_entropy(logits[:-1], wanted, reduction="sum"))
        count += len(wanted)
    return math.exp(nats / count)


@main.command()
@click.option("--model", type=click.Path(path_type=Path), required=True)
@click.option("--batches", default="1,8,32", help="Requests at once, separated by commas.")
@click.option("--context", default=128, help="Tokens in the cache of each request.")
@click.option("--steps", default=15, help="Decode steps per number.")
@click.option("--only", default="", help="Names of precisions, separated by semicolons.  [default: all]")
def speed(model: Path, batches: str, context: int, steps: int, only: str) -> None:
    """Decode steps against the bytes that they read."""
    native = load_library(cpu_features().levels()[0])
    native.set_threads(num_cpus())
    click.echo(f"{machine()}; {context} tokens of context; 'read' is what all threads read before and after")
    click.echo("precision              load s  weights MB  batch  step ms   tok/s   GB/s   read  of the floor")
    for precision in PRECISIONS:
        if only and precision.name not in only.split(";"):
            continue
        started = time.perf_counter()
        loaded = load(model, precision)
        load_s, weights = time.perf_counter() - started, weight_bytes(loaded)
        for batch in map(int, batches.split(",")):
            before = limits(native).bandwidth
            took = decode_seconds(loaded, batch, context, steps, precision.int8_kv)
            kv = batch * context * replace(loaded.kv_spec, int8=precision.int8_kv).bytes_per_token
            size = weights + kv
            bandwidth = max(before, limits(native).bandwidth)
            click.echo(
                f"{precision.name:20}  {load_s:7.1f}  {weights / 1e6:10.0f}  {batch:5}  {took * 1e3:7.2f}"
                f"  {batch / took:6.1f}  {size / took / 1e9:5.1f}  {bandwidth / 1e9:5.1f}"
                f"  {size / bandwidth / took:7.0%}"
            )
        del loaded


def weight_bytes(model: CpuDecoder) -> int:
    """What a decode step reads of the weights: codes, scales, zeros."""
    matrices = [model.weights.head]
    for layer in model.weights.layers:
        matrices += [layer.qkv, layer.o, layer.up, layer.down]
    return sum(matrix.nbytes for matrix in matrices)


def decode_seconds(model: CpuDecoder, batch: int, context: int, steps: int, int8_kv: bool) -> float:
    """Median of decode steps at the same place, after a step that warms up; greedy, as the worker decodes."""
    pages = -(-(context + 1) // PAGE_SIZE)
    cache = KVCache(replace(model.kv_spec, int8=int8_kv), batch * pages, PAGE_SIZE)
    prompts = torch.randint(0, model.vocab_size, (batch, context), generator=torch.Generator().manual_seed(0)).tolist()
    model.greedy(batch_of(prompts, 0, pages), cache)
    times = []
    for _ in range(steps + 1):
        step = batch_of([[1]] * batch, context, pages)
        began = time.perf_counter()
        model.greedy(step, cache)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


if __name__ == "__main__":
    main()
