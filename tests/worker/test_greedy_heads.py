"""Greedy tokens of models that run through transformers, whose head finds them without logits."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.helpers_hybrid import HYBRIDS, make_hybrid
from tests.helpers_models import VOCAB_SIZE, make_checkpoint, make_config_of, make_model
from tests.helpers_native import SCREENING
from tests.helpers_paged import Row, make_batch, make_prompts
from tests.worker.test_cpu_build import needs_compiler
from tests.worker.test_cpu_modules import load, modules
from worker_proc.cpu.features import Level, cpu_features
from worker_proc.cpu.modules import NativeHead
from worker_proc.cpu.screen import screen_scheme
from worker_proc.kv_cache import KVCache
from worker_proc.models.transformers_backend import GreedyTransformersModel
from worker_proc.quantization.scheme import Scheme
from worker_proc.recurrent import StateRows

pytestmark = needs_compiler
LEVELS = cpu_features().levels()
PROMPTS = make_prompts(VOCAB_SIZE)


KINDS = {"gptneox": True, "olmoe": True, "vaultgemma": False, "olmo_hybrid": True, "granitemoe": False}


def make(kind: str, path: Path) -> Path:
    """A checkpoint of a kind in `KINDS`, which says whether a model gives logits as its head does."""
    if kind == "granitemoe":
        config = make_config_of(kind, num_local_experts=4, num_experts_per_tok=2, logits_scaling=3.0)
        make_model(config).save_pretrained(path)  # type: ignore[operator]
        return path
    return make_hybrid(kind, path) if kind in HYBRIDS else make_checkpoint(kind, path)


def check_greedy(path: Path, kind: str, level: Level, *, screened: bool, quantization: Scheme | None = None) -> None:
    model = load(path, level, quantization=quantization)
    (head,) = modules(model, NativeHead)
    assert isinstance(model, GreedyTransformersModel)
    assert model.gives_logits_of_head == KINDS[kind] and (head.screen is not None) == (screened and KINDS[kind])
    tokens, pages = PROMPTS[0], list(range(-(-len(PROMPTS[0]) // 8)))
    batch = replace(
        make_batch([Row(tokens, pages)], [len(tokens)], 8),
        logit_rows=torch.arange(len(tokens)),
        states=StateRows([0]) if model.kv_spec.states else None,
    )
    caches = (KVCache(model.kv_spec, len(pages), 8, slots=1) for _ in range(3))
    want = model.forward(batch, next(caches))
    assert want.dtype == torch.float32 and want.shape == (len(tokens), VOCAB_SIZE)
    assert torch.equal(model.greedy(batch, next(caches)), want.argmax(dim=1))
    assert torch.equal(model.forward(batch, next(caches)), want), "logits are to be had again"


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_the_largest_logits(kind: str, level: Level, tmp_path: Path) -> None:
    check_greedy(make(kind, tmp_path), kind, level, screened=False)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_so_they_are_by_a_look_in_int8(
    kind: str, level: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker_proc.cpu.modules.screen_scheme", partial(screen_scheme, least=0))
    check_greedy(make(kind, tmp_path), kind, level, screened=level in SCREENING)


@pytest.mark.parametrize("level", LEVELS)
def test_heads_in_codes_find_them_too(level: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker_proc.cpu.modules.screen_scheme", partial(screen_scheme, least=0))
    check_greedy(make("gptneox", tmp_path), "gptneox", level, screened=False, quantization=Scheme(8))


def test_a_step_may_ask_for_no_logits(tmp_path: Path) -> None:
    model = load(make("gptneox", tmp_path), LEVELS[0])
    batch = make_batch([Row(PROMPTS[0], list(range(99)))], [len(PROMPTS[0])], 8)
    nothing = replace(batch, logit_rows=batch.logit_rows[:0])
    assert model.greedy(nothing, KVCache(model.kv_spec, 99, 8)).shape == (0,)
