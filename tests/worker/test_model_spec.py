"""Config files: what is understood, and what is refused with the key named."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.helpers_models import KINDS, VOCAB_SIZE, make_checkpoint, make_config
from worker_proc.errors import ModelError
from worker_proc.models.decoder_layout import Shard
from worker_proc.models.describe import context_limit, describe
from worker_proc.models.end_tokens import eos_token_ids
from worker_proc.models.families import FAMILIES, parse_spec
from worker_proc.models.rope import inverse_frequencies
from worker_proc.models.rope_spec import parse_rope

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GEMMA3 = LLAMA | {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "head_dim": 16}
QWEN3_MOE = LLAMA | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_key_value_heads": 2}
GPT_OSS = LLAMA | {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "num_key_value_heads": 2}
QWEN3 = LLAMA | {"model_type": "qwen3", "architectures": None, "num_key_value_heads": 2}
SMOLLM3 = LLAMA | {"model_type": "smollm3", "architectures": None}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"]}
PHI3 = LLAMA | {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"]}
GPT2 = {"model_type": "gpt2", "vocab_size": 320, "n_embd": 64, "n_layer": 2, "n_head": 4}


def test_defaults_are_those_of_transformers() -> None:
    spec = parse_spec(LLAMA)
    assert (spec.num_kv_heads, spec.head_dim, spec.context_length) == (4, 16, 2048)
    assert not spec.tied and not spec.qkv_bias and spec.activation == "silu" and spec.norm_eps == 1e-6
    assert {rope.theta for rope in spec.ropes if rope is not None} == {10000.0}
    assert parse_spec(LLAMA | {"model_type": "mistral", "architectures": ["MistralForCausalLM"],
                               "num_key_value_heads": 2}).windows == (4096, 4096)  # fmt: skip
    gpt2 = parse_spec(GPT2)
    assert (gpt2.intermediate_size, gpt2.context_length, gpt2.tied, gpt2.ropes) == (256, 1024, True, (None, None))


@pytest.mark.parametrize("model_type", sorted(set(FAMILIES) - {"gpt2"}))
def test_what_a_config_leaves_out_is_what_transformers_takes(model_type: str) -> None:
    sizes = {"vocab_size": 320, "hidden_size": 512, "intermediate_size": 96, "num_hidden_layers": 8,
             "num_attention_heads": 32, "model_type": model_type}  # fmt: skip
    whole = AutoConfig.for_model(**sizes).to_dict() | {"model_type": model_type}
    assert parse_spec(sizes) == parse_spec(whole)


def test_gemma_3_in_the_spelling_of_older_checkpoints() -> None:
    old = {"rope_theta": 1e6, "rope_local_base_freq": 2e4, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
           "sliding_window_pattern": 2, "sliding_window": 64}  # fmt: skip
    ropes = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
             "sliding_attention": {"rope_type": "default", "rope_theta": 2e4}}  # fmt: skip
    new = {"rope_parameters": ropes, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
    assert parse_spec(GEMMA3 | old) == parse_spec(GEMMA3 | new)
    assert parse_spec(GEMMA3 | old).windows == (64, None)


@pytest.mark.parametrize(
    ("base", "change", "windows"),
    [
        (QWEN3, {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}, (None, 5)),
        (QWEN3, SLIDING | {"use_sliding_window": True, "sliding_window": 5}, (5, None)),
        (QWEN3, {"sliding_window": 5, "layer_types": ["full_attention"] * 2}, (None, None)),
        (SMOLLM3, {"use_sliding_window": True, "sliding_window": 5, "no_rope_layers": [1, 0]}, (None, 5)),
        (SMOLLM3, SLIDING | {"use_sliding_window": True, "sliding_window": 5}, (5, None)),
        (QWEN3_MOE, {"use_sliding_window": True, "sliding_window": 5}, (5, 5)),
        (QWEN3_MOE, {"sliding_window": 5}, (None, None)),
        (PHI3, {"sliding_window": 5}, (5, 5)),
        (GEMMA3, {"sliding_window": None, "layer_types": ["full_attention"] * 2}, (None, None)),
    ],
)
def test_windows(base: dict[str, Any], change: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert parse_spec(base | change).windows == windows


def test_the_context_ends_where_dual_chunk_attention_begins() -> None:
    settings = {"chunk_size": 1024, "local_size": 128, "original_max_position_embeddings": 1024}
    config = QWEN3 | {"max_position_embeddings": 4096, "dual_chunk_attention_config": settings}
    assert parse_spec(config).context_length == context_limit(config) == 896
    assert parse_spec(config | {"max_position_embeddings": 512}).context_length == 512


def test_a_copy_of_the_code_beside_a_phi_3_is_not_needed() -> None:
    """Its published checkpoints carry one; it is never run."""
    assert parse_spec(PHI3 | {"auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}}) == parse_spec(
        PHI3
    )


@pytest.mark.parametrize(
    ("base", "change", "field"),
    [
        (LLAMA, {"hidden_size": None}, "hidden_size"),
        (LLAMA, {"hidden_size": "64"}, "hidden_size"),
        (LLAMA, {"num_hidden_layers": 0}, "num_hidden_layers"),
        (LLAMA, {"num_attention_heads": 5}, "hidden_size"),
        (LLAMA, {"num_key_value_heads": 3}, "num_attention_heads"),
        (LLAMA, {"hidden_act": "xielu"}, "hidden_act"),
        (LLAMA, {"rms_norm_eps": 0}, "rms_norm_eps"),
        (LLAMA, {"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        (LLAMA, {"head_dim": 15}, "head_dim"),
        (LLAMA, {"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        (LLAMA, {"auto_map": {"AutoModel": "modeling.Model"}}, "auto_map"),
        (LLAMA, {"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization_config: quant_method"),
        (LLAMA, {"quantization_config": {"quant_method": "gptq"}}, "quantization_config: bits"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA, {"rope_scaling": {"rope_type": "mystery"}}, "rope_scaling.rope_type"),
        (LLAMA, {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": -1}}, "rope_scaling.factor"),
        (LLAMA, {"rope_parameters": {"rope_type": "linear", "factor": 2, "warp": 3}}, "rope_parameters.warp"),
        (LLAMA, {"rope_parameters": {"rope_type": "llama3", "factor": 2}}, "rope_parameters.low_freq_factor"),
        (LLAMA, {"rope_parameters": {"rope_theta": 0}}, "rope_parameters.rope_theta"),
        (LLAMA, {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "rope_scaling.short_factor"),
        (LLAMA, {"rope_scaling": [1]}, "rope_scaling"),
        (QWEN3, {"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
        (QWEN3, {"layer_types": ["full_attention"]}, "layer_types"),
        (LLAMA | {"model_type": "mistral", "architectures": None, "num_key_value_heads": 2},
         {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        (LLAMA | {"model_type": "mistral", "architectures": None, "num_key_value_heads": 2},
         {"sliding_window": -4}, "sliding_window"),
        (QWEN3, SLIDING, "use_sliding_window"),
        (QWEN3, SLIDING | {"use_sliding_window": True, "sliding_window": None}, "sliding_window"),
        (QWEN3, {"dual_chunk_attention_config": True}, "dual_chunk_attention_config"),
        (QWEN3, {"dual_chunk_attention_config": {"chunk_size": 8, "local_size": 8}}, "dual_chunk_attention_config"),
        (QWEN3, {"dual_chunk_attention_config": {"chunk_size": 8}}, "local_size"),
        (QWEN3, {"max_window_layers": "1"}, "max_window_layers"),
        (SMOLLM3, SLIDING | {"sliding_window": 5}, "use_sliding_window"),
        (SMOLLM3, SLIDING | {"sliding_window": 5, "use_sliding_window": False}, "use_sliding_window"),
        (SMOLLM3, SLIDING | {"use_sliding_window": True}, "sliding_window"),
        (QWEN3_MOE, SLIDING | {"use_sliding_window": True}, "layer_types"),
        (QWEN3_MOE, {"layer_types": ["sliding_attention"] * 2}, "layer_types"),
        (PHI3, SLIDING | {"sliding_window": 5}, "layer_types"),
        (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA3, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        (GEMMA3, {"sliding_window": None}, "sliding_window"),
        (GEMMA3, {"rope_parameters": {"rope_type": "default"}}, "rope_parameters"),
        (GEMMA3, {"rope_scaling": 3}, "rope_scaling"),
        (GEMMA3, {"rope_parameters": {"full_attention": {"rope_type": "linear"}}}, "rope_parameters.factor"),
        (GEMMA3, {"rope_local_base_freq": -1}, "rope_local_base_freq"),
        (GEMMA3, {"final_logit_softcapping": -30.0}, "final_logit_softcapping"),
        (GEMMA3, {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
        (GEMMA3, {"hidden_activation": "xielu"}, "hidden_activation"),
        (PHI3, {"partial_rotary_factor": 0}, "partial_rotary_factor"),
        (PHI3, {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        (PHI3, {"partial_rotary_factor": 0.2}, "head_dim"),
        (PHI3, {"rope_scaling": {"type": "su", "short_factor": [1.0]}}, "rope_scaling.short_factor"),
        (LLAMA | {"model_type": "mixtral", "architectures": None, "num_key_value_heads": 2},
         {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        (GPT_OSS, {"hidden_act": "gelu"}, "hidden_act"),
        (GPT_OSS, {"swiglu_alpha": 1.0}, "swiglu_alpha"),
        (GPT_OSS, {"swiglu_limit": None}, "swiglu_limit"),
        (GPT_OSS, {"sliding_window": None}, "sliding_window"),
        (GPT_OSS, {"layer_types": ["full_attention"]}, "layer_types"),
        (GPT_OSS, {"num_experts_per_tok": 129}, "num_experts_per_tok"),
        (QWEN3_MOE, {"mlp_only_layers": [1]}, "mlp_only_layers"),
        (QWEN3_MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        (QWEN3_MOE, {"moe_intermediate_size": None}, "moe_intermediate_size"),
        (QWEN3_MOE, {"num_experts": 0}, "num_experts"),
        (QWEN3_MOE, {"num_local_experts": 0}, "num_local_experts"),
        (LLAMA | {"model_type": "granite", "architectures": None}, {"logits_scaling": 0}, "logits_scaling"),
        (LLAMA | {"model_type": "granite", "architectures": None}, {"residual_multiplier": "1"}, "residual_multiplier"),
        (SMOLLM3, {"no_rope_layers": [1]}, "no_rope_layers"),
        (SMOLLM3, {"no_rope_layers": [1, 2]}, "no_rope_layers"),
        (GPT2, {"add_cross_attention": True}, "add_cross_attention"),
        (GPT2, {"n_head": 3}, "n_embd"),
        (GPT2, {"activation_function": "mish"}, "activation_function"),
    ],
)  # fmt: skip
def test_refused_by_name(base: dict[str, Any], change: dict[str, Any], field: str) -> None:
    parse_spec(base)
    with pytest.raises(ModelError) as caught:
        parse_spec(base | change)
    assert caught.value.field == field


ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 500000.0},
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 3.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 8192, "rope_theta": 500000.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1000000.0},
    {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.7,
     "mscale_all_dim": 1.1, "beta_fast": 16, "beta_slow": 2},
    {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False,
     "attention_factor": 1.25},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 50.0,
     "beta_fast": 1024},
    {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0 + i / 10 for i in range(32)],
     "long_factor": [2.0] * 32, "original_max_position_embeddings": 4096},
]  # fmt: skip


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("old_spelling", [False, True])
def test_rope_equals_transformers_to_the_bit(rope: dict[str, Any], old_spelling: bool) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    fields = {"head_dim": 64, "max_position_embeddings": 131072}
    theirs = LlamaRotaryEmbedding(make_config("llama", rope_scaling=dict(rope), **fields))
    config: dict[str, Any] = {"rope_parameters": rope}
    if old_spelling:
        scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "rope_type")}
        config = {"rope_scaling": scaling | {"type": rope["rope_type"]}, "rope_theta": rope.get("rope_theta")}
    spec = parse_rope(config, 64, 131072)
    assert torch.equal(inverse_frequencies(spec), theirs.inv_freq)
    assert spec.attention_factor == theirs.attention_scaling


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_describe_agrees_with_transformers(kind: str, tmp_path: Path) -> None:
    path = make_checkpoint(kind, tmp_path)
    info, config = describe(path), make_config(kind)
    assert (info.vocab_size, info.context_length, info.eos_token_ids) == (VOCAB_SIZE, 256, (0,))
    assert info.model_type == config.model_type and info.dtype == "float32"
    assert info.architecture == json.loads((path / "config.json").read_text())["architectures"][0]
    assert 0 < info.parameter_bytes < (path / "model.safetensors").stat().st_size


def test_describe_reads_end_of_sequence_where_generation_does(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path)
    (path / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    assert describe(path).eos_token_ids == (2, 5, 0)  # the tokenizer's own is 0
    (path / "generation_config.json").unlink()
    assert describe(path).eos_token_ids == (0,)
    (path / "generation_config.json").write_text('{"eos_token_id": "two"}')
    with pytest.raises(ModelError, match="eos_token_id"):
        describe(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"eos_token_id": 2**31 - 1}, "eos_token_id = .*: must be a token id up to 2147483646"),
        ({"eos_token_id": [-1]}, "eos_token_id = .*: must be a token id up to 2147483646"),
        ({"eos_token_id": list(range(257))}, "eos_token_id = .*: 257 tokens end an answer, at most 256 may"),
        ({"max_position_embeddings": 1}, "max_position_embeddings = 1: a context window has at least 2 tokens"),
        ({"vocab_size": 2**31}, "vocab_size = 2147483648: at most [0-9]+ tokens fit"),
    ],
)
@pytest.mark.parametrize("kind", ["llama", "gptneox"])
def test_describe_refuses_what_no_message_holds(kind: str, change: dict[str, Any], said: str, tmp_path: Path) -> None:
    """Processes that wait for such a message would wait until the start's time is over."""
    path = make_checkpoint(kind, tmp_path)
    (path / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=said):
        describe(path)


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_without_a_word_of_it_the_end_is_that_of_the_familys_class(model_type: str, tmp_path: Path) -> None:
    end = AutoConfig.for_model(model_type).eos_token_id
    assert eos_token_ids(tmp_path, {"model_type": model_type}) == (() if end is None else (end,))
    assert eos_token_ids(tmp_path, {"model_type": model_type, "eos_token_id": None}) == ()


def _written(directory: Path, **files: Any) -> Path:
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize("end", ["</s>", {"content": "</s>", "special": True, "__type": "AddedToken"}])
def test_the_tokenizers_own_end_is_one_too(end: object, tmp_path: Path) -> None:
    config = {"model_type": "llama", "eos_token_id": 5}
    _written(tmp_path, tokenizer_config={"eos_token": end})
    assert eos_token_ids(tmp_path, config) == (5,), "no file knows the id"
    _written(tmp_path, tokenizer={"added_tokens": [], "model": {"vocab": {"a": 1, "</s>": 2}}})
    assert eos_token_ids(tmp_path, config) == (5, 2)
    _written(tmp_path, tokenizer={"added_tokens": [{"id": 7, "content": "</s>"}], "model": {"vocab": [["</s>", 0.0]]}})
    assert eos_token_ids(tmp_path, config) == (5, 7)
    assert eos_token_ids(tmp_path, config | {"eos_token_id": [7, 5]}) == (7, 5), "twice"
    added = {"1": {"content": "<s>"}, "9": {"content": "</s>"}}
    _written(tmp_path, tokenizer_config={"eos_token": end, "added_tokens_decoder": added})
    assert eos_token_ids(tmp_path, config) == (5, 9)
    _written(tmp_path, tokenizer_config={"eos_token": None}, special_tokens_map={"eos_token": end})
    assert eos_token_ids(tmp_path, config) == (5, 7)
    _written(tmp_path, tokenizer_config={}, special_tokens_map={})
    assert eos_token_ids(tmp_path, config) == (5,)


@pytest.mark.parametrize(
    ("change", "field"),
    [({"is_encoder_decoder": True}, "is_encoder_decoder"), ({"vision_config": {"depth": 2}}, "vision_config"),
     ({"auto_map": {"AutoConfig": "x.y"}, "model_type": "own"}, "auto_map"), ({"model_type": None}, "model_type")],
)  # fmt: skip
def test_describe_refuses_what_no_backend_serves(change: dict[str, Any], field: str, tmp_path: Path) -> None:
    path = make_checkpoint("olmo", tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError) as caught:
        describe(path)
    assert caught.value.field == field


def test_describe_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    for kind in ("llama", "gptneox"):
        path = make_checkpoint(kind, tmp_path / kind)
        code = (
            "import sys; from worker_proc.models.describe import describe; describe(sys.argv[1]);"
            "print([name for name in ('torch', 'transformers') if name in sys.modules])"
        )
        done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("fields", "size", "field"),
    [({}, 3, "num_attention_heads"), ({"intermediate_size": 98}, 4, "intermediate_size"),
     ({"num_attention_heads": 12, "hidden_size": 96, "num_key_value_heads": 4}, 6, "num_key_value_heads")],
)  # fmt: skip
def test_sizes_that_do_not_divide_are_refused_by_name(fields: dict[str, Any], size: int, field: str) -> None:
    with pytest.raises(ModelError, match=f"tp = {size}") as caught:
        Shard.of(parse_spec(LLAMA | fields), 0, size)
    assert caught.value.field == field


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(8, 8, 2), (8, 4, 2), (8, 2, 4), (8, 1, 4), (8, 2, 8)])
def test_every_query_head_sits_with_its_kv_head(heads: int, kv_heads: int, size: int) -> None:
    spec = parse_spec(LLAMA | {"num_attention_heads": heads, "num_key_value_heads": kv_heads})
    shards = [Shard.of(spec, rank, size) for rank in range(size)]
    assert [head for shard in shards for head in range(*shard.heads)] == list(range(heads))
    for shard in shards:
        local_group = (shard.heads[1] - shard.heads[0]) // (shard.kv_heads[1] - shard.kv_heads[0])
        for head in range(*shard.heads):
            kv_head = shard.kv_heads[0] + (head - shard.heads[0]) // local_group
            assert kv_head == head // (heads // kv_heads)
