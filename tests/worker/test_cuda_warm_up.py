"""What a GPU's worker launches before it serves: on the GPU where there is one, else in Triton's interpreter. Which
kernels those are is for test_cuda_compile.py."""

from pathlib import Path

import pytest
import torch

from tests.helpers_triton import DEVICE

pytest.importorskip("triton")

from tests.helpers_models import make_checkpoint
from tests.helpers_paged import fill
from tests.helpers_quantized import store_mxfp4
from tests.worker.test_cuda_decoder import load, load_as_gpu
from worker_proc.cuda.attention import TritonAttention
from worker_proc.cuda.sampling import draw_rows
from worker_proc.cuda.warm_up import compile_kernels
from worker_proc.kv_cache import KVCache
from worker_proc.model_runner import ModelRunner
from worker_proc.models.interface import LanguageModel
from worker_proc.parallel import TensorParallel
from worker_proc.quantization.scheme import Scheme


@pytest.mark.parametrize("scheme", [None, Scheme(4, 32)], ids=str)
def test_a_start_shows_its_progress_and_leaves_nothing_behind(scheme: Scheme | None, tmp_path: Path) -> None:
    """Idle rows, tiles without tokens and draws are computed for real here."""
    model = load(make_checkpoint("qwen3", tmp_path), scheme)
    shown: list[tuple[int, int]] = []
    compile_kernels(
        model, model.attention, model.kv_spec, max_rows=3, max_tokens=70, context_len=40, page_size=4, device=DEVICE,
        progress=lambda done, total: shown.append((done, total)),
    )  # fmt: skip
    total = shown[-1][1]
    assert shown == [(done, total) for done in range(total + 1)]
    # five matrices of float32, which make no difference between 33 rows and more
    assert total == 7 + (5 * 3 if scheme is not None else 0)
    leaves_nothing_behind(model)


def test_experts_in_codes_are_multiplied_before_they_are_needed(tmp_path: Path) -> None:
    codes, _ = store_mxfp4(make_checkpoint("gpt-oss", tmp_path / "source"), tmp_path)
    attention = TritonAttention()
    model = load_as_gpu(codes, attention)
    shown: list[tuple[int, int]] = []
    compile_kernels(
        model, attention, model.kv_spec, max_rows=3, max_tokens=70, context_len=40, page_size=4, device=DEVICE,
        progress=lambda done, total: shown.append((done, total)),
    )  # fmt: skip
    # two shapes of matrices with three kernels each; nothing is shared
    assert shown[-1] == (4 + 2 * 3, 4 + 2 * 3)
    leaves_nothing_behind(model)


def leaves_nothing_behind(model: LanguageModel) -> None:
    cache = KVCache(model.kv_spec, 4, 4, DEVICE)
    fill(cache)
    before = [pages[:4].clone() for pages in cache.page_tensors]
    runner = ModelRunner(
        model, cache, max_slots=3, context_len=16, group="0", tp=TensorParallel(), device=DEVICE, draw_rows=draw_rows
    )
    runner.warm_up((1, 2))
    assert all(torch.equal(pages[:4], old) for pages, old in zip(cache.page_tensors, before, strict=True))
