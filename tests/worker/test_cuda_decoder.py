"""The GPU's decoder against transformers, and its replayed steps against stepping: on the GPU where there is one, else
in Triton's interpreter with a recorder that runs the step again."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers_triton import DEVICE, on_device

pytest.importorskip("triton")

from bench.gpu.shapes import CONFIGS
from tests.helpers_models import VOCAB_SIZE, greedy, make_checkpoint
from tests.helpers_paged import Row, copy_of, fill, generate, make_batch, make_prompts, poison
from tests.helpers_quantized import store_mxfp4
from worker_proc.attention.interface import AttentionBackend, ForwardBatch
from worker_proc.attention.reference import ReferenceAttention
from worker_proc.cuda import layers as cuda_layers
from worker_proc.cuda.attention import TritonAttention
from worker_proc.cuda.decoder import CudaDecoder, supports
from worker_proc.cuda.few_rows import few_rows_linear
from worker_proc.cuda.graphs import GraphedDecoder, graph_sizes, kept_bytes
from worker_proc.cuda.pieces import Outputs, launch_bound_tokens, piece_sizes
from worker_proc.cuda.quantized import PackedWeight
from worker_proc.cuda.startup import cuda_decoder, with_graphs
from worker_proc.kv_cache import KVCache
from worker_proc.models.decoder import Decoder
from worker_proc.models.decoder_layout import Shard
from worker_proc.models.decoder_weights import DecoderWeightPlan
from worker_proc.models.describe import read_config
from worker_proc.models.families import parse_spec
from worker_proc.models.interface import LanguageModel
from worker_proc.models.layers import Linear
from worker_proc.models.loading import WeightLoader
from worker_proc.models.registry import load_gpu_model, load_model
from worker_proc.parallel import TensorParallel
from worker_proc.quantization.rows import QuantizedWeight
from worker_proc.quantization.scheme import MXFP4, Scheme
from worker_proc.quantization.source import WeightSource
from worker_proc.quantization.stored_config import parse_stored
from worker_proc.weights import Checkpoint

PROMPTS = [prompt[:20] for prompt in make_prompts(VOCAB_SIZE)][:4]
TOKENS = 5
INT8_BOUND = 2e-3  # of logits: some codes are neighbours of the reference's


def load(path: Path, scheme: Scheme | None = None, dtype: torch.dtype = torch.float32) -> CudaDecoder:
    config = read_config(path)
    spec = parse_spec(config)
    assert supports(spec)
    with torch.inference_mode():
        loader = WeightLoader(Checkpoint.open(path), dtype, DEVICE)
        source = WeightSource(loader, scheme, parse_stored(config))
        plan = DecoderWeightPlan(spec, Shard.of(spec, 0, 1), loader, source, PackedWeight.empty)
        loader.run()
        return CudaDecoder(spec, Shard.of(spec, 0, 1), plan.finish(), TensorParallel())


def load_as_gpu(path: Path, attention: AttentionBackend, scheme: Scheme | None = None) -> LanguageModel:
    """As `load_model` does on a GPU."""
    config = read_config(path)
    spec = parse_spec(config)
    with torch.inference_mode():
        loader = WeightLoader(Checkpoint.open(path), torch.float32, DEVICE)
        source = WeightSource(loader, scheme, parse_stored(config))
        return load_gpu_model(spec, Shard.of(spec, 0, 1), loader, source, TensorParallel(), attention)


class OnDevice:
    """For `generate`, which makes its batches and its cache on the host."""

    def __init__(self, model: LanguageModel):
        self.model = model
        self.kv_spec = model.kv_spec
        self.vocab_size = model.vocab_size
        self.cache: KVCache | None = None

    def forward(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
        if DEVICE.type == "cpu":
            return self.model.forward(batch, cache)
        if self.cache is None:
            self.cache = KVCache(cache.spec, cache.num_pages, cache.page_size, DEVICE)
            poison(self.cache)
        return self.model.forward(on_device(batch), self.cache).cpu()


@pytest.mark.parametrize("kind", ["llama", "llama-gqa-untied", "llama-rope-yarn", "mistral-sliding", "qwen2", "qwen3"])
def test_greedy_tokens_equal_transformers(kind: str, tmp_path: Path) -> None:
    path = make_checkpoint(kind, tmp_path)
    want = greedy(path, PROMPTS, TOKENS)
    assert len({token for output in want for token in output}) > 10, "a degenerate model proves nothing"
    assert generate(OnDevice(load(path)), PROMPTS, TOKENS, page_size=4, chunk=9) == want


@pytest.mark.parametrize("kind", ["gpt-oss", "gemma2", "gpt2", "mixtral"])
def test_layers_by_torch_with_attention_in_kernels(kind: str, tmp_path: Path) -> None:
    path = make_checkpoint(kind, tmp_path)
    model = load_as_gpu(path, TritonAttention())
    assert isinstance(model, Decoder) and isinstance(model.attention, TritonAttention)
    want = greedy(path, PROMPTS, TOKENS)
    assert len({token for output in want for token in output}) > 8, "a degenerate model proves nothing"
    assert generate(OnDevice(model), PROMPTS, TOKENS, page_size=4, chunk=9) == want


def test_what_codes_are_multiplied_with(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path / "llama")
    assert isinstance(load_as_gpu(path, TritonAttention()), CudaDecoder)
    plain = load_as_gpu(path, ReferenceAttention(), Scheme(8))
    assert isinstance(plain, Decoder) and isinstance(plain.weights.head.weight, QuantizedWeight)
    model = load_as_gpu(make_checkpoint("gpt2", tmp_path / "gpt2"), TritonAttention(), Scheme(8))
    assert isinstance(model, Decoder) and isinstance(model.weights.head.weight, PackedWeight)


@pytest.mark.parametrize("int8", [False, True], ids=["plain", "int8"])
def test_a_gpt_oss_in_fp4(int8: bool, tmp_path: Path) -> None:
    """Its experts stay codes, and no step of it becomes a graph, which could not hold how tokens go to experts."""
    source = make_checkpoint("gpt-oss", tmp_path / "source", head_dim=32, sliding_window=5)
    codes, _ = store_mxfp4(source, tmp_path)
    model = load_as_gpu(codes, TritonAttention())
    assert isinstance(model, Decoder)
    for layer in model.weights.layers:
        assert layer.sinks is not None and len(layer.experts) == 5
        for mlp in layer.experts:
            for linear in (mlp.up, mlp.down):
                assert isinstance(linear.weight, PackedWeight) and linear.weight.scheme == MXFP4
    reference = load_model(
        codes, dtype=torch.float32, device="cpu", tp=TensorParallel(), attention=ReferenceAttention()
    )
    want = generate(reference, PROMPTS, TOKENS, page_size=4, chunk=9, int8=int8)
    assert len({token for output in want for token in output}) > 8, "a degenerate model proves nothing"
    assert generate(OnDevice(model), PROMPTS, TOKENS, page_size=4, chunk=9, int8=int8) == want
    assert cuda_decoder(model) is None
    if DEVICE.type == "cuda":
        cache = KVCache(model.kv_spec, 2, 16, DEVICE)
        assert with_graphs(model, model.attention, cache, 4, 64, 64, TensorParallel(), None) is model


def test_logits_equal_the_reference_decoder(tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path)
    reference = load_model(path, dtype=torch.float32, device="cpu", tp=TensorParallel(), attention=ReferenceAttention())
    rows = [Row(PROMPTS[2], [3, 0], 0), Row(PROMPTS[1] + [7], [2], 0)]
    batch = make_batch(rows, [len(row.tokens) for row in rows], 16)
    want = reference.forward(batch, KVCache(reference.kv_spec, 4, 16))
    model = load(path)
    got = model.forward(on_device(batch), KVCache(model.kv_spec, 4, 16, DEVICE))
    torch.testing.assert_close(got.cpu(), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_few_rows_equal_what_torch_multiplies(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product of one row, and all but the gated ones of some more."""
    model = load(make_checkpoint(kind, tmp_path), dtype=torch.float16)
    layers, calls = model.spec.num_layers, list[bool]()

    def count(x: torch.Tensor, linear: Linear, *, gated: bool = False) -> torch.Tensor:
        calls.append(gated)
        return few_rows_linear(x, linear, gated=gated)

    monkeypatch.setattr(cuda_layers, "few_rows_linear", count)
    for rows in (1, 2, 4, 5):
        held = [Row([5 + i, 6, 7, 8], [3 + i % 4, 1], 3) for i in range(rows)]
        first = KVCache(model.kv_spec, 8, 4, DEVICE)
        fill(first)
        second = copy_of(first, DEVICE)
        batch = on_device(make_batch(held, [1] * rows, 4))
        calls.clear()
        found = model.forward(batch, first)
        assert calls == {1: [False, False, True, False] * layers + [False], 5: []}.get(rows, [False] * (3 * layers + 1))
        with monkeypatch.context() as without:
            without.setattr(cuda_layers, "suits_few_rows", lambda *_, **__: False)
            want = model.forward(batch, second)
        torch.testing.assert_close(found, want, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("kind", ["llama", "llama-gqa-untied", "mistral-sliding", "qwen3"])
def test_an_int8_cache_holds_the_codes_of_the_reference_decoder(kind: str, tmp_path: Path) -> None:
    """Chunks, then decodes beside a chunk: logits, tokens, and what is in the cache."""
    path = make_checkpoint(kind, tmp_path)
    reference = load_model(path, dtype=torch.float32, device="cpu", tp=TensorParallel(), attention=ReferenceAttention())
    model = load(path)
    here = KVCache(replace(model.kv_spec, int8=True), 4, 16)
    fill(here)
    there = copy_of(here, DEVICE)
    rows = [Row(PROMPTS[2], [3, 0], 0), Row(PROMPTS[1] + [7], [2], 0), Row(PROMPTS[3], [1, 1], 0)]
    for lengths in ([9, 2, 0], [1, 1, 5], [3, 0, 1]):
        step = [(row, count) for row, count in zip(rows, lengths, strict=True) if count]
        batch = make_batch([row for row, _ in step], [count for _, count in step], 16)
        want, got = reference.forward(batch, here), model.forward(on_device(batch), there).cpu()
        torch.testing.assert_close(got, want, atol=INT8_BOUND, rtol=INT8_BOUND)
        for row, count in step:
            row.cached += count
    differing = 0.0
    for a, b in zip((*there.k, *there.v), (*here.k, *here.v), strict=True):
        steps = (a.cpu()[:4].int() - b[:4].int()).abs()
        assert int(steps.max()) <= 1
        differing = max(differing, float((steps > 0).float().mean()))
    assert differing < 0.01, "K and V of other arithmetic may be rounded to neighbouring codes, seldom"


@pytest.mark.parametrize("most", [1, 2, 3, 8, 9, 100, 256, 5000])
def test_graph_sizes(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == min(most, 256)
    assert all(larger <= max(2 * smaller, smaller + 16) for smaller, larger in pairwise(sizes))


def run_again(step: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
    """A graph's stand-in: the same buffers in, the same buffers out."""
    outputs = step()

    def replay() -> None:
        for old, new in zip(outputs, step(), strict=True):
            old.copy_(new)

    return replay, outputs


@pytest.mark.parametrize("int8", [False, True], ids=["plain", "int8"])
def test_replayed_decodes_equal_stepping(int8: bool, tmp_path: Path) -> None:
    """Steps of 3, then 1, then 2 rows: what an earlier one left in the buffers must not show."""
    model = load(make_checkpoint("llama", tmp_path))
    first = KVCache(replace(model.kv_spec, int8=int8), 8, 4, DEVICE)
    fill(first)
    caches = [first, copy_of(first, DEVICE)]
    graphed = GraphedDecoder(model, 4, 16, None if DEVICE.type == "cuda" else run_again)
    shown: list[tuple[int, int]] = []
    graphed.capture(caches[0], lambda done, total: shown.append((done, total)))
    assert shown == [(0, 3), (1, 3), (2, 3), (3, 3)]
    rows = [Row([5, 6, 7, 8, 9, 10], [3, 1, 6], 4), Row([9, 8, 7, 6], [2, 5], 2), Row([4, 4, 4, 4, 4], [0, 7], 3)]
    scratch = caches[0].scratch_page
    for chosen in ([0, 1, 2], [2], [0, 1]):
        step = [rows[i] for i in chosen]
        batch = on_device(make_batch(step, [1] * len(step), 4))
        want = model.forward(batch, caches[1])
        torch.testing.assert_close(graphed.forward(batch, caches[0]), want, atol=1e-5, rtol=1e-5)
        assert graphed.greedy(batch, caches[0]).tolist() == want.argmax(-1).tolist()
        for row in step:
            row.cached += 1
    for one, two in zip(caches[0].page_tensors, caches[1].page_tensors, strict=True):
        torch.testing.assert_close(one[:scratch], two[:scratch], msg="an idle row wrote to a page of the pool")


@pytest.mark.parametrize("most", [0, 15, 16, 100, 2048, 4772])
def test_piece_sizes(most: int) -> None:
    sizes = piece_sizes(most)
    assert sizes == sorted(set(sizes)) and all(16 <= size <= most for size in sizes)
    assert bool(sizes) == (most >= 16)
    assert all(larger - smaller <= max(16, smaller / 8) for smaller, larger in pairwise(sizes))
    assert not sizes or most - sizes[-1] < max(16, most / 8)


def test_prompts_are_replayed_as_long_as_their_launches_take() -> None:
    """A layer's launches take 0.3 ms, products 0.5 PFLOP/s."""
    small, large = parse_spec(CONFIGS["qwen3-0.6b"]), parse_spec(CONFIGS["llama-8b"])
    assert launch_bound_tokens(small, 1) == 4768 and launch_bound_tokens(large, 1) == 343
    assert launch_bound_tokens(large, 2) == 687


@pytest.mark.parametrize(("kind", "int8"), [("qwen3", False), ("llama-gqa-untied", True)])
def test_replayed_prompts_equal_stepping(kind: str, int8: bool, tmp_path: Path) -> None:
    """Chunks, chunks beside decodes, many decodes, of all sizes in turn: what others left in the buffers must not
    show, and what is computed in excess goes to no page of the pool."""
    model = load(make_checkpoint(kind, tmp_path))
    first = KVCache(replace(model.kv_spec, int8=int8), 16, 4, DEVICE)
    fill(first)
    caches = [first, copy_of(first, DEVICE)]
    graphed = GraphedDecoder(model, 2, 40, None if DEVICE.type == "cuda" else run_again, max_tokens=40)
    shown: list[tuple[int, int]] = []
    graphed.capture(caches[0], lambda done, total: shown.append((done, total)))
    assert shown == [(done, 4) for done in range(5)], "graphs of two decodes and of one, of 32 tokens and of 16"
    replayed: list[int] = []
    step_in_pieces = graphed._pieces.step  # type: ignore[union-attr]
    graphed._pieces.step = lambda batch: (replayed.append(len(batch.token_ids)), step_in_pieces(batch))[1]  # type: ignore
    scratch = caches[0].scratch_page
    rows = [
        Row(list(range(5, 43)), [3, 1, 6, 8, 9, 10, 11, 12, 13, 14], 0), Row([9, 8, 7, 6, 5, 4], [2, 5], 2),
        Row([4, 4, 4, 4, 4], [0, 7], 3),
    ]  # fmt: skip
    for lengths in ([17, 0, 0], [3, 1, 0], [1, 1, 1], [13, 2, 0], [0, 0, 1]):
        chosen = [(row, count) for row, count in zip(rows, lengths, strict=True) if count]
        batch = on_device(make_batch([row for row, _ in chosen], [count for _, count in chosen], 4))
        want = model.forward(batch, caches[1])
        torch.testing.assert_close(graphed.forward(batch, caches[0]), want, atol=1e-5, rtol=1e-5)
        assert graphed.greedy(batch, caches[0]).tolist() == want.argmax(-1).tolist()
        for row, count in chosen:
            row.cached += count
    assert replayed == [17, 17, 4, 4, 3, 3, 15, 15], "the last step is of a single decode, which has a graph"
    told: list[int] = []
    graphed.forward(replace(batch, loads=Loads(told)), caches[0])
    model.forward(batch, caches[1])
    assert replayed[8:] == [1] and told == list(range(model.kv_spec.num_layers)), "pages that come layer by layer"
    for one, two in zip(caches[0].page_tensors, caches[1].page_tensors, strict=True):
        torch.testing.assert_close(one[:scratch], two[:scratch], msg="a token in excess went to a page of the pool")


def test_other_steps_are_not_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(make_checkpoint("llama", tmp_path))
    cache = KVCache(model.kv_spec, 8, 4, DEVICE)
    graphed = GraphedDecoder(model, 2, 16, None if DEVICE.type == "cuda" else run_again)
    graphed.capture(cache)
    rows = [Row([5, 6, 7], [3], 0), Row([5, 6], [2], 1), Row([5, 6], [1], 1)]
    filled: list[Any] = []
    monkeypatch.setattr(graphed._decodes, "fill", lambda *args: filled.append(args))
    for step, lengths in ((rows[:1], [3]), (rows[:2], [3, 1]), (rows, [1, 1, 1])):
        graphed.forward(on_device(make_batch(step, lengths, 4)), cache)
    decode = on_device(make_batch(rows[1:], [1, 1], 4))
    graphed.forward(decode, KVCache(model.kv_spec, 8, 4, DEVICE))  # another cache than the captured one
    told: list[int] = []
    graphed.forward(replace(decode, loads=Loads(told)), cache)
    assert told == list(range(model.kv_spec.num_layers)), "pages that are loaded come layer by layer"
    assert not filled
    graphed.forward(decode, cache)
    assert len(filled) == 1


class Loads:
    """Pages that are there already."""

    def __init__(self, told: list[int]) -> None:
        self.told = told

    def before(self, layer: int) -> None:
        self.told.append(layer)


def test_graphs_keep_as_much_as_is_reserved(tmp_path: Path) -> None:
    model = load(make_checkpoint("llama", tmp_path), dtype=torch.bfloat16)
    cache = KVCache(model.kv_spec, 8, 16, DEVICE)
    graphed = GraphedDecoder(model, 16, 64, None if DEVICE.type == "cuda" else run_again)
    graphed.capture(cache)
    logits = [outputs[0] for _, _, outputs in graphed._decodes.graphs.values()]
    assert len({kept.data_ptr() for kept in logits}) == len(logits)
    shares = model.attention.shares_pages
    reserved = kept_bytes(16, model.vocab_size, torch.bfloat16, 4, shares_pages=shares)
    assert sum(kept.numel() * kept.itemsize for kept in logits) + graphed._decodes.inputs.page_table.nbytes == reserved
