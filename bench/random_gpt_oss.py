"""Writes a checkpoint of random weights in the shape of gpt-oss-20b, its experts in MXFP4, as OpenAI publishes it.

    python -m bench.random_gpt_oss DIRECTORY TOKENIZER_DIRECTORY              # all 24 layers: 13.8 GB
    python -m bench.random_gpt_oss DIRECTORY TOKENIZER_DIRECTORY --layers 6   # 4.9 GB

The tokenizer is that of any other model: token ids are what benchmarks send.
"""

import json
import shutil
from pathlib import Path

import click
import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, CHANNELS, EXPERTS, EACH, VOCABULARY = 2880, 2880, 32, 4, 201088
HEAD, HEADS, KV_HEADS = 64, 64, 8
_GENERATOR = torch.Generator().manual_seed(0)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def config(layers: int) -> dict[str, object]:
    """As published, but for the number of layers."""
    return {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True, "head_dim": HEAD,
        "hidden_act": "silu", "hidden_size": HIDDEN, "initial_context_length": 4096, "intermediate_size": CHANNELS,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2), "max_position_embeddings": 131072,
        "num_attention_heads": HEADS, "num_experts_per_tok": EACH, "num_hidden_layers": layers,
        "num_key_value_heads": KV_HEADS, "num_local_experts": EXPERTS, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
        "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
        "vocab_size": VOCABULARY, "eos_token_id": VOCABULARY - 1,
        "quantization_config": {"quant_method": "mxfp4"},
    }  # fmt: skip


def layer_tensors(layer: int) -> dict[str, Tensor]:
    base = f"model.layers.{layer}."
    tensors = {base + f"{name}_layernorm.weight": _ones() for name in ("input", "post_attention")}
    tensors[base + "self_attn.sinks"] = _normal(HEADS, spread=1.0)
    shapes = {"q": (HEADS * HEAD, HIDDEN), "k": (KV_HEADS * HEAD, HIDDEN), "v": (KV_HEADS * HEAD, HIDDEN)}
    for name, (outputs, inputs) in (shapes | {"o": (HIDDEN, HEADS * HEAD)}).items():
        tensors[base + f"self_attn.{name}_proj.weight"] = _normal(outputs, inputs)
        tensors[base + f"self_attn.{name}_proj.bias"] = _normal(outputs)
    tensors[base + "mlp.router.weight"], tensors[base + "mlp.router.bias"] = _normal(EXPERTS, HIDDEN), _normal(EXPERTS)
    for name, outputs, inputs in (("gate_up_proj", 2 * CHANNELS, HIDDEN), ("down_proj", HIDDEN, CHANNELS)):
        stem = base + "mlp.experts." + name
        tensors[stem + "_blocks"] = _bytes(0, 256, EXPERTS, outputs, inputs // 32, 16)
        tensors[stem + "_scales"] = _bytes(119, 122, EXPERTS, outputs, inputs // 32)  # weights of about 0.02
        tensors[stem + "_bias"] = _normal(EXPERTS, outputs)
    return tensors


def _ones() -> Tensor:
    return torch.ones(HIDDEN, dtype=torch.bfloat16)


def _normal(*shape: int, spread: float = 0.02) -> Tensor:
    return torch.empty(shape).normal_(0, spread, generator=_GENERATOR).to(torch.bfloat16)


def _bytes(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=_GENERATOR)


@click.command(context_settings={"show_default": True})
@click.argument("directory", type=click.Path(path_type=Path))
@click.argument("tokenizer", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--layers", type=click.IntRange(2), default=24, help="An even number.")
def main(directory: Path, tokenizer: Path, layers: int) -> None:
    """A file for each layer, one for the embedding and the last norm, and one for the head."""
    directory.mkdir(parents=True)
    places: dict[str, str] = {}
    ends = (
        lambda: {"model.embed_tokens.weight": _normal(VOCABULARY, HIDDEN), "model.norm.weight": _ones()},
        lambda: {"lm_head.weight": _normal(VOCABULARY, HIDDEN)},
    )
    count = layers + len(ends)
    for index in range(count):
        tensors = layer_tensors(index) if index < layers else ends[index - layers]()
        file = f"model-{index + 1:05d}-of-{count:05d}.safetensors"
        save_file(tensors, directory / file)
        places |= dict.fromkeys(tensors, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (directory / "config.json").write_text(json.dumps(config(layers)))
    for name in _TOKENIZER_FILES:
        shutil.copy(tokenizer / name, directory / name)


if __name__ == "__main__":
    main()
