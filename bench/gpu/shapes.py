"""Models of known shapes with random weights, made on the GPU without a checkpoint."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from worker_proc.cuda.decoder import CudaDecoder
from worker_proc.cuda.quantized import PackedWeight
from worker_proc.models.decoder_layout import Shard
from worker_proc.models.decoder_weights import DecoderWeights, LayerWeights
from worker_proc.models.families import parse_spec
from worker_proc.models.layers import Linear, RMSNorm, Table
from worker_proc.models.spec import DecoderSpec
from worker_proc.parallel import TensorParallel
from worker_proc.quantization.rows import quantize_rows
from worker_proc.quantization.scheme import HEAD_SCHEME, Scheme

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "hidden_size": 1024,
        "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
        "rope_theta": 1e6, "hidden_act": "silu",
    },
    "llama-8b": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "rope_theta": 5e5,
        "hidden_act": "silu",
    },
}  # fmt: skip


def make_model(name: str, scheme: Scheme | None = None, *, layers: int | None = None) -> CudaDecoder:
    """A bfloat16 model of `CONFIGS` on the current GPU, or its first `layers`; its projections in codes of `scheme`, if
    one is given, and its head in int8 then."""
    spec = parse_spec(CONFIGS[name])
    if layers is not None:
        spec = replace(spec, num_layers=layers, scales=spec.scales[:layers], windows=spec.windows[:layers])
    weights = random_weights(spec, scheme)
    return CudaDecoder(spec, Shard.of(spec, 0, 1), weights, TensorParallel())


def weight_bytes(model: CudaDecoder) -> int:
    """Bytes of weights that a decode step reads: all but the embedding, of which it takes single rows."""
    w = model.weights
    layers = [layer.qkv for layer in w.layers] + [layer.o for layer in w.layers]
    layers += [layer.up for layer in w.layers] + [layer.down for layer in w.layers]
    return sum(linear.weight.nbytes for linear in (w.head, *layers))


def random_matrix(rows: int, columns: int, device: str = "cuda") -> torch.Tensor:
    """bfloat16 `[rows, columns]`, by default on the current GPU, which keeps the size of what it is multiplied with."""
    return torch.randn(rows, columns, dtype=torch.bfloat16, device=device).mul_(columns**-0.5)


def in_codes(weight: torch.Tensor, scheme: Scheme) -> PackedWeight:
    """`weight` in codes of a symmetric scheme."""
    outputs, inputs = weight.shape
    packed = PackedWeight.empty(outputs, inputs, scheme, weight.dtype, weight.device)
    for first in range(0, outputs, 4096):  # float32 copies of all of a head would be gigabytes
        packed.put(first, quantize_rows(weight[first : first + 4096], scheme))
    return packed


def random_weights(spec: DecoderSpec, scheme: Scheme | None = None, device: str = "cuda") -> DecoderWeights:
    """Of a model without biases, its projections in codes of `scheme`, if one is given, and its head in int8 then."""
    torch.manual_seed(0)

    def matrix(rows: int, columns: int, scheme: Scheme | None = scheme) -> Table:
        weight = random_matrix(rows, columns, device)
        return weight if scheme is None else in_codes(weight, scheme)

    def norm(width: int) -> RMSNorm:
        return RMSNorm(torch.ones(width, dtype=torch.bfloat16, device=device), spec.norm_eps)

    heads, kv_heads, dim, hidden = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.hidden_size
    layers = tuple(
        LayerWeights(
            input_norm=norm(hidden),
            qkv=Linear(matrix((heads + 2 * kv_heads) * dim, hidden), None),
            q_norm=norm(dim) if spec.qk_norm else None,
            k_norm=norm(dim) if spec.qk_norm else None,
            o=Linear(matrix(hidden, heads * dim), None),
            post_norm=norm(hidden),
            up=Linear(matrix(2 * spec.intermediate_size, hidden), None),
            down=Linear(matrix(hidden, spec.intermediate_size), None),
        )
        for _ in range(spec.num_layers)
    )
    of_head = None if scheme is None else HEAD_SCHEME
    embedding = matrix(spec.vocab_size, hidden, of_head if spec.tied else None)
    head = embedding if spec.tied else matrix(spec.vocab_size, hidden, of_head)
    return DecoderWeights(embedding, None, layers, norm(hidden), Linear(head, None))


def save_checkpoint(name: str, path: Path, tokenizer_of: Path) -> None:
    """The same model as a Hugging Face checkpoint, with the tokenizer files of another one."""
    from safetensors.torch import save_file

    spec = parse_spec(CONFIGS[name])
    weights = random_weights(spec)
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    tensors = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.norm.weight}
    if not spec.tied:
        tensors["lm_head.weight"] = weights.head.weight
    for i, layer in enumerate(weights.layers):
        named = {
            "input_layernorm": layer.input_norm.weight,
            "post_attention_layernorm": layer.post_norm.weight,
            "self_attn.o_proj": layer.o.weight,
            "mlp.down_proj": layer.down.weight,
        }
        parts = layer.qkv.weight.split([q, kv, kv])
        named |= {f"self_attn.{n}_proj": part for n, part in zip("qkv", parts, strict=True)}
        named |= dict(zip(("mlp.gate_proj", "mlp.up_proj"), layer.up.weight.chunk(2), strict=True))
        if layer.q_norm is not None and layer.k_norm is not None:
            named |= {"self_attn.q_norm": layer.q_norm.weight, "self_attn.k_norm": layer.k_norm.weight}
        tensors |= {f"model.layers.{i}.{n}.weight": t for n, t in named.items()}
    path.mkdir(parents=True)
    save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, path / "model.safetensors")
    config = CONFIGS[name] | {"torch_dtype": "bfloat16", "eos_token_id": 2}
    (path / "config.json").write_text(json.dumps(config))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_of / file, path / file)
