"""What is handed to FlashInfer, with a stand-in for the package (tests/helpers_flashinfer.py), and how a backend is
chosen. On a GPU with the package, bench/gpu/attention.py runs the real one."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers_triton import DEVICE

pytest.importorskip("triton")

from common.config import ConfigError, ModelConfig
from tests.helpers_flashinfer import LIBRARY
from tests.helpers_models import make_checkpoint
from tests.helpers_paged import Row, make_batch, shuffled_batch
from tests.worker.test_cuda_decoder import load, run_again
from worker_proc import choices
from worker_proc.attention.reference import ReferenceAttention
from worker_proc.cuda import backends
from worker_proc.cuda.attention import TritonAttention
from worker_proc.cuda.backends import choose_attention
from worker_proc.cuda.decoder import CudaDecoder
from worker_proc.cuda.flashinfer_attention import FlashInferAttention, PageIndex
from worker_proc.cuda.graphs import GraphedDecoder
from worker_proc.cuda.interface import CudaAttention
from worker_proc.errors import ModelError
from worker_proc.kv_cache import KVCache, KVSpec
from worker_proc.parallel import TensorParallel

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="the stand-in computes on the host")
CPU = torch.device("cpu")
ROWS = [(5, 5), (9, 40), (1, 1), (1, 33), (1, 64), (1, 65)]  # new tokens, all tokens


def test_page_index() -> None:
    index = PageIndex.of([1, 4, 5, 12], 4, pin=False)
    assert index.indptr.tolist() == [0, 1, 2, 4, 7] and index.last_page_len.tolist() == [1, 4, 1, 4]
    table = torch.tensor([[9, 0, 0], [8, 0, 0], [7, 6, 0], [5, 4, 3]])
    indices = index.indices(table, torch.tensor([1, 4, 5, 12]), 4)
    assert indices.tolist() == [9, 8, 7, 6, 5, 4, 3] and indices.dtype == torch.int32


@pytest.mark.parametrize("heads, kv_heads, page_size, window, softcap", [
    (4, 2, 16, None, None), (4, 4, 1, None, None), (6, 2, 5, 7, None), (2, 1, 3, None, 5.0),
])  # fmt: skip
@pytest.mark.parametrize("rows", [ROWS, ROWS[:2], ROWS[2:]])
def test_equals_the_reference(
    heads: int, kv_heads: int, page_size: int, window: int | None, softcap: float | None, rows: list[tuple[int, int]]
) -> None:
    torch.manual_seed(heads)
    batch, num_pages = shuffled_batch(rows, page_size)
    q, k, v = (torch.randn(len(batch.token_ids), n, 16) for n in (heads, kv_heads, kv_heads))
    spec = KVSpec.uniform(2, kv_heads, 16, 16, torch.float32)
    caches = [KVCache(spec, num_pages, page_size) for _ in range(2)]
    for a, b in zip((*caches[0].k, *caches[0].v), (*caches[1].k, *caches[1].v), strict=True):
        b.normal_()
        a.copy_(b)
    attention = FlashInferAttention(LIBRARY, CPU)
    for layer in (1, 0):
        limits: dict[str, Any] = {"scale": 0.3, "window": window, "softcap": softcap}
        want = ReferenceAttention().forward(layer, q, k, v, batch, caches[0], **limits)
        got = attention.forward(layer, q, k, v, batch, caches[1], **limits)
        torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)
    assert all(wrapper._wrapper.plans == 1 for wrapper in attention._wrappers.values()), "a plan serves all layers"


@pytest.mark.parametrize("kind", ["llama", "mistral-sliding"])
def test_replayed_decodes_equal_stepping(kind: str, tmp_path: Path) -> None:
    """Graphs of fixed sizes, whose plans are made again before every replay."""
    plain = load(make_checkpoint(kind, tmp_path))
    model = CudaDecoder(plain.spec, plain.shard, plain.weights, TensorParallel(), FlashInferAttention(LIBRARY, CPU))
    caches = [KVCache(model.kv_spec, 12, 4) for _ in range(2)]
    for pages in zip(*((*cache.k, *cache.v) for cache in caches), strict=True):
        pages[0].normal_()
        pages[1].copy_(pages[0])
    graphed = GraphedDecoder(model, 4, 24, run_again)
    graphed.capture(caches[0])
    rows = [
        Row([5, 6, 7, 8, 9, 10], [3, 1, 6], 4),
        Row([9, 8, 7, 6], [2, 5], 2),
        Row([4] * 21, [0, 7, 8, 9, 10, 11], 19),
    ]
    for chosen in ([0, 1, 2], [2], [0, 1]):
        step = [rows[i] for i in chosen]
        batch = make_batch(step, [1] * len(step), 4)
        want = plain.forward(batch, caches[1])
        torch.testing.assert_close(graphed.forward(batch, caches[0]), want, atol=1e-5, rtol=1e-5)
        for row in step:
            row.cached += 1


def test_backends_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(choose_attention("sdpa", torch.float32, 64, CPU), ReferenceAttention)
    assert isinstance(choose_attention("triton", torch.bfloat16, 64, CPU), TritonAttention)
    monkeypatch.setitem(sys.modules, "flashinfer", LIBRARY)
    chosen = choose_attention("flashinfer", torch.bfloat16, 64, CPU)
    assert isinstance(chosen, FlashInferAttention) and isinstance(chosen, CudaAttention)
    assert isinstance(choose_attention("auto", torch.bfloat16, 64, CPU), TritonAttention)
    for dtype, dim, problem in (
        (torch.float32, 64, "not float32"),
        (torch.bfloat16, 96, "not of 96"),
        (torch.bfloat16, None, "through transformers"),
    ):
        assert isinstance(choose_attention("auto", dtype, dim, CPU), TritonAttention)
        with pytest.raises(ConfigError, match=problem):
            choose_attention("flashinfer", dtype, dim, CPU)


def test_an_int8_cache_is_left_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", LIBRARY)
    assert isinstance(choose_attention("auto", torch.bfloat16, 64, CPU, int8_kv=True), TritonAttention)
    assert isinstance(choose_attention("triton", torch.bfloat16, 64, CPU, int8_kv=True), TritonAttention)
    with pytest.raises(ConfigError, match=r"gpu-attention flashinfer: .*kv-cache-dtype int8"):
        choose_attention("flashinfer", torch.bfloat16, 64, CPU, int8_kv=True)


def test_sinks_are_left_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", LIBRARY)
    assert isinstance(choose_attention("auto", torch.bfloat16, 64, CPU, sinks=True), TritonAttention)
    assert isinstance(choose_attention("triton", torch.bfloat16, 64, CPU, sinks=True), TritonAttention)
    assert isinstance(choose_attention("sdpa", torch.bfloat16, 64, CPU, sinks=True), ReferenceAttention)
    with pytest.raises(ConfigError, match=r"gpu-attention flashinfer: .*sinks \(gpt-oss\)"):
        choose_attention("flashinfer", torch.bfloat16, 64, CPU, sinks=True)
    batch, cache = make_batch([Row([5], [0])], [1], 16), KVCache(KVSpec.uniform(1, 1, 16, 16, torch.float32), 1, 16)
    q = torch.zeros(1, 1, 16)
    with pytest.raises(ModelError, match=r"sinks = \[1\]: .*gpu-attention triton"):
        FlashInferAttention(LIBRARY, CPU).forward(0, q, q, q, batch, cache, scale=1.0, sinks=torch.zeros(1))


def test_a_worker_says_whether_its_model_has_sinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    monkeypatch.setattr(backends, "choose_attention", lambda *_, sinks, **__: told.append(sinks))
    for kind in ("gpt-oss", "llama", "olmo"):
        model = ModelConfig(str(make_checkpoint(kind, tmp_path / kind)))
        choices.choose_attention(None, torch.bfloat16, torch.device("cuda"), model)
    assert told == [True, False, False]


def test_a_flashinfer_that_is_missing_or_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match="cannot be imported"):
        choose_attention("flashinfer", torch.bfloat16, 64, CPU)
    assert isinstance(choose_attention("auto", torch.bfloat16, 64, CPU), TritonAttention)

    class Broken(LIBRARY.BatchPrefillWithPagedKVCacheWrapper):  # type: ignore[name-defined,misc]
        def run(self, q: torch.Tensor, paged_kv_cache: Any, *, out: torch.Tensor) -> torch.Tensor:
            return out.zero_()

    monkeypatch.setitem(sys.modules, "flashinfer", LIBRARY)
    monkeypatch.setattr(LIBRARY, "BatchPrefillWithPagedKVCacheWrapper", Broken)
    with pytest.raises(ConfigError, match="a trial failed"):
        choose_attention("flashinfer", torch.bfloat16, 64, CPU)
    assert isinstance(choose_attention("auto", torch.bfloat16, 64, CPU), TritonAttention)
