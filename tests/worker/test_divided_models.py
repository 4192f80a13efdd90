"""Hybrid models over tensor-parallel ranks, in processes, against transformers' own generate and against one rank."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers_divided_rank import native_modules, paged_logits
from tests.helpers_hybrid import HYBRIDS, make_hybrid
from tests.helpers_models import VOCAB_SIZE, greedy
from tests.helpers_multimodal import make_multimodal
from tests.helpers_paged import NEW_TOKENS, generate, make_prompts
from tests.integration.cluster import ROOT
from tests.worker.test_cpu_build import needs_compiler
from tests.worker.test_hybrid_models import load
from worker_proc.attention.cpu import CpuAttention
from worker_proc.cpu.features import cpu_features
from worker_proc.cpu.library import load_library
from worker_proc.errors import ModelError
from worker_proc.models.divided import MODEL_TYPES
from worker_proc.models.transformers_backend import TransformersModel
from worker_proc.parallel import TensorParallel

pytestmark = needs_compiler

LEVEL = cpu_features().levels()[0]
PROMPTS = make_prompts(VOCAB_SIZE)
KINDS = [kind for kind in MODEL_TYPES if kind in HYBRIDS]
MULTIMODAL = "qwen3_5_moe"
TWO_RANKS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"tie_word_embeddings": True, "attention_bias": True, "num_key_value_heads": 1},
    "lfm2": {"conv_bias": True},
    "granitemoehybrid": {"mamba_proj_bias": True},
    "nemotron_h": {"n_groups": 2, "mlp_bias": True},
}
FOUR_RANKS: dict[str, dict[str, Any]] = {  # more than KV heads and than groups
    "qwen3_next": {"linear_num_key_heads": 4, "num_key_value_heads": 1},
    "nemotron_h": {"n_groups": 2, "moe_intermediate_size": 64},
}


def run_ranks(size: int, directory: Path, paths: list[Path]) -> list[dict[str, Any]]:
    """Run `size` ranks to their end; returns their reports."""
    outs = [directory / f"rank{rank}.json" for rank in range(size)]
    module = [sys.executable, "-m", "tests.helpers_divided_rank"]
    ranks = [
        subprocess.Popen(
            [*module, str(rank), str(size), str(directory / "store"), str(out), LEVEL, str(VOCAB_SIZE),
             *map(str, paths)],
            cwd=ROOT,
        )
        for rank, out in enumerate(outs)
    ]  # fmt: skip
    try:
        assert [rank.wait(timeout=300) for rank in ranks] == [0] * size
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [json.loads(out.read_text()) for out in outs]


Reports = dict[str, tuple[Path, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """A checkpoint of each kind, and what two processes report of it, which take seconds to start."""
    directory = tmp_path_factory.mktemp("ranks")
    paths = {kind: make_hybrid(kind, directory / kind, **TWO_RANKS.get(kind, {})) for kind in KINDS}
    paths[MULTIMODAL] = make_multimodal(MULTIMODAL, directory / MULTIMODAL)
    reports = run_ranks(2, directory, list(paths.values()))
    return {kind: (path, [report[str(path)] for report in reports]) for kind, path in paths.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_compute_what_one_computes(kind: str, two_ranks: Reports) -> None:
    path, reports = two_ranks[kind]
    one = load(path)
    assert isinstance(one, TransformersModel)
    want, weights = greedy(path, PROMPTS, NEW_TOKENS), sum(weight.nbytes for weight in one.model.parameters())
    for report in reports:
        assert report["outputs"] == want
        assert report["kv_heads"] == 1
        assert report["weight_bytes"] < 0.6 * weights
        assert report["state_bytes"] <= 0.6 * one.kv_spec.bytes_per_state  # B and C of Mamba-2 are on both


@pytest.mark.parametrize("kind", KINDS)
def test_native_layers_compute_what_one_rank_computes(kind: str, two_ranks: Reports) -> None:
    path, (first, second) = two_ranks[kind]
    library = load_library(LEVEL)
    one = load(path, dtype=torch.bfloat16, attention=CpuAttention(library), native=library)
    want, got = paged_logits(one, PROMPTS[4]), torch.tensor(first["logits"])
    assert second["logits"] == []
    assert first["native_modules"] == second["native_modules"] == native_modules(one)
    assert first["plain_layers"] == 0, "weights are held twice"
    assert got.shape == want.shape
    assert ((got - want).norm(dim=-1) / want.norm(dim=-1)).median() < 0.1


def test_the_language_model_of_a_multimodal_one_is_divided(two_ranks: Reports) -> None:
    path, reports = two_ranks[MULTIMODAL]
    want = generate(load(path), PROMPTS, NEW_TOKENS)
    assert [report["outputs"] for report in reports] == [want] * 2


def test_more_ranks_than_kv_heads_and_groups(tmp_path: Path) -> None:
    paths = [make_hybrid(kind, tmp_path / kind, **fields) for kind, fields in FOUR_RANKS.items()]
    reports = run_ranks(4, tmp_path, paths)
    for path in paths:
        want = greedy(path, PROMPTS, NEW_TOKENS)
        for report in reports:
            assert report[str(path)]["outputs"] == want and report[str(path)]["kv_heads"] == 1, path.name


@pytest.mark.parametrize("kind", sorted(set(HYBRIDS) - set(MODEL_TYPES)))
def test_others_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"{kind} runs through transformers.*use tp = 1"):
        load(make_hybrid(kind, tmp_path), tp=TensorParallel(0, 2, group=object()))


@pytest.mark.parametrize(
    ("kind", "field", "fields"),
    [
        ("qwen3_5_text", "linear_num_key_heads", {"linear_num_key_heads": 1}),
        ("qwen3_5_text", "num_attention_heads", {"num_attention_heads": 3, "num_key_value_heads": 1}),
        ("qwen3_5_moe_text", "moe_intermediate_size", {"moe_intermediate_size": 49}),
        ("bamba", "mamba_n_groups", {"mamba_n_heads": 12, "mamba_n_groups": 3, "mamba_expand": 3}),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(
    kind: str, field: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="cannot be split over tp = 2 ranks") as caught:
        load(make_hybrid(kind, tmp_path, **fields), tp=TensorParallel(0, 2, group=object()))
    assert caught.value.field == field
