"""llama.cpp's architectures of which files are read: what each is called in Hugging Face's terms, and its tensors."""

from dataclasses import dataclass, field
from typing import Any

from worker_proc.errors import ModelError
from worker_proc.gguf.header import Header

_COMMON = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_OUTPUT_NORMS = {  # where what attention and MLP add is normalized
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_STACKED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}  # several projections as one
_DELTA = {  # of layers with a Gated DeltaNet, and of a mixture's expert that all tokens go through
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_GATES = {"ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a"}
# `ssm_in` is what the first files have in place of attn_qkv and attn_gate
_GATES_TOGETHER = {"ssm_ba": "linear_attn.in_proj_ba", "ssm_in": "linear_attn.in_proj_qkvz"}
_CONV = {  # of LFM2
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
SHARED_FACTORS = ("rope_freqs.weight",)  # tensors that belong to the configuration
LONG_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")


@dataclass(frozen=True, slots=True)
class Architecture:
    """One of llama.cpp's architectures. `names` are those of a layer's modules (or tensors) that differ from Llama's,
    `experts` those of its experts, with `{expert}` for their number. `turned` says that the rows of queries and keys
    lie as its rotation of pairs wants them, `norm_offset` what is added to norms, `may_have_biases` that its
    configuration says whether attention and MLP have biases."""

    model_type: str
    class_name: str
    names: dict[str, str] = field(default_factory=dict)
    experts: dict[str, str] = field(default_factory=dict)
    turned: bool = False
    norm_offset: float = 0.0
    may_have_biases: bool = False
    other_layers: str = ""  # what layers are called that have no heads of keys, where there are such
    factors: tuple[str, ...] = SHARED_FACTORS
    more: dict[str, Any] = field(default_factory=dict)  # of config.json

    def layer_names(self) -> dict[str, str]:
        return _COMMON | self.names


def _experts(base: str, gate: str, up: str, down: str) -> dict[str, str]:
    names = {"ffn_gate": gate, "ffn_up": up, "ffn_down": down}
    return {name: f"{base}.{{expert}}.{projection}" for name, projection in names.items()}


_MLP_EXPERTS = _experts("mlp.experts", "gate_proj", "up_proj", "down_proj")
_LLAMA: dict[str, Any] = {"turned": True, "may_have_biases": True}
_SPACE = {  # of Granite 4: Mamba-2 layers, and an MLP that is the shared expert where there are others
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
    "ffn_gate": "shared_mlp.gate_proj",
    "ffn_up": "shared_mlp.up_proj",
    "ffn_down": "shared_mlp.down_proj",
    "ffn_gate_shexp": "shared_mlp.gate_proj",
    "ffn_up_shexp": "shared_mlp.up_proj",
    "ffn_down_shexp": "shared_mlp.down_proj",
    "ffn_gate_inp": "block_sparse_moe.router.layer",
}
_GEMMA4 = _OUTPUT_NORMS | {
    "layer_output_scale.weight": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}
_GEMMA: dict[str, Any] = {"norm_offset": 1.0, "names": _OUTPUT_NORMS}
_QWEN3_5: dict[str, Any] = {"norm_offset": 1.0, "names": _DELTA | _GATES, "more": {"linear_value_heads_tiled": True}}
ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", **_LLAMA),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        experts=_MLP_EXPERTS,
        more={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "qwen35": Architecture("qwen3_5_text", "Qwen3_5ForCausalLM", **_QWEN3_5),
    "qwen35moe": Architecture("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", experts=_MLP_EXPERTS, **_QWEN3_5),
    "qwen3next": Architecture(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        names=_DELTA | _GATES_TOGETHER,
        experts=_MLP_EXPERTS,
        norm_offset=1.0,
        more={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "lfm2": Architecture(
        "lfm2", "Lfm2ForCausalLM", names=_CONV, other_layers="conv", more={"block_auto_adjust_ff_dim": False}
    ),
    "lfm2moe": Architecture(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        names=_CONV | {"ffn_gate_inp": "feed_forward.gate", "exp_probs_b.bias": "feed_forward.expert_bias"},
        experts=_experts("feed_forward.experts", "w1", "w3", "w2"),
        other_layers="conv",
        more={"norm_topk_prob": True, "use_expert_bias": True},
    ),
    "mistral3": Architecture("ministral3", "Ministral3ForCausalLM", turned=True),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", names=_STACKED, factors=LONG_FACTORS),
    "gemma": Architecture("gemma", "GemmaForCausalLM", norm_offset=1.0),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", **_GEMMA),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", **_GEMMA),
    "gemma4": Architecture(
        "gemma4_text",
        "Gemma4ForCausalLM",
        names=_GEMMA4,
        experts=_experts("experts", "gate_proj", "up_proj", "down_proj"),
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        names=_SPACE,
        experts=_experts("block_sparse_moe.experts", "gate_proj", "up_proj", "down_proj"),
        turned=True,
        other_layers="linear_attention",
    ),
    "granite": Architecture("granite", "GraniteForCausalLM", **_LLAMA),
    # llama.cpp rotates in all but each fourth layer, whatever the model says
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", more={"no_rope_layer_interval": 4}, **_LLAMA),
    "gpt-oss": Architecture(
        "gpt_oss",
        "GptOssForCausalLM",
        names={
            "attn_sinks.weight": "self_attn.sinks",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
        },
        experts=_MLP_EXPERTS,
        more={"attention_bias": True},
    ),
}
_MIXTRAL = Architecture(
    "mixtral",
    "MixtralForCausalLM",
    names={"ffn_gate_inp": "block_sparse_moe.gate"},
    experts=_experts("block_sparse_moe.experts", "w1", "w3", "w2"),
    turned=True,
)


def architecture_of(header: Header) -> Architecture:
    """Raises ModelError for one that is not read."""
    name = header.settings.get("general.architecture")
    if name not in ARCHITECTURES:
        reason = f"of GGUF files, only {', '.join(ARCHITECTURES)} are read"
        raise ModelError("general.architecture", name, reason)
    if name == "llama" and header.settings.get("llama.expert_count"):
        return _MIXTRAL
    return ARCHITECTURES[name]
