"""Tiny random-weight Hugging Face checkpoints of every architecture, with a tokenizer, for unit and integration tests.

`python -m tests.helpers_models llama DIR` writes one by hand.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB_SIZE = 323  # odd, so that tensor-parallel ranks must pad it

_CORPUS = ["the cat sat on the mat and the dog ran to the tree, then there was rain in the town"] * 4

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "tie_word_embeddings": True,
}
_GPT2 = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "initializer_range": 0.3,
}

_CAPPED = {
    "head_dim": 16,
    "sliding_window": 12,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": False,
    "query_pre_attn_scalar": 16,
}

KINDS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "num_key_value_heads": 4},
    "llama-gqa-untied": {"model_type": "llama", "tie_word_embeddings": False},
    "llama-bias": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 24},
    "llama-mqa": {"model_type": "llama", "num_key_value_heads": 1},
    "llama-rope-llama3": {
        "model_type": "llama",
        "rope_scaling": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "llama-rope-linear": {"model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "llama-rope-dynamic": {"model_type": "llama", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "llama-rope-yarn": {
        "model_type": "llama",
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    },
    "mistral": {"model_type": "mistral", "sliding_window": None, "tie_word_embeddings": False},
    "mistral-sliding": {"model_type": "mistral", "sliding_window": 12},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-sliding": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 12,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "gpt2": {"model_type": "gpt2"},
    "gemma": {"model_type": "gemma", "head_dim": 16, "tie_word_embeddings": False},
    "gemma2": {"model_type": "gemma2", **_CAPPED},
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 32,
        "num_key_value_heads": 1,
        "num_hidden_layers": 4,
        "sliding_window": 12,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 24,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "granite": {
        "model_type": "granite",
        "tie_word_embeddings": False,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.4,
        "logits_scaling": 2.5,
        "attention_bias": True,
    },
    "phi3": {"model_type": "phi3", "sliding_window": 12, "partial_rotary_factor": 0.5},
    "smollm3": {"model_type": "smollm3", "no_rope_layer_interval": 2},
    "vaultgemma": {"model_type": "vaultgemma", **_CAPPED},
    "starcoder2": {"model_type": "starcoder2", "sliding_window": 12},
    "gptneox": {"model_type": "gpt_neox", "rotary_pct": 0.25, "tie_word_embeddings": False},
    "olmo": {"model_type": "olmo", "clip_qkv": 2.0},
    "olmo3": {"model_type": "olmo3", "num_hidden_layers": 4, "sliding_window": 12},
    "glm4": {"model_type": "glm4", "head_dim": 16, "attention_bias": True, "tie_word_embeddings": False},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "moe_intermediate_size": 48,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "tie_word_embeddings": False,
    },
    "olmoe": {
        "model_type": "olmoe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
    "phimoe": {
        "model_type": "phimoe",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        "head_dim": 16,
        "sliding_window": 12,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
    "llama4": {
        "model_type": "llama4_text",
        "num_hidden_layers": 4,
        "layer_types": ["chunked_attention", "chunked_attention", "full_attention", "chunked_attention"],
        "no_rope_layers": [1, 1, 0, 1],
        "attention_chunk_size": 16,
        "floor_scale": 4,
        "attn_scale": 0.5,
        "head_dim": 16,
        "intermediate_size_mlp": 96,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "moe_layers": [1, 3],
        "tie_word_embeddings": False,
    },
    "xmod": {"model_type": "xmod", "is_decoder": True},
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of 256 bytes, three special tokens and up to 41 merges, with a ChatML template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL_TOKENS[0])
    fast.add_special_tokens({"additional_special_tokens": SPECIAL_TOKENS[1:]})
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_config(kind: str, **overrides: Any) -> Any:
    """The transformers configuration of a kind in `KINDS`, with `overrides` replacing its fields."""
    fields = {**(_GPT2 if kind == "gpt2" else _BASE), **KINDS[kind], **overrides}
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return AutoConfig.for_model(**{**ids, **fields})


def make_config_of(model_type: str, **fields: Any) -> Any:
    """The transformers configuration of a type that is not in `KINDS`."""
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return AutoConfig.for_model(model_type, **{**ids, **_BASE, **fields})


def make_model(config: Any, seed: int = 0) -> torch.nn.Module:
    """A float32 model with random weights, biases and norms (initialised biases of 0 would hide their absence)."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("_bias"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def make_checkpoint(
    kind: str, path: str | Path, *, seed: int = 0, max_shard_size: str | int = "5GB", **overrides: Any
) -> Path:
    """Write a checkpoint (safetensors, sharded beyond `max_shard_size`) with config and tokenizer; returns `path`."""
    path = Path(path)
    model = make_model(make_config(kind, **overrides), seed)
    model.save_pretrained(path, max_shard_size=max_shard_size)  # type: ignore[operator]
    make_tokenizer().save_pretrained(path)
    return path


def greedy(path: str | Path, prompts: list[list[int]], new_tokens: int, *, attention: str = "eager") -> list[list[int]]:
    """What transformers' `generate` answers to each prompt alone, in float32, without stopping at end of sequence."""
    # other implementations than eager ignore soft caps in some versions of transformers
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=attention)
    model.generation_config.eos_token_id = None
    outputs = []
    for prompt in prompts:
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=new_tokens, do_sample=False)
        outputs.append(ids[0, len(prompt) :].tolist())
    return outputs


if __name__ == "__main__":
    print(make_checkpoint(sys.argv[1], sys.argv[2]))
