"""What ranks of models that run through transformers are held to: transformers' own generate, and one rank."""

from pathlib import Path
from typing import Any

import torch

from tests.helpers_divided_rank import paged_logits
from tests.helpers_models import VOCAB_SIZE, greedy
from tests.helpers_paged import NEW_TOKENS, make_prompts
from tests.helpers_ranks import run_ranks
from tests.worker.test_hybrid_models import load
from worker_proc.attention.cpu import CpuAttention
from worker_proc.cpu.features import cpu_features
from worker_proc.cpu.library import load_library
from worker_proc.models.transformers_backend import TransformersModel

LEVEL = cpu_features().levels()[0]
PROMPTS = make_prompts(VOCAB_SIZE)

Reports = dict[str, tuple[Path, list[dict[str, Any]]]]  # a checkpoint, and what each rank reports of it, by kind


def reports_of(size: int, directory: Path, paths: dict[str, Path]) -> Reports:
    """Run `size` ranks, which take seconds to start."""
    checkpoints = map(str, paths.values())
    reports = run_ranks(
        "tests.helpers_divided_rank", size, directory, LEVEL, str(VOCAB_SIZE), *checkpoints, timeout=300
    )
    return {kind: (path, [report[str(path)] for report in reports]) for kind, path in paths.items()}


def check_tokens(path: Path, reports: list[dict[str, Any]]) -> TransformersModel:
    """In float32 every rank has transformers' tokens, and a part of the weights. Returns the model of one rank."""
    one = load(path)
    assert isinstance(one, TransformersModel)
    want, weights = greedy(path, PROMPTS, NEW_TOKENS), sum(weight.nbytes for weight in one.model.parameters())
    for report in reports:
        assert report["outputs"] == want, path.name
        assert report["weight_bytes"] < 0.6 * weights
    return one


def check_native(path: Path, reports: list[dict[str, Any]]) -> Any:
    """In bfloat16 with native kernels two ranks compute about what one computes, which is returned."""
    first, second = reports
    library = load_library(LEVEL)
    one = load(path, dtype=torch.bfloat16, attention=CpuAttention(library), native=library)
    want, got = paged_logits(one, PROMPTS[4]), torch.tensor(first["logits"])
    assert second["logits"] == []
    assert first["native_modules"] == second["native_modules"]
    assert first["plain_layers"] == 0, "weights are held twice"
    assert got.shape == want.shape
    assert ((got - want).norm(dim=-1) / want.norm(dim=-1)).median() < 0.1
    return one
