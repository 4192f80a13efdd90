"""GGUF files of checkpoints, written as llama.cpp's converter does: with the names, settings and types that the package
gguf knows, rows of queries and keys by turns where an architecture has them so, and norms around 0 as norms around 1.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from worker_proc.gguf.config import config_of
from worker_proc.gguf.names import GgufModel
from worker_proc.weights import SINGLE_FILE

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
ARCHITECTURES |= {"gemma": "gemma", "gemma2": "gemma2", "gemma3_text": "gemma3", "granite": "granite"}
ARCHITECTURES |= {"mixtral": "llama", "phi3": "phi3", "smollm3": "smollm3", "gpt_oss": "gpt-oss"}
ARCHITECTURES |= {"lfm2": "lfm2", "lfm2_moe": "lfm2moe", "ministral3": "mistral3"}
_TURNED = ("llama", "mixtral", "granite", "smollm3", "ministral3")
_QUANTIZED_HERE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4")  # the package cannot make the others
_SCALES = {
    "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
}  # fmt: skip
_MIDDLES = {"Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5, "Q4_1": -7.5, "Q5_1": -15.5}  # of codes
_EXPERT = re.compile(r"(model\.layers\.\d+\.\w+\.experts)\.(\d+)\.(\w+)\.weight")


def write_gguf(
    source: Path,
    file: Path,
    kind_of: Callable[[str], str],
    *,
    plain: Path | None = None,
    seed: int = 0,
    tokenizer: dict[str, Any] | None = None,
    merges_experts: bool = True,
    **settings: Any,
) -> Path:
    """`kind_of` says by its name in the file how a matrix is stored; those of kinds that cannot be made here become
    random. `plain` is where a checkpoint goes with what the file stands for. `settings` replace those of the
    architecture, None leaves one out. Unless `merges_experts`, each has tensors of its own, as in the first files."""
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(file, ARCHITECTURES[config["model_type"]])
    _settings(writer, config, settings)
    add_tokenizer(writer, source, tokenizer or {})
    names = gguf.get_tensor_name_map(architecture_number(writer.arch), config["num_hidden_layers"])
    stands_for: dict[str, Tensor] = {}
    random = np.random.default_rng(seed)
    tensors = _apart(load_file(source / SINGLE_FILE))
    for name, numbers in (stack_experts(tensors) if merges_experts else tensors).items():
        stored = name_in_file(names, name)
        to_file, back = _changes(config, name)
        data = to_file(numbers.float().numpy())
        small = numbers.dim() == 1 or name.endswith((".bias", "conv.conv.weight"))
        kind = "F32" if small else kind_of(stored)
        raw, meant = stored_as(data, kind, random)
        writer.add_tensor(stored, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
        means = torch.from_numpy(np.ascontiguousarray(back(meant)))
        stands_for[name] = means.to(torch.bfloat16) if kind == "BF16" else means
    for name, factors in _factors(config).items():
        writer.add_tensor(name, np.array(factors, np.float32))
    finish(writer)
    if plain is not None:
        shutil.copytree(source, plain)
        save_file((_together if writer.arch == "gpt-oss" else _single)(stands_for), plain / SINGLE_FILE)
    return file


def finish(writer: gguf.GGUFWriter) -> None:
    """Writes it all."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def directory_of(file: Path) -> Path:
    """A model directory as worker_proc/gguf/directory.py makes it, without a tokenizer, which takes seconds."""
    directory = file.with_suffix("")
    directory.mkdir()
    (directory / "model.gguf").symlink_to(file)
    model = GgufModel.open([file])
    (directory / "config.json").write_text(json.dumps(config_of(model.header, model.rope_factors())))
    return directory


def random_blocks(kind: str, shape: tuple[int, ...], deviation: float, random: np.random.Generator) -> np.ndarray:
    """Rows of random blocks whose numbers have about this deviation."""
    numbers, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = random.integers(0, 256, (*shape[:-1], shape[-1] // numbers, nbytes), dtype=np.uint8)
    halfs = {"Q3_K": (108,), "Q6_K": (208,), "Q2_K": (80, 82)}
    places = halfs.get(kind, (0, 2) if kind in _MIDDLES else (0,))
    factors = 0.5 + random.random(raw.shape[:-1])
    for place in places:
        # the second one is of what is added: so numbers are around 0
        middle = _MIDDLES[kind] if place != places[0] else 1.0
        raw[..., place : place + 2] = (factors * middle).astype(np.float16)[..., None].view(np.uint8)
    found = gguf.dequantize(raw.reshape(*shape[:-1], -1), gguf.GGMLQuantizationType[kind])
    scale = deviation / found.std()
    for place in places:
        now = raw[..., place : place + 2].copy().view(np.float16) * np.float16(scale)
        raw[..., place : place + 2] = now.view(np.uint8)
    return raw.reshape(*shape[:-1], -1)


def add_tokenizer(writer: gguf.GGUFWriter, source: Path, settings: dict[str, Any]) -> None:
    """A byte-level BPE of tokenizer.json, as llama.cpp calls it. `settings` are added, but `pre` replaces gpt-2."""
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    vocabulary = dict(tokenizer["model"]["vocab"])
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    tokens = [token for token, _ in sorted((vocabulary | special).items(), key=lambda pair: pair[1])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(settings.get("pre", "gpt-2"))
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    ids = {"eos_token_id": special[min(special, key=lambda token: special[token])]} | settings
    for name, value in ids.items():
        if name.endswith("_token_id"):
            writer.add_uint32(f"tokenizer.ggml.{name}", value)
        elif name != "pre":
            writer.add_bool(f"tokenizer.ggml.{name}", value)
    template = json.loads((source / "tokenizer_config.json").read_text()).get("chat_template")
    template_file = source / "chat_template.jinja"
    if template_file.is_file():
        template = template_file.read_text()
    if template:
        writer.add_chat_template(template)


def common_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Of most architectures."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    theta = rope.get("full_attention", rope).get("rope_theta", 10000.0)
    return {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config.get("intermediate_size") or 1,
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps" if "rms_norm_eps" in config else "norm_eps"]),
        "rope.freq_base": float(theta),
    }


def _settings(writer: gguf.GGUFWriter, config: dict[str, Any], changes: dict[str, Any]) -> None:
    values, rope = common_settings(config), config.get("rope_parameters") or {}
    if "sliding_window" in config and config["model_type"] in ("gemma2", "gemma3_text"):
        values["attention.sliding_window"] = config["sliding_window"]
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config["model_type"] == "gemma2":
            values[key] = float(config[key])
    if config["model_type"] == "phi3":
        share = rope.get("partial_rotary_factor", 1.0)
        values["rope.dimension_count"] = int(values["attention.key_length"] * share)
        values |= {"attention.key_length": None, "attention.value_length": None}
        values["attention.sliding_window"] = config["sliding_window"] or 0
        values["rope.scaling.original_context_length"] = config["original_max_position_embeddings"]
    if config["model_type"] == "granite":
        for name, key in _SCALES.items():
            values[key] = float(config[name])
    if config["model_type"] == "gpt_oss":
        values["expert_feed_forward_length"] = config["intermediate_size"]
        values["attention.sliding_window"] = config["sliding_window"]
        values |= {"rope.scaling.type": "yarn", "rope.scaling.factor": float(rope["factor"])}
        values["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if config["model_type"] in ("mixtral", "gpt_oss"):
        values |= {"expert_count": config["num_local_experts"], "expert_used_count": config["num_experts_per_tok"]}
    if config["model_type"] == "qwen3_moe":
        values |= {"expert_count": config["num_local_experts"], "expert_used_count": config["num_experts_per_tok"]}
        values["expert_feed_forward_length"] = config["moe_intermediate_size"]
    if config["model_type"] == "ministral3" and rope["rope_type"] == "yarn":
        values |= {"rope.scaling.type": "yarn", "rope.scaling.factor": float(rope["factor"])}
        values["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        values["rope.scaling.yarn_log_multiplier"] = float(rope["mscale_all_dim"])
        values["attention.temperature_scale"] = float(rope["llama_4_scaling_beta"])
    if config["model_type"] == "lfm2_moe":
        values |= {"expert_count": config["num_experts"], "expert_used_count": config["num_experts_per_tok"]}
        values["expert_feed_forward_length"] = config["moe_intermediate_size"]
        values |= {"leading_dense_block_count": config["num_dense_layers"], "expert_gating_func": 2}
    if config["model_type"] in ("lfm2", "lfm2_moe"):
        heads = config["num_key_value_heads"]
        values["attention.head_count_kv"] = [0 if kind == "conv" else heads for kind in config["layer_types"]]
        values |= {"shortconv.l_cache": config["conv_L_cache"], "attention.key_length": None}
        values |= {"attention.value_length": None, "vocab_size": config["vocab_size"]}
        if config.get("block_auto_adjust_ff_dim"):
            size = int(config["block_ffn_dim_multiplier"] * int(2 * config["intermediate_size"] / 3))
            values["feed_forward_length"] = -(-size // config["block_multiple_of"]) * config["block_multiple_of"]
    add_settings(writer, values | changes)


def add_settings(writer: gguf.GGUFWriter, settings: dict[str, Any]) -> None:
    """Of the architecture."""
    for key, value in settings.items():
        if isinstance(value, str):
            writer.add_string(f"{writer.arch}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{writer.arch}.{key}", value)
        elif isinstance(value, bool):
            writer.add_bool(f"{writer.arch}.{key}", value)
        elif isinstance(value, list):
            writer.add_array(f"{writer.arch}.{key}", value)
        elif value is not None:
            writer.add_uint32(f"{writer.arch}.{key}", value)


def name_in_file(names: gguf.TensorNameMap, name: str) -> str:
    """What the file calls a tensor."""
    if match := _EXPERT.fullmatch(name):
        whole = name_in_file(names, f"{match[1]}.{match[3]}.weight")
        return whole.replace("_exps.", f".{match[2]}.")
    if name.endswith(".expert_bias"):
        name += ".bias"
    stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if stored is None:
        stored = names.get_name(name.removeprefix("model."), try_suffixes=(".weight",))
    assert stored is not None, name
    return stored


def _factors(config: dict[str, Any]) -> dict[str, list[float]]:
    """Tensors beside those of the checkpoint."""
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") != "longrope":
        return {}
    return {f"rope_factors_{name}.weight": rope[f"{name}_factor"] for name in ("short", "long")}


Change = Callable[[np.ndarray], np.ndarray]


def _changes(config: dict[str, Any], name: str) -> tuple[Change, Change]:
    """What a converter does to a tensor, and the other way round."""
    if config["model_type"].startswith("gemma") and "norm" in name:
        return (lambda x: x + 1), (lambda x: x - 1)
    if "conv.conv" in name:
        return (lambda x: x[:, 0]), (lambda x: x[:, None])
    if config["model_type"] in _TURNED and re.search(r"[qk]_proj", name):
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]

        def turn(x: np.ndarray) -> np.ndarray:
            return x.reshape(heads, 2, len(x) // heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)

        def back(x: np.ndarray) -> np.ndarray:
            return x.reshape(heads, len(x) // heads // 2, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)

        return turn, back
    return (lambda x: x), (lambda x: x)


def stored_as(data: np.ndarray, kind: str, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """As it lies in a file, and what it stands for."""
    kind_number = gguf.GGMLQuantizationType[kind]
    if kind == "F32":
        return data, data
    if kind in ("F16", "BF16", *_QUANTIZED_HERE):
        raw = gguf.quantize(data, kind_number)
    else:
        raw = random_blocks(kind, data.shape, float(data.std()), random)
    return raw, gguf.dequantize(raw, kind_number)


def stack_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The experts of a layer as one tensor."""
    whole: dict[str, Tensor] = {}
    experts: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        if match := _EXPERT.fullmatch(name):
            stack = experts.setdefault(f"{match[1]}.{match[3]}.weight", [])
            assert int(match[2]) == len(stack)
            stack.append(tensor)
        else:
            whole[name] = tensor
    return whole | {name: torch.stack(stack) for name, stack in experts.items()}


def _single(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The other way round."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".experts." in name:
            base, projection, _ = name.rsplit(".", 2)
            found |= {f"{base}.{i}.{projection}.weight": part.contiguous() for i, part in enumerate(tensor)}
        else:
            found[name] = tensor.contiguous()
    return found


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """gpt-oss's experts as files have them: gates and ups apart, and outputs before inputs."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        base, _, last = name.rpartition(".")
        if last in ("gate_up_proj", "gate_up_proj_bias"):
            kind = "bias" if last.endswith("bias") else "weight"
            rows = tensor if kind == "bias" else tensor.mT
            found |= {f"{base}.{which}_proj.{kind}": rows[:, first::2] for which, first in (("gate", 0), ("up", 1))}
        elif last == "down_proj":
            found[f"{name}.weight"] = tensor.mT
        elif last == "down_proj_bias":
            found[f"{base}.down_proj.bias"] = tensor
        else:
            found[f"{name}.weight" if last == "sinks" else name] = tensor
    return found


def _together(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The other way round."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        base, _, kind = name.rpartition(".")
        suffix = "_bias" if kind == "bias" else ""
        if base.endswith("experts.gate_proj"):
            up = tensors[name.replace("gate", "up")]
            both = torch.stack((tensor, up), 2).flatten(1, 2)
            found[base.replace("gate_proj", "gate_up_proj") + suffix] = (both if suffix else both.mT).contiguous()
        elif base.endswith("experts.down_proj"):
            found[base + suffix] = (tensor if suffix else tensor.mT).contiguous()
        elif not base.endswith("experts.up_proj"):
            found[base if base.endswith("sinks") else name] = tensor.contiguous()
    return found


def architecture_number(name: str) -> gguf.MODEL_ARCH:
    return next(number for number, text in gguf.MODEL_ARCH_NAMES.items() if text == name)
