"""LFM2 and its mixtures: what configurations and GGUF files say, and what the native decoder makes of them."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.helpers_divided import check_native, reports_of
from tests.helpers_gguf import directory_of, write_gguf
from tests.helpers_hybrid import hybrid_config, make_hybrid
from tests.helpers_models import VOCAB_SIZE
from tests.helpers_paged import generate, make_prompts
from tests.worker.test_cpu_build import needs_compiler
from tests.worker.test_gguf_hybrids import mostly_k
from tests.worker.test_hybrid_decoder import CALM, LEVELS, all_logits, error, load, load_native, matrices, round_weights
from tests.worker.test_hybrid_serving import COUNT, WAVES, check_serving
from worker_proc.cpu.features import Level
from worker_proc.cpu.linear import Format
from worker_proc.errors import ModelError
from worker_proc.gguf.directory import GgufError, directory_for
from worker_proc.gguf.splits import SPLITS
from worker_proc.models.describe import describe, read_config
from worker_proc.models.hybrid_families import hybrid_spec
from worker_proc.models.registry import has_recurrent_layers
from worker_proc.models.shard import Shard
from worker_proc.models.spec import ConvSpec, MixtureSpec
from worker_proc.models.transformers_backend import TransformersModel
from worker_proc.weights import SINGLE_FILE

pytestmark = needs_compiler
PROMPTS = make_prompts(VOCAB_SIZE)
_FULL = "full_attention"
K = {"hidden_size": 256, "head_dim": 64}  # rows of whole blocks
K_OF = {
    "lfm2": K | {"block_ff_dim": 256, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": K | {"intermediate_size": 512, "moe_intermediate_size": 256, "tie_word_embeddings": True},
}


def config_of(kind: str = "lfm2", **changes: Any) -> dict[str, Any]:
    """As transformers writes it."""
    return hybrid_config(kind).to_dict() | {"model_type": kind} | changes


def test_a_config_says_which_layers_attend() -> None:
    spec = hybrid_spec(config_of())
    assert spec is not None and spec.conv == ConvSpec((True, False, True, True), 3, False)
    assert [spec.attends(layer) for layer in range(4)] == [False, True, False, False]
    older = config_of(layer_types=None, full_attn_idxs=[1])  # as in the first checkpoints
    assert hybrid_spec(older) == spec
    everywhere = hybrid_spec(config_of(layer_types=None, full_attn_idxs=None))
    assert everywhere is not None and everywhere.conv is None and not everywhere.recurrent


@pytest.mark.parametrize(
    "given",
    [
        {"block_ff_dim": 12288}, {"block_ff_dim": 6656}, {"intermediate_size": 1000, "block_ff_dim": None},
        {"block_ff_dim": 1000, "block_multiple_of": 100}, {"block_ff_dim": 1000, "block_ffn_dim_multiplier": 1.3},
        {"block_ff_dim": 1000, "block_auto_adjust_ff_dim": False},
    ],
    ids=str,
)  # fmt: skip
def test_channels_are_those_of_transformers(given: dict[str, Any]) -> None:
    from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP

    spec = hybrid_spec(config_of(**given))
    wanted = {key: value for key, value in given.items() if key != "block_ff_dim" or value is not None}
    with torch.device("meta"):
        mlp = Lfm2MLP(AutoConfig.for_model("lfm2", hidden_size=64, **wanted))
    assert spec is not None and spec.intermediate_size == mlp.w1.out_features


def test_a_config_says_which_layers_are_mixtures() -> None:
    spec = hybrid_spec(config_of("lfm2_moe", routed_scaling_factor=2.0, use_expert_bias=False))
    assert spec is not None and spec.conv is not None and spec.intermediate_size == 48
    want = MixtureSpec(4, 2, True, sigmoid=True, choice_bias=False, scale=2.0, dense=1, dense_size=96)
    assert spec.mixture == want


@pytest.mark.parametrize(
    "change",
    [
        {"num_dense_layers": 4}, {"num_dense_layers": -1}, {"num_dense_layers": True}, {"num_dense_layers": None},
        {"num_experts_per_tok": 5}, {"routed_scaling_factor": 0}, {"use_expert_bias": 1}, {"moe_intermediate_size": 0},
    ],
    ids=str,
)  # fmt: skip
def test_other_mixtures_are_left_to_transformers(change: dict[str, Any]) -> None:
    assert hybrid_spec(config_of("lfm2_moe", **change)) is None


@pytest.mark.parametrize("renormalizes", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_biases_choose_experts_but_do_not_share(level: Level, renormalizes: bool, tmp_path: Path) -> None:
    """`make_hybrid` has biases that choose the same two, so that no rounding chooses others."""
    changes = CALM | {"norm_topk_prob": renormalizes, "routed_scaling_factor": 1.5}
    path = round_weights(make_hybrid("lfm2_moe", tmp_path, **changes))
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    native = load_native(path, level)
    for prompt in PROMPTS[:4]:
        with torch.inference_mode():
            want = reference(torch.tensor([prompt])).logits[0]
        assert error(all_logits(native, prompt), want) < 0.03
    without = make_hybrid("lfm2_moe", tmp_path / "without", use_expert_bias=False, **changes)
    assert error(all_logits(load_native(round_weights(without), level), PROMPTS[3]), want) > 0.1


@pytest.mark.parametrize("bias", [float("nan"), float("-inf")])
def test_a_bias_that_is_not_finite_is_refused(bias: float, tmp_path: Path) -> None:
    path = make_hybrid("lfm2_moe", tmp_path)
    tensors = load_file(path / SINGLE_FILE)
    tensors["model.layers.2.feed_forward.expert_bias"][1] = bias
    save_file(tensors, path / SINGLE_FILE, {"format": "pt"})
    with pytest.raises(ModelError, match=rf"layers\.2\.feed_forward\.expert_bias = {bias}: must be finite"):
        load_native(path)


@pytest.mark.parametrize(
    "change",
    [
        {"layer_types": ["conv"] * 4}, {"layer_types": ["conv", _FULL, "conv", "linear_attention"]},
        {"layer_types": None, "full_attn_idxs": []}, {"layer_types": None, "full_attn_idxs": 1},
        {"block_ffn_dim_multiplier": 0}, {"block_multiple_of": 0}, {"conv_L_cache": 0}, {"conv_bias": "yes"},
        {"norm_eps": 0}, {"tie_embedding": 1}, {"architectures": ["Lfm2Changed"]},
    ],
    ids=str,
)  # fmt: skip
def test_others_are_left_to_transformers(change: dict[str, Any]) -> None:
    assert hybrid_spec(config_of(**change)) is None


@pytest.mark.parametrize("change", [{"hidden_size": 72, "head_dim": 18}, {"conv_L_cache": 9}], ids=str)
def test_sizes_that_the_kernels_do_not_know_are_left_to_transformers(change: dict[str, Any], tmp_path: Path) -> None:
    assert isinstance(load(make_hybrid("lfm2", tmp_path, **change)), TransformersModel)


def test_a_model_that_attends_everywhere_keeps_no_states(tmp_path: Path) -> None:
    path = make_hybrid("lfm2", tmp_path, layer_types=[_FULL] * 4)
    native, half = load_native(path), load(path, None)
    assert not has_recurrent_layers(path) and not native.kv_spec.states
    assert native.kv_spec == half.kv_spec
    prompts = PROMPTS[:2]
    assert generate(native, prompts, 4) == generate(native, prompts, 4, chunk=3)


def test_channels_that_ranks_cannot_share_are_named() -> None:
    spec = hybrid_spec(config_of(hidden_size=80, num_attention_heads=8, num_key_value_heads=8, head_dim=10))
    assert spec is not None and Shard.of(spec, 0, 1).conv == (0, 80)
    with pytest.raises(ModelError, match=r"hidden_size / 16 = 5: cannot be split over tp = 2 ranks"):
        Shard.of(spec, 0, 2)


@pytest.mark.parametrize("kind", ["lfm2", "lfm2_moe"])
def test_a_scheduler_gets_the_tokens_of_each_request_alone(kind: str, tmp_path: Path) -> None:
    """With snapshots, evictions and preemptions; to the last bit, as a token's bits are those of its own context."""
    model = load_native(make_hybrid(kind, tmp_path))
    check_serving(model, [[generate(model, [prompt], COUNT)[0] for prompt in wave] for wave in WAVES])


# ---- GGUF ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("kind", "tied"), [("lfm2", False), ("lfm2", True), ("lfm2_moe", True)])
def test_a_plain_file_is_the_model_that_it_was_made_of(kind: str, tied: bool, level: Level, tmp_path: Path) -> None:
    source = make_hybrid(kind, tmp_path / "source", tie_word_embeddings=tied)
    file = write_gguf(source, tmp_path / "m.gguf", lambda name: "BF16", plain=tmp_path / "plain")
    directory = directory_of(file)
    assert hybrid_spec(read_config(directory)) == hybrid_spec(read_config(source))
    assert describe(directory).dtype == "bfloat16" and has_recurrent_layers(directory)
    for prompt in PROMPTS[:3]:
        got, want = (all_logits(load_native(path, level), prompt) for path in (directory, tmp_path / "plain"))
        assert torch.equal(got, want)


FORMATS = {  # of what goes into convolutions, and into attention
    "Q8_0": (lambda name: "Q8_0", Format.INT8, Format.INT8),
    "Q4_0": (lambda name: "Q4_0", Format.INT4, Format.INT4),
    "Q4_K_M": (mostly_k, Format.INT4, Format.INT8),
}  # fmt: skip


@pytest.mark.parametrize("kind", K_OF)
@pytest.mark.parametrize("name", FORMATS)
def test_codes_are_what_they_stand_for(name: str, kind: str, tmp_path: Path) -> None:
    kind_of, *formats = FORMATS[name]
    source = make_hybrid(kind, tmp_path / "source", **CALM | K_OF[kind])

    def kind_in_file(stored: str) -> str:
        return "F32" if "ffn_gate_inp" in stored else kind_of(stored)

    file = write_gguf(source, tmp_path / "m.gguf", kind_in_file, plain=tmp_path / "plain")
    directory = directory_of(file)
    assert describe(directory).quantization == "gguf"
    native, want = load_native(directory), load_native(tmp_path / "plain")
    assert [layer.qkv.struct.format for layer in native.weights.layers[:2]] == formats
    most = 0.012 if name == "Q4_K_M" else 0.003
    for one, other in zip(native.weights.layers, want.weights.layers, strict=True):
        assert (one.conv is None) == (other.conv is None)
        assert one.conv is None or other.conv is None or torch.equal(one.conv.taps, other.conv.taps)
        for got, meant in zip(matrices(one), matrices(other), strict=True):
            assert error(*(matrix.unpack(torch.arange(matrix.outputs)) for matrix in (got, meant))) < most
    assert error(all_logits(native, PROMPTS[4]), all_logits(want, PROMPTS[4])) < 0.15


def test_ranks_compute_what_one_computes(tmp_path: Path) -> None:
    """Of a file; checkpoints are divided in test_divided_models.py."""
    paths = {}
    for kind, sizes in K_OF.items():
        source = make_hybrid(kind, tmp_path / f"source-{kind}", **CALM | sizes)
        paths[kind] = directory_of(write_gguf(source, tmp_path / f"{kind}.gguf", lambda name: "Q8_0"))
    for kind, (path, reports) in reports_of(2, tmp_path, paths).items():
        one = check_native(path, reports)
        assert [report["state_bytes"] for report in reports] == [one.kv_spec.bytes_per_state / 2] * 2, kind


@pytest.mark.parametrize("settings", [{"dtype": torch.float32}, {"level": None}], ids=str)
def test_elsewhere_a_file_is_refused_by_name(settings: dict[str, Any], tmp_path: Path) -> None:
    source = make_hybrid("lfm2", tmp_path / "source")
    directory = directory_of(write_gguf(source, tmp_path / "m.gguf", lambda name: "F32"))
    with pytest.raises(ModelError, match=r"GGUF files of lfm2 are read for the native CPU kernels in bfloat16 only"):
        load(directory, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention.head_count_kv": 2}, "attention.head_count_kv = 2: must say so for each layer"),
        ({"attention.head_count_kv": [0, 2]}, "attention.head_count_kv = [0, 2]: must say so for each layer"),
        ({"attention.head_count_kv": [0] * 4}, "attention.head_count_kv = [0, 0, 0, 0]: must say so for each layer"),
        ({"attention.head_count_kv": [0, 2, 0, 1]}, "must be a whole number, the same in all layers"),
        ({"shortconv.l_cache": None}, "lfm2.shortconv.l_cache = None: must be a whole number"),
        ({"attention.sliding_window": 64}, "lfm2.attention.sliding_window = 64: not supported"),
        ({"expert_count": 4}, "lfm2.expert_count = 4: not supported"),
        ({"expert_gating_func": 1}, "lfm2moe.expert_gating_func = 1: not supported"),
        ({"expert_weights_scale": 2.0}, "lfm2moe.expert_weights_scale = 2.0: not supported"),
    ],
)  # fmt: skip
def test_a_setting_that_would_change_the_numbers_is_named(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    kind = "lfm2_moe" if "lfm2moe" in message else "lfm2"
    source = make_hybrid(kind, tmp_path / "source", tie_word_embeddings=True)
    file = write_gguf(source, tmp_path / "m.gguf", lambda name: "F32", **settings)
    with pytest.raises(GgufError, match=re.escape(message)):
        directory_for(file, tmp_path / "cache")


def test_text_is_split_as_by_llama_3() -> None:
    assert SPLITS["lfm2"] is SPLITS["llama3"]
