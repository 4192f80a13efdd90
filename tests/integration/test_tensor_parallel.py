"""Tensor parallelism between real processes on the CPU."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import helpers_ranks
from tests.helpers_models import VOCAB_SIZE, greedy, make_checkpoint
from tests.helpers_multimodal import greedy_of_whole, make_multimodal
from tests.helpers_paged import NEW_TOKENS, make_prompts
from worker_proc import shared_memory
from worker_proc.errors import ModelError
from worker_proc.parallel import TensorParallel

# multi-head and tied; grouped-query, biased; fused c_attn; q/k norms, untied; output norms; scales; stacked
# projections; experts; sinks and stacked experts
KINDS = [
    "llama",
    "qwen2",
    "gpt2",
    "qwen3",
    "mistral-sliding",
    "llama-bias",
    "gemma2",
    "gemma3",
    "granite",
    "phi3",
    "qwen3-moe",
    "gpt-oss",
]


def run_ranks(size: int, directory: Path, paths: list[Path]) -> list[dict[str, Any]]:
    """The reports of `size` ranks."""
    checkpoints = map(str, paths)
    return helpers_ranks.run_ranks("tests.helpers_tp_rank", size, directory, str(VOCAB_SIZE), *checkpoints, timeout=120)


def test_two_ranks_equal_transformers(tmp_path: Path) -> None:
    paths = [make_checkpoint(kind, tmp_path / kind) for kind in KINDS]
    reports = run_ranks(2, tmp_path, paths)
    for path in paths:
        want = greedy(path, make_prompts(VOCAB_SIZE), NEW_TOKENS)
        for report in reports:
            assert report["outputs"][str(path)] == want, path.name
    for rank, report in enumerate(reports):
        assert report["addresses"] == ["127.0.0.1"], "no socket may be reachable from outside"
        assert not report["transformers"], "the native decoder must not import transformers"
        collectives = report["collectives"]
        assert collectives["sum"] == [2.0] * 3 and collectives["broadcast"] == [7, 7] and collectives["min"] == 9
        assert collectives["gathered_shape"] == ([2, 4] if rank == 0 else [0, 2])
    assert reports[0]["collectives"]["gathered"] == [[0, 0, 1, 1]] * 2


def test_two_ranks_share_stacked_experts(tmp_path: Path) -> None:
    path = make_multimodal("qwen3_vl_moe", tmp_path / "model")
    prompts = [prompt for prompt in make_prompts(VOCAB_SIZE) if 3 not in prompt]  # 3 stands for an image
    reports = run_ranks(2, tmp_path, [path])
    want = greedy_of_whole(path, prompts, NEW_TOKENS)
    for report in reports:
        answers = report["outputs"][str(path)]
        assert [
            answer for answer, prompt in zip(answers, make_prompts(VOCAB_SIZE), strict=True) if 3 not in prompt
        ] == want


@pytest.mark.parametrize("size", [2, 4])
def test_more_ranks_than_kv_heads(size: int, tmp_path: Path) -> None:
    paths = [make_checkpoint("llama-mqa", tmp_path / "mqa")]
    if size == 4:
        paths.append(make_checkpoint("llama-gqa-untied", tmp_path / "gqa"))
    reports = run_ranks(size, tmp_path, paths)
    for path in paths:
        want = greedy(path, make_prompts(VOCAB_SIZE), NEW_TOKENS)
        assert [report["outputs"][str(path)] for report in reports] == [want] * size
        assert [report["kv_heads"][str(path)] for report in reports] == [1] * size


def test_a_rank_that_is_alone_gives_up(tmp_path: Path) -> None:
    with pytest.raises((RuntimeError, torch.distributed.DistError)):
        TensorParallel.connect(0, 2, tmp_path / "store", timeout=0.5)


def test_ranks_outside_the_group_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="rank"):
        TensorParallel.connect(2, 2, tmp_path / "store")


def test_a_dead_peer_is_an_error_and_not_a_hang(tmp_path: Path) -> None:
    code = (
        "import os, sys; from worker_proc.parallel import TensorParallel;"
        "TensorParallel.connect(1, 2, sys.argv[1]); os._exit(0)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "store")]) as peer:
        tp = TensorParallel.connect(0, 2, tmp_path / "store", timeout=30)
        assert peer.wait(timeout=30) == 0
        with pytest.raises(RuntimeError):
            tp.all_reduce(torch.zeros(4))
        tp.close()
        tp.close()


@pytest.mark.parametrize("way", ["memory", "gloo"])
def test_collectives_of_any_size_round_after_round(way: str, tmp_path: Path) -> None:
    if way == "memory" and not shared_memory.supported():
        pytest.skip("ranks share memory on x86 only")
    ranks = [
        subprocess.Popen([sys.executable, "-m", "tests.helpers_tp_rounds", str(rank), str(tmp_path / "store"), way])
        for rank in range(2)
    ]
    try:
        assert [rank.wait(120) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
