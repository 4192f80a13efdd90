"""Logits of the GPU's decoder beside those of the plain one in float32 on the same GPU, for mixed batches.

    python -m bench.gpu.parity [--small]

Errors are norms of differences over norms of the reference. In float32 they must be below 1e-4 and greedy tokens equal.
In bfloat16 they must be no larger than `WORSE` times those that the plain decoder has in bfloat16, which is what the
format costs a model. Steps replayed as graphs of as many rows must give the tokens of steps that are not; where a graph
has more rows, or a step of prompts is replayed in pieces, logits within the same bounds.
"""

import sys
from dataclasses import replace

import click
import torch

from bench.gpu.shapes import CONFIGS, make_model
from bench.gpu.worker import PAGE
from worker_proc.attention.interface import ForwardBatch
from worker_proc.attention.reference import ReferenceAttention
from worker_proc.cuda.decoder import CudaDecoder
from worker_proc.cuda.graphs import GraphedDecoder, graph_sizes
from worker_proc.kv_cache import KVCache
from worker_proc.models.decoder import Decoder
from worker_proc.models.decoder_layout import Shard
from worker_proc.models.decoder_weights import DecoderWeights
from worker_proc.models.spec import DecoderSpec
from worker_proc.parallel import TensorParallel

EXACT = 1e-4
WORSE = 1.25
ROWS = [(300, 300), (17, 1041), (64, 129), (1, 1), (1, 16), (1, 17), (1, 1024), (1, 4097)]  # new tokens, all tokens


def cast(weights: DecoderWeights, dtype: torch.dtype) -> DecoderWeights:
    """The same weights in another precision."""

    def tensors(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return value.to(dtype)
        if isinstance(value, tuple):
            return tuple(tensors(item) for item in value)
        if hasattr(value, "__dataclass_fields__"):
            names = value.__dataclass_fields__
            return replace(value, **{name: tensors(getattr(value, name)) for name in names})  # type: ignore[type-var]
        return value

    made = tensors(weights)
    assert isinstance(made, DecoderWeights)
    return made


def mixed_batch(rows: list[tuple[int, int]], vocab: int) -> tuple[ForwardBatch, int]:
    """A step of chunks and decodes over shuffled pages, and how many pages it takes."""
    need = [-(-total // PAGE) for _, total in rows]
    pages = torch.randperm(sum(need), device="cuda").split(need)
    table = torch.zeros(len(rows), max(need), dtype=torch.int64, device="cuda")
    for row, held in enumerate(pages):
        table[row, : len(held)] = held
    positions = torch.cat([torch.arange(total - new, total, device="cuda") for new, total in rows])
    counts = torch.tensor([new for new, _ in rows], device="cuda")
    row_of_token = torch.arange(len(rows), device="cuda").repeat_interleave(counts)
    return ForwardBatch(
        token_ids=torch.randint(0, vocab, (len(positions),), device="cuda"),
        positions=positions,
        slot_mapping=table[row_of_token, positions // PAGE] * PAGE + positions % PAGE,
        page_table=table,
        kv_lens=torch.tensor([total for _, total in rows], device="cuda"),
        q_lens=[new for new, _ in rows],
        kv_lens_host=[total for _, total in rows],
        num_prefill_rows=sum(new > 1 for new, _ in rows),
        logit_rows=counts.cumsum(0) - 1,
    ), sum(need)


@click.command()
@click.option("--small", is_flag=True, help="Short contexts and two layers, for slow tools.")
@torch.inference_mode()
def main(small: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    rows = [(new, min(total, 129)) for new, total in ROWS[2:]] if small else ROWS
    failed = False
    for name in CONFIGS:
        made = make_model(name, layers=2 if small or name == "llama-8b" else None)  # the reference is slow
        spec, weights = made.spec, made.weights
        batch, pages = mixed_batch(rows, 30_000)
        exact = cast(weights, torch.float32)
        reference = Decoder(spec, _shard(spec), exact, TensorParallel(), ReferenceAttention())
        held = KVCache(reference.kv_spec, pages, PAGE, "cuda")
        for tensor in (*held.k, *held.v):
            tensor.normal_()
        start = [tensor.clone() for tensor in (*held.k, *held.v)]
        want = reference.forward(batch, held)
        plain = Decoder(spec, _shard(spec), weights, TensorParallel(), ReferenceAttention())
        cache = KVCache(plain.kv_spec, pages, PAGE, "cuda")
        for tensor, source in zip((*cache.k, *cache.v), start, strict=True):
            tensor.copy_(source)
        rounded = WORSE * float((plain.forward(batch, cache) - want).norm() / want.norm())
        for dtype, bound in ((torch.float32, EXACT), (torch.bfloat16, rounded)):
            model = CudaDecoder(spec, _shard(spec), exact if dtype == torch.float32 else weights, TensorParallel())
            cache = KVCache(model.kv_spec, pages, PAGE, "cuda")
            for tensor, source in zip((*cache.k, *cache.v), start, strict=True):
                tensor.copy_(source)
            got = model.forward(batch, cache)
            error = float((got - want).norm() / want.norm())
            same = float((got.argmax(-1) == want.argmax(-1)).float().mean())
            wrong = not error < bound or (dtype == torch.float32 and same < 1)
            failed |= wrong
            print(f"{name} {dtype}: error {error:.1e} (bound {bound:.1e}), equal greedy {same:.0%}{' WRONG' * wrong}")
            failed |= not graphs_agree(model, cache, batch, bound)
        torch.cuda.empty_cache()
    sys.exit(failed)


def graphs_agree(model: CudaDecoder, cache: KVCache, batch: ForwardBatch, bound: float) -> bool:
    """Whether decode rows of `batch` give the same in graphs and not: the same tokens in a graph of as many rows; in a
    larger one, whose other rows idle, logits within `bound`, as its attention is cut into other parts."""
    first, rows = batch.num_prefill_rows, len(batch.q_lens) - batch.num_prefill_rows
    graphed = GraphedDecoder(model, 2 * rows, batch.page_table.shape[1] * PAGE, max_tokens=512)
    graphed.capture(cache)
    whole = max(size for size in graph_sizes(2 * rows) if size <= rows)
    decodes = some_decodes(batch, first, whole)
    equal = torch.equal(graphed.greedy(decodes, cache), model.greedy(decodes, cache))
    decodes = some_decodes(batch, first, rows)
    want = model.forward(decodes, cache)
    error = float((graphed.forward(decodes, cache) - want).norm() / want.norm())
    step = model.forward(batch, cache)
    pieces = float((graphed.forward(batch, cache) - step).norm() / step.norm())
    print(
        f"  graphs: {whole} rows {'equal greedy tokens' if equal else 'TOKENS DIFFER'}, {rows} rows with idle ones "
        f"error {error:.1e}{' WRONG' * (not error < bound)}, the whole step in pieces {pieces:.1e}"
        f"{' WRONG' * (not pieces < bound)}"
    )
    return equal and error < bound and pieces < bound


def some_decodes(batch: ForwardBatch, first: int, rows: int) -> ForwardBatch:
    """Rows `first` .. `first` + `rows` of `batch`, which are decodes."""
    tokens = sum(batch.q_lens[:first])
    these, theirs = slice(first, first + rows), slice(tokens, tokens + rows)
    return ForwardBatch(
        batch.token_ids[theirs], batch.positions[theirs], batch.slot_mapping[theirs], batch.page_table[these],
        batch.kv_lens[these], [1] * rows, batch.kv_lens_host[these], 0, torch.arange(rows, device="cuda"),
    )  # fmt: skip


def _shard(spec: DecoderSpec) -> Shard:
    return Shard.of(spec, 0, 1)


if __name__ == "__main__":
    main()
