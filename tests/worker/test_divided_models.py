"""Hybrid models over tensor-parallel ranks, in processes, against transformers' own generate and against one rank."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers_divided import LEVEL, PROMPTS, Reports, check_native, check_tokens, reports_of
from tests.helpers_divided_rank import native_modules
from tests.helpers_hybrid import HYBRIDS, WITHOUT_ATTENTION, make_hybrid
from tests.helpers_multimodal import make_multimodal
from tests.helpers_paged import NEW_TOKENS, generate
from tests.worker.test_cpu_build import needs_compiler
from tests.worker.test_hybrid_models import load
from worker_proc.attention.cpu import CpuAttention
from worker_proc.cpu.library import load_library
from worker_proc.errors import ModelError
from worker_proc.models.describe import read_config
from worker_proc.models.divided import MODEL_TYPES
from worker_proc.models.transformers_backend import load_transformers_model
from worker_proc.parallel import TensorParallel

pytestmark = needs_compiler

KINDS = [kind for kind in MODEL_TYPES if kind in HYBRIDS]
MULTIMODAL = "qwen3_5_moe"
TWO_RANKS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"tie_word_embeddings": True, "attention_bias": True, "num_key_value_heads": 1},
    "lfm2": {"conv_bias": True},
    "granitemoehybrid": {"mamba_proj_bias": True},
    "nemotron_h": {"n_groups": 2, "mlp_bias": True},
    "mamba2": {"use_bias": True},
}
FOUR_RANKS: dict[str, dict[str, Any]] = {  # more than KV heads and than groups
    "qwen3_next": {"linear_num_key_heads": 4, "num_key_value_heads": 1},
    "nemotron_h": {"n_groups": 2, "moe_intermediate_size": 64},
}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """A checkpoint of each kind, and what two processes report of it, which take seconds to start."""
    directory = tmp_path_factory.mktemp("ranks")
    paths = {kind: make_hybrid(kind, directory / kind, **TWO_RANKS.get(kind, {})) for kind in KINDS}
    paths[MULTIMODAL] = make_multimodal(MULTIMODAL, directory / MULTIMODAL)
    return reports_of(2, directory, paths)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_compute_what_one_computes(kind: str, two_ranks: Reports) -> None:
    one = check_tokens(*two_ranks[kind])
    for report in two_ranks[kind][1]:
        assert report["kv_heads"] == (0 if kind in WITHOUT_ATTENTION else 1)
        assert report["state_bytes"] <= 0.6 * one.kv_spec.bytes_per_state  # B and C of Mamba-2 are on both


@pytest.mark.parametrize("kind", KINDS)
def test_native_layers_compute_what_one_rank_computes(kind: str, two_ranks: Reports) -> None:
    path, reports = two_ranks[kind]
    one = check_native(path, reports)
    if kind == "granitemoehybrid":  # which one rank computes in the native decoder
        library = load_library(LEVEL)
        one = load_transformers_model(
            path, read_config(path), dtype=torch.bfloat16, device=torch.device("cpu"), tp=TensorParallel(),
            attention=CpuAttention(library), native=library,
        )  # fmt: skip
    assert reports[0]["native_modules"] == native_modules(one)


def test_the_language_model_of_a_multimodal_one_is_divided(two_ranks: Reports) -> None:
    path, reports = two_ranks[MULTIMODAL]
    assert [report["outputs"] for report in reports] == [generate(load(path), PROMPTS, NEW_TOKENS)] * 2


def test_more_ranks_than_kv_heads_and_groups(tmp_path: Path) -> None:
    paths = {kind: make_hybrid(kind, tmp_path / kind, **fields) for kind, fields in FOUR_RANKS.items()}
    for kind, (path, reports) in reports_of(4, tmp_path, paths).items():
        check_tokens(path, reports)
        assert [report["kv_heads"] for report in reports] == [1] * 4, kind


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
