"""Models all of whose layers attend, that run through transformers, over tensor-parallel ranks: in processes, against
transformers' own generate and against one rank. Hybrid ones are in test_divided_models.py."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers_divided import PROMPTS, Reports, check_native, check_tokens, reports_of
from tests.helpers_divided_rank import native_modules
from tests.helpers_hybrid import HYBRIDS
from tests.helpers_models import VOCAB_SIZE, make_config_of, make_model
from tests.helpers_multimodal import make_multimodal
from tests.helpers_paged import NEW_TOKENS, generate
from tests.worker.test_cpu_build import needs_compiler
from tests.worker.test_hybrid_models import load
from worker_proc.errors import ModelError
from worker_proc.models.divided import MODEL_TYPES
from worker_proc.parallel import TensorParallel

pytestmark = needs_compiler

_EXPERTS = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4), "num_experts_per_tok": 2,
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
    "moe_intermediate_size": 48, "tie_word_embeddings": False,
}  # fmt: skip
_LATENT = {
    **_EXPERTS, "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 24, "head_dim": 8,
}  # fmt: skip
_BIASED = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}
# fields of a type beside those that all models of the tests have
FIELDS: dict[str, dict[str, Any]] = {
    "apertus": {"tie_word_embeddings": False},
    "arcee": _BIASED,
    "cohere": {"use_qk_norm": True},
    "cohere2": {"sliding_window": 12, "head_dim": 16},
    "cwm": {"sliding_window": 12, "head_dim": 16},
    "deepseek_v2": {**_LATENT, "q_lora_rank": None},
    "deepseek_v3": {**_LATENT, "q_lora_rank": 24},
    "dots1": _EXPERTS,
    "ernie4_5": {"head_dim": 16, "use_bias": True},
    "ernie4_5_moe": {**_EXPERTS, "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1},
    "exaone4": {"sliding_window": 12},
    "gemma4_text": {"head_dim": 16, "global_head_dim": 32, "sliding_window": 12, "hidden_size_per_layer_input": 8,
                    "vocab_size_per_layer_input": VOCAB_SIZE, "num_kv_shared_layers": 0},
    "gemma4_unified_text": {"head_dim": 16, "global_head_dim": 32, "sliding_window": 12, "num_kv_shared_layers": 0,
                            "use_bidirectional_attention": None},
    "glm": {"head_dim": 16, "attention_bias": True},
    "glm4": {"head_dim": 16, "attention_bias": True},
    "glm4_moe": {**_EXPERTS, "head_dim": 16, "use_qk_norm": True},
    "granitemoe": {**_EXPERTS, "residual_multiplier": 0.4, "attention_multiplier": 0.3},
    "helium": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {**_EXPERTS, "head_dim": 16, "moe_topk": 2},
    "minimax_m2": {**_EXPERTS, "head_dim": 16},
    "nemotron": {"head_dim": 16, "attention_bias": True, "mlp_bias": True},
    "olmo": {"clip_qkv": 2.0},
    "olmo2": {"tie_word_embeddings": False},
    "olmo3": {"num_hidden_layers": 4, "sliding_window": 12},
    "olmoe": _EXPERTS,
    "phimoe": {**_EXPERTS, "attention_bias": True},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 48},
    "seed_oss": {"head_dim": 16},
    "solar_open": {**_EXPERTS, "head_dim": 16},
    "stablelm": {"use_qkv_bias": True, "tie_word_embeddings": False},
    "starcoder2": {"sliding_window": 12, "use_bias": True},
    "vaultgemma": {"head_dim": 16, "sliding_window": 12, "query_pre_attn_scalar": 16},
    # what others of a type have
    "gemma4_text, shared keys": {
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma4_text, keys as values": {"attention_k_eq_v": True, "num_global_key_value_heads": 4},
    "phimoe, bias of the head": {"lm_head_bias": True},
    "glm4_moe, no norms": {"use_qk_norm": False, "attention_bias": True},
    "seed_oss, biases": {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True},
}  # fmt: skip
MULTIMODAL = "gemma4"
KINDS = [kind for kind in MODEL_TYPES if kind not in HYBRIDS] + [kind for kind in FIELDS if "," in kind]


def make_decoder(kind: str, path: Path, **others: Any) -> Path:
    model_type = kind.split(",")[0]
    fields = {**FIELDS[model_type], **FIELDS[kind], **others}
    make_model(make_config_of(model_type, **fields)).save_pretrained(path)  # type: ignore[operator]
    return path


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """A checkpoint of each kind, and what two processes report of it."""
    directory = tmp_path_factory.mktemp("ranks")
    paths = {kind: make_decoder(kind, directory / kind) for kind in KINDS}
    paths[MULTIMODAL] = make_multimodal(MULTIMODAL, directory / MULTIMODAL)
    return reports_of(2, directory, paths)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_compute_what_one_computes(kind: str, two_ranks: Reports) -> None:
    one = check_tokens(*two_ranks[kind])
    assert [report["kv_heads"] for report in two_ranks[kind][1]] == [one.kv_spec.num_kv_heads // 2] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_native_layers_compute_what_one_rank_computes(kind: str, two_ranks: Reports) -> None:
    path, reports = two_ranks[kind]
    one = check_native(path, reports)
    assert reports[0]["native_modules"].get("NativeLinear") == native_modules(one).get("NativeLinear")


def test_more_ranks_than_kv_heads(tmp_path: Path) -> None:
    """A norm over all heads counts those that several ranks hold as often."""
    paths = {kind: make_decoder(kind, tmp_path / kind) for kind in ("olmo2", "minimax_m2")}
    for kind, (path, reports) in reports_of(4, tmp_path, paths).items():
        check_tokens(path, reports)
        assert [report["kv_heads"] for report in reports] == [1] * 4, kind


def test_the_language_model_of_a_multimodal_one_is_divided(two_ranks: Reports) -> None:
    path, reports = two_ranks[MULTIMODAL]
    assert [report["outputs"] for report in reports] == [generate(load(path), PROMPTS, NEW_TOKENS)] * 2


def test_what_is_read_with_its_towers_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"kimi_k25 is read as a whole.*use tp = 1"):
        load(make_multimodal("kimi_k25", tmp_path), tp=TensorParallel(0, 2, group=object()))


def test_norms_of_single_heads_are_refused_by_name(tmp_path: Path) -> None:
    path = make_decoder("stablelm", tmp_path, qk_layernorm=True)
    with pytest.raises(ModelError, match="use tp = 1") as caught:
        load(path, tp=TensorParallel(0, 2, group=object()))
    assert caught.value.field == "qk_layernorm"


def test_heads_that_cannot_be_divided_are_refused_by_name(tmp_path: Path) -> None:
    path = make_decoder("deepseek_v3", tmp_path, num_attention_heads=3, num_key_value_heads=3)
    with pytest.raises(ModelError, match="cannot be split over tp = 2 ranks") as caught:
        load(path, tp=TensorParallel(0, 2, group=object()))
    assert caught.value.field == "num_attention_heads"
