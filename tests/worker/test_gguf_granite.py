"""Granite 4's hybrids in GGUF files, against the checkpoints that they were made of."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers_gguf import directory_of
from tests.helpers_gguf_granite import write_granite_gguf
from tests.helpers_hybrid import make_hybrid
from tests.helpers_models import VOCAB_SIZE
from tests.helpers_paged import make_prompts
from tests.worker.test_cpu_build import needs_compiler
from tests.worker.test_gguf_hybrids import mostly_k
from tests.worker.test_hybrid_decoder import CALM, LEVELS, all_logits, error, load, load_native
from worker_proc.cpu.features import Level
from worker_proc.errors import ModelError
from worker_proc.gguf.directory import GgufError, directory_for
from worker_proc.models.describe import describe, read_config
from worker_proc.models.hybrid_families import hybrid_spec
from worker_proc.models.registry import has_recurrent_layers
from worker_proc.parallel import TensorParallel

pytestmark = needs_compiler
PROMPTS = make_prompts(VOCAB_SIZE)
KIND = "granitemoehybrid"
ENDS = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
DENSE: dict[str, Any] = {"num_local_experts": 0, "shared_intermediate_size": 96, "intermediate_size": 96}
CASES: dict[str, dict[str, Any]] = {
    "mixture": {"num_experts_per_tok": 4, "embedding_multiplier": 3.0, "residual_multiplier": 0.6},
    "dense": DENSE | {"tie_word_embeddings": True, "logits_scaling": 2.0, "attention_multiplier": 0.3},
    "groups": DENSE | {"mamba_n_groups": 2, "position_embedding_type": "rope", "layer_types": ENDS},
    "biases": DENSE | {"attention_bias": True},
    "no bias": DENSE | {"mamba_conv_bias": False},
}
K = {"hidden_size": 256, "intermediate_size": 256, "shared_intermediate_size": 256, "mamba_n_heads": 8}
K |= {"mamba_d_head": 64, "head_dim": 64}


@pytest.mark.parametrize("case", CASES)
def test_a_plain_file_is_the_model_that_it_was_made_of(case: str, tmp_path: Path) -> None:
    source = make_hybrid(KIND, tmp_path / "source", **CALM | CASES[case])
    directory = directory_of(write_granite_gguf(source, tmp_path / "m.gguf", lambda name: "F32"))
    of_file, of_source = (hybrid_spec(read_config(path)) for path in (directory, source))
    assert of_file is not None and of_source is not None and of_file.space == of_source.space
    assert [rope is None for rope in of_file.ropes] == [rope is None for rope in of_source.ropes]
    assert has_recurrent_layers(directory)
    got, want = (all_logits(load_native(path), PROMPTS[4]) for path in (directory, source))
    assert error(got, want) < 1e-3, "rates went through an exponential"


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["BF16", "Q8_0", "K"])
@pytest.mark.parametrize("case", ["mixture", "dense"])
def test_codes_are_what_they_stand_for(case: str, kind: str, level: Level, tmp_path: Path) -> None:
    source = make_hybrid(KIND, tmp_path / "source", **{"initializer_range": 0.05} | CASES[case] | K)
    kind_of = mostly_k if kind == "K" else lambda name: kind
    plain = tmp_path / "plain.gguf"
    directory = directory_of(write_granite_gguf(source, tmp_path / "m.gguf", kind_of, plain=plain))
    assert describe(directory).quantization == (None if kind == "BF16" else "gguf")
    of_codes, of_plain = (load_native(path, level) for path in (directory, directory_of(plain)))
    off = error(*(all_logits(model, PROMPTS[4]) for model in (of_codes, of_plain)))
    assert off == 0 if kind == "BF16" else off < 0.1


@pytest.mark.parametrize(
    "settings",
    [{"dtype": torch.float32}, {"level": None}, {"tp": TensorParallel(0, 2, group=object())}],
    ids=["float32", "torch alone", "two ranks"],
)
def test_elsewhere_a_file_is_refused_by_name(settings: dict[str, Any], tmp_path: Path) -> None:
    source = make_hybrid(KIND, tmp_path / "source", **DENSE)
    directory = directory_of(write_granite_gguf(source, tmp_path / "m.gguf", lambda name: "F32"))
    with pytest.raises(
        ModelError, match=r"GGUF files of granitemoehybrid are read for the native .* only, on one rank"
    ):
        load(directory, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention.head_count_kv": 2}, "attention.head_count_kv = 2: must say so for each layer"),
        ({"attention.head_count_kv": [0, 2, 0, 1]}, "must be a whole number, the same in all layers"),
        ({"ssm.inner_size": 96}, "granitehybrid.ssm.inner_size = 96: must be a multiple of the hidden size (64)"),
        ({"ssm.time_step_rank": 7}, "granitehybrid.ssm.inner_size = 128: must be a multiple of"),
        ({"ssm.state_size": None}, "granitehybrid.ssm.state_size = None: must be a whole number"),
        ({"expert_shared_feed_forward_length": 48}, "expert_shared_feed_forward_length = 48: not supported"),
        ({"expert_used_count": 2}, "granitehybrid.expert_used_count = 2: not supported"),
        ({"expert_count": 4}, "granitehybrid.expert_used_count = None: must be a whole number"),
        ({"expert_gating_func": 2}, "granitehybrid.expert_gating_func = 2: not supported"),
        ({"logit_scale": None}, "granitehybrid.logit_scale = None: must be a positive number"),
        ({"ssm.dt_b_c_rms": True}, "granitehybrid.ssm.dt_b_c_rms = True: an unknown setting"),
    ],
)  # fmt: skip
def test_a_setting_that_would_change_the_numbers_is_named(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    source = make_hybrid(KIND, tmp_path / "source", **DENSE)
    file = write_granite_gguf(source, tmp_path / "m.gguf", lambda name: "F32", **settings)
    with pytest.raises(GgufError, match=re.escape(message)):
        directory_for(file, tmp_path / "cache")
