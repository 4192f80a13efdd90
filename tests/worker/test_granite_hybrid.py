"""Granite 4 in the native decoder: what configurations say; what is computed is seen in test_hybrid_decoder.py."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers_divided import check_native, reports_of
from tests.helpers_hybrid import hybrid_config, make_hybrid
from tests.helpers_models import VOCAB_SIZE
from tests.helpers_paged import NEW_TOKENS, generate, make_prompts
from tests.helpers_quantized import quantize_checkpoint
from tests.worker.test_cpu_build import needs_compiler
from tests.worker.test_hybrid_decoder import CALM, all_logits, error, load, load_native, round_weights
from worker_proc.errors import ModelError
from worker_proc.models.hybrid_families import hybrid_spec
from worker_proc.models.registry import has_recurrent_layers
from worker_proc.models.spec import SpaceSpec
from worker_proc.models.transformers_backend import TransformersModel
from worker_proc.parallel import TensorParallel
from worker_proc.quantization.scheme import Scheme

pytestmark = needs_compiler
KIND = "granitemoehybrid"
PROMPTS = make_prompts(VOCAB_SIZE)
FULL = ["full_attention"] * 4
DENSE: dict[str, Any] = {"num_local_experts": 0, "shared_intermediate_size": 96}


def config_of(**changes: Any) -> dict[str, Any]:
    """As transformers writes it."""
    return hybrid_config(KIND).to_dict() | {"model_type": KIND} | changes


def test_a_config_says_which_layers_are_state_spaces() -> None:
    spec = hybrid_spec(config_of())
    assert spec is not None
    assert spec.space == SpaceSpec((True, False, True, True), 8, 16, 1, 16, 4, True, False, 0.0, math.inf)
    kinds = ["mamba", "attention", "mamba", "mamba"]  # as published
    assert spec == hybrid_spec(config_of(layer_types=kinds, mamba_d_head="auto", time_step_limit=None))
    written = config_of(time_step_limit=[0.0, {"__float__": "Infinity"}])
    assert spec == hybrid_spec(written)


def test_rotations_are_there_where_a_config_names_them() -> None:
    for said, rotates in (("rope", True), ("nope", False), (None, False)):
        spec = hybrid_spec(config_of(position_embedding_type=said))
        assert spec is not None and all((rope is not None) == rotates for rope in spec.ropes)


@pytest.mark.parametrize(
    "change",
    [
        {"layer_types": None},
        {"layer_types": ["mamba"] * 4},
        {"layer_types": ["conv", "mamba", "attention", "attention"]},
        {"mamba_n_heads": 7},
        {"mamba_n_groups": 3},
        {"mamba_d_head": 24},
        {"position_embedding_type": "alibi"},
        {"time_step_limit": [1.0, 0.5]},
        {"time_step_limit": ["a", 0.5]},
        {"num_experts_per_tok": 5},
        {"shared_intermediate_size": 0},
        {"hidden_act": "unheard of"},
        {"architectures": ["GraniteChanged"]},
    ],
    ids=str,
)
def test_others_are_left_to_transformers(change: dict[str, Any]) -> None:
    assert hybrid_spec(config_of()) is not None
    assert hybrid_spec(config_of(**change)) is None


@pytest.mark.parametrize("position", ["rope", None])
@pytest.mark.parametrize("experts", [DENSE, {"num_experts_per_tok": 4}], ids=["dense", "mixture"])
def test_all_layers_may_attend(experts: dict[str, Any], position: str | None, tmp_path: Path) -> None:
    """As in Granite 4's small models. They keep no states, and are divided natively."""
    changes = CALM | experts | {"layer_types": FULL, "position_embedding_type": position}
    path = round_weights(make_hybrid(KIND, tmp_path / "model", **changes))
    assert not has_recurrent_layers(path)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = load_native(path)
    for prompt in PROMPTS:
        with torch.inference_mode():
            want = reference(torch.tensor([prompt])).logits[0]
        assert error(all_logits(model, prompt), want) < 0.03
    want_tokens = generate(model, PROMPTS, NEW_TOKENS, page_size=16)
    for page_size, chunk in ((1, 9), (16, 1)):
        assert generate(model, PROMPTS, NEW_TOKENS, page_size=page_size, chunk=chunk) == want_tokens


def test_ranks_compute_what_one_computes(tmp_path: Path) -> None:
    """Where all layers attend. Others are divided through transformers, see test_divided_models.py."""
    paths = {
        "attending": make_hybrid(KIND, tmp_path / "attending", **CALM, layer_types=FULL),
        "dense": make_hybrid(KIND, tmp_path / "dense", **CALM | DENSE, layer_types=FULL),
    }
    for path, reports in reports_of(2, tmp_path, paths).values():
        check_native(path, reports)


def test_codes_of_state_spaces_are_refused_on_several_ranks(tmp_path: Path) -> None:
    source = make_hybrid(KIND, tmp_path / "source", **CALM | DENSE)
    codes, _ = quantize_checkpoint(source, tmp_path, "gptq", Scheme(4, 32))
    load_native(codes)
    with pytest.raises(ModelError, match=r"codes of granitemoehybrid are read for .* in bfloat16 only, on one rank"):
        load(codes, tp=TensorParallel(0, 2, group=object()))


def test_heads_that_the_kernels_do_not_know_are_left_to_transformers(tmp_path: Path) -> None:
    assert isinstance(load(make_hybrid(KIND, tmp_path, mamba_d_state=24)), TransformersModel)
