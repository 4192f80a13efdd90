"""Models computed by transformers through our paged attention, against transformers' own generate."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers_models import VOCAB_SIZE, greedy, make_checkpoint
from tests.helpers_paged import NEW_TOKENS, generate, make_prompts
from worker_proc.attention.interface import ForwardBatch
from worker_proc.attention.reference import ReferenceAttention
from worker_proc.errors import ModelError
from worker_proc.kv_cache import KVCache
from worker_proc.models.describe import context_limit, describe, read_config
from worker_proc.models.interface import LanguageModel
from worker_proc.models.paged_call import PagedStep, paged_attention
from worker_proc.models.registry import load_model
from worker_proc.models.transformers_backend import TransformersModel, load_transformers_model
from worker_proc.parallel import TensorParallel

PROMPTS = make_prompts(VOCAB_SIZE)


def load(
    path: Path, attention: Any = None, tp: TensorParallel | None = None, dtype: torch.dtype = torch.float32
) -> LanguageModel:
    return load_model(
        path,
        dtype=dtype,
        device="cpu",
        tp=tp or TensorParallel(),
        attention=attention or ReferenceAttention(),
    )


# soft caps and alternating windows; window in all layers; partial rotary; clipped q, k, v; norms of whole queries and
# of outputs alone; rotations of neighbours; experts; some layers without
@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("vaultgemma", {}),
        ("starcoder2", {}),
        ("gptneox", {}),
        ("olmo", {}),
        ("olmo3", {}),
        ("glm4", {}),
        ("olmoe", {}),
        ("qwen3-moe", {"mlp_only_layers": [1]}),
        ("qwen3-moe", {"decoder_sparse_step": 2}),
    ],
)
def test_greedy_tokens_equal_transformers(kind: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    path = make_checkpoint(kind, tmp_path, **overrides)
    assert describe(path).backend == "transformers"
    model, want = load(path), greedy(path, PROMPTS, NEW_TOKENS)
    assert len({token for output in want for token in output}) > 20, "a degenerate model proves nothing"
    assert generate(model, PROMPTS, NEW_TOKENS, page_size=16) == want
    assert generate(model, PROMPTS, NEW_TOKENS, page_size=1, chunk=9) == want


def test_models_that_cannot_be_right_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        load(make_checkpoint("xmod", tmp_path))
    assert caught.value.field == "model_type"


def test_sinks_of_attention_are_passed_on(tmp_path: Path) -> None:
    """gpt-oss is native, but others ask for the same."""
    path = make_checkpoint("gpt-oss", tmp_path)
    model = load_transformers_model(
        path, read_config(path), dtype=torch.float32, device=torch.device("cpu"), tp=TensorParallel(),
        attention=ReferenceAttention(),
    )  # fmt: skip
    assert generate(model, PROMPTS, NEW_TOKENS, page_size=16, chunk=9) == greedy(path, PROMPTS, NEW_TOKENS)


def test_tensor_parallelism_of_other_kinds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="tp = 1") as caught:
        load(make_checkpoint("gptneox", tmp_path), tp=TensorParallel(0, 2, group=object()))
    assert caught.value.field == "tp"


def test_the_context_of_other_models_ends_where_longrope_changes() -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [4.0]}
    config = {"max_position_embeddings": 256, "original_max_position_embeddings": 64, "rope_scaling": rope}
    assert context_limit(config) == 64
    assert context_limit(config | {"rope_scaling": rope | {"rope_type": "default"}}) == 256


def test_longrope_is_limited_to_the_length_at_which_it_is_exact(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    fields = {"rope_scaling": rope, "original_max_position_embeddings": 64, "max_position_embeddings": 256}
    path = make_checkpoint("phi3", tmp_path, **fields)
    assert describe(path).context_length == 64


def test_code_of_which_transformers_has_its_own_is_not_run(tmp_path: Path) -> None:
    path, ran = make_checkpoint("olmoe", tmp_path), tmp_path / "ran"
    names = {"AutoConfig": "own.OlmoeConfig", "AutoModelForCausalLM": "own.OlmoeForCausalLM"}
    (path / "own.py").write_text(f"open({str(ran)!r}, 'w')\n")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"auto_map": names}))
    assert describe(path).backend == "transformers"
    assert generate(load(path), PROMPTS, NEW_TOKENS, page_size=16) == greedy(path, PROMPTS, NEW_TOKENS)
    for kind in ("strange", "llama"):  # one that nobody knows, and one that is likely changed
        (path / "config.json").write_text(json.dumps(config | {"auto_map": names, "model_type": kind}))
        with pytest.raises(ModelError, match="never run") as caught:
            describe(path)
        assert caught.value.field == "auto_map"
    assert not ran.exists()


def test_a_window_as_long_as_the_context_asks_for_nothing(tmp_path: Path) -> None:
    """Phi-3.5-MoE has one in its config, and hides the tokens before it by a mask."""
    path = make_checkpoint("phimoe", tmp_path, sliding_window=256)
    assert generate(load(path), PROMPTS, NEW_TOKENS, page_size=16, chunk=9) == greedy(path, PROMPTS, NEW_TOKENS)
    with pytest.raises(ModelError, match="layer 0 asks attention for None") as caught:
        load(make_checkpoint("phimoe", tmp_path / "short", sliding_window=255))
    assert caught.value.field == "sliding_window"


class NoWindow(ReferenceAttention):
    """Forgets the window, as a model that expresses it in a mask would."""

    def forward(self, *args: Any, window: int | None = None, **settings: Any) -> torch.Tensor:
        return super().forward(*args, **settings)


class OtherScale(ReferenceAttention):
    def forward(self, *args: Any, scale: float, **settings: Any) -> torch.Tensor:
        return super().forward(*args, scale=1.3 * scale, **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "attention"), [("starcoder2", NoWindow), ("starcoder2", OtherScale), ("olmoe", OtherScale)]
)
def test_the_trial_run_at_load_catches_a_wrong_result(
    kind: str, attention: type[ReferenceAttention], dtype: torch.dtype, tmp_path: Path
) -> None:
    path = make_checkpoint(kind, tmp_path)
    with pytest.raises(ModelError, match="differ from the model's own"):
        load(path, attention(), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["starcoder2", "olmoe"])
def test_the_trial_run_at_load_catches_wrong_positions(
    kind: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted from the start of the batch, as a model does that leaves them to itself."""
    right = TransformersModel.forward

    def forward(self: TransformersModel, batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
        return right(self, replace(batch, positions=torch.arange(len(batch.positions))), cache)

    monkeypatch.setattr(TransformersModel, "forward", forward)
    with pytest.raises(ModelError, match="differ from the model's own"):
        load(make_checkpoint(kind, tmp_path), dtype=dtype)


@pytest.mark.parametrize("seed", [1, 6])
def test_the_trial_run_at_load_forgives_a_token_that_rounding_sends_to_another_expert(
    seed: int, tmp_path: Path
) -> None:
    """With these seeds, logits of single rows differ by a sixth and by a half."""
    load(make_checkpoint("olmoe", tmp_path, seed=seed, num_experts=16, num_hidden_layers=6), dtype=torch.bfloat16)


def test_the_trial_run_at_load_refuses_what_is_no_number(tmp_path: Path) -> None:
    class OneRow(ReferenceAttention):
        def forward(self, *args: Any, **settings: Any) -> torch.Tensor:
            out = super().forward(*args, **settings)
            out[0] = torch.nan
            return out

    with pytest.raises(ModelError, match="by nan%"):
        load(make_checkpoint("olmoe", tmp_path), OneRow(), dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attention_mask", torch.zeros(1, 1, 2, 2)),
        ("head_mask", torch.ones(4)),
        ("position_bias", torch.ones(1, 4, 2, 2)),
        ("is_causal", False),
        ("dropout", 0.1),
        ("a_new_argument", 3),
    ],
)
def test_arguments_that_cannot_be_honoured_are_refused_by_name(name: str, value: object) -> None:
    module = nn.Module()
    module.layer_idx = 0
    x = torch.zeros(1, 4, 2, 8)
    arguments: dict[str, Any] = {"attention_mask": None, "position_ids": torch.arange(2), "head_mask": None}
    step = PagedStep(None, None, ReferenceAttention())
    paged_attention(module, x, x, x, **arguments, rhizome_step=step)
    assert len(step.calls) == 1
    with pytest.raises(ModelError) as caught:
        paged_attention(module, x, x, x, **(arguments | {name: value}), rhizome_step=step)
    assert caught.value.field == name
