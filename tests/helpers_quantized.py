"""Checkpoints in the formats of GPTQ, AWQ and compressed-tensors, written the other way round than they are read."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from worker_proc.quantization.scheme import FP4_NUMBERS, Scheme
from worker_proc.weights import SINGLE_FILE

_PROJECTIONS = (
    "_proj.weight",
    "_proj_qkv.weight",
    "_proj_z.weight",
    "_proj_qkvz.weight",
    ".w1.weight",
    ".w2.weight",
    ".w3.weight",
)
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_words(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Codes `[R, C]` to int32 `[R, ceil(C * bits / 32)]`; `order[i]` says which of a word's codes is at place i."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(codes.long(), (0, -codes.shape[1] % per_word)).view(len(codes), -1, per_word)
    words = torch.zeros(padded.shape[:2], dtype=torch.int64)
    for place, which in enumerate(order or range(per_word)):
        words |= padded[:, :, which] << (bits * place)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def quantize_checkpoint(
    source: Path, directory: Path, method: str, scheme: Scheme, *, seed: int = 0, **changes: Any
) -> tuple[Path, Path]:
    """Turns the projections of a plain checkpoint into random codes with its scale. Returns two checkpoints: one with
    codes, and one with what they stand for in bfloat16, by the order of activations where the scheme is ordered.
    `changes` replace fields of quantization_config."""
    generator = torch.Generator().manual_seed(seed)
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(source / SINGLE_FILE).items()}
    codes_of, plain = dict(weights), dict(weights)
    for name, tensor in weights.items():
        if not name.endswith(_PROJECTIONS):
            continue
        outputs, inputs = tensor.shape
        groups, size = scheme.num_groups(inputs), scheme.group_size or inputs
        codes = torch.randint(0, 2**scheme.bits, tensor.shape, generator=generator)
        scales = tensor.float().std() * (0.5 + torch.rand(outputs, groups, generator=generator)) / 2**scheme.bits * 3.5
        scales = scales.to(torch.float16 if method != "compressed-tensors" else torch.bfloat16)
        zeros = torch.full((outputs, groups), scheme.middle)
        if not scheme.symmetric:
            zeros = torch.randint(1, 2**scheme.bits, zeros.shape, generator=generator)
            if method == "gptq":  # whose first format borrows from the place beside for it
                zeros[0, 0] = 0
        groups_of = torch.arange(inputs) // size
        if scheme.ordered:  # q, k and v have the same inputs, and so do gates and ups: an order for each number of them
            groups_of = groups_of[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
        spread = [x[:, groups_of] for x in (zeros, scales.float())]
        plain[name] = ((codes - spread[0]) * spread[1]).to(torch.bfloat16)
        del codes_of[name]
        codes_of |= _stored(name.removesuffix("weight"), method, scheme, codes, scales, zeros, groups_of.int(), changes)
    return _write_both(source, directory, codes_of, plain, quantization_config(method, scheme) | changes)


def store_bytes(
    source: Path,
    directory: Path,
    config: dict[str, Any],
    block: tuple[int | None, int | None],
    scale: str,
    *,
    seed: int = 0,
) -> tuple[Path, Path]:
    """As `quantize_checkpoint`, with a byte for each weight, FP8 where `config` says so, and a scale named `scale` for
    each `block` of outputs and inputs (None: all of them)."""
    generator = torch.Generator().manual_seed(seed)
    floating = config["quant_method"] == "fp8" or "float" in str(config["config_groups"])
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(source / SINGLE_FILE).items()}
    codes_of, plain = dict(weights), dict(weights)
    for name, tensor in weights.items():
        if not name.endswith(_PROJECTIONS):
            continue
        counts = [-(-size // (cut or size)) for size, cut in zip(tensor.shape, block, strict=True)]
        scales = tensor.float().std() * (0.5 + torch.rand(*counts, generator=generator)) / 50
        codes: Tensor
        if floating:
            numbers = (torch.randn(tensor.shape, generator=generator) * 50).clamp(-448, 448)
            codes = numbers.to(torch.float8_e4m3fn)
        else:
            most = 2 ** (_weights_of(config).get("num_bits", 8) - 1)
            codes = torch.randint(-most, most, tensor.shape, generator=generator, dtype=torch.int8)
        spread = scales
        for dim, cut in enumerate(block):
            spread = spread.repeat_interleave(cut or tensor.shape[dim], dim).narrow(dim, 0, tensor.shape[dim])
        plain[name] = (codes.float() * spread).to(torch.bfloat16)
        base = name.removesuffix("weight")
        codes_of |= {name: codes, base + scale: scales.squeeze() if block == (None, None) else scales}
        if config.get("activation_scheme") == "static":
            codes_of[base + "input_scale"] = torch.tensor(0.1)
    return _write_both(source, directory, codes_of, plain, config)


def _weights_of(config: dict[str, Any]) -> dict[str, Any]:
    weights: dict[str, Any] = config["config_groups"]["group_0"]["weights"]
    return weights


def store_mxfp4(source: Path, directory: Path, *, seed: int = 0) -> tuple[Path, Path]:
    """As `quantize_checkpoint`, in MXFP4: the experts of a gpt-oss as it publishes them, or the projections of any
    other model as compressed-tensors does."""
    generator = torch.Generator().manual_seed(seed)
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(source / SINGLE_FILE).items()}
    codes_of, plain = dict(weights), dict(weights)
    stacked = any("experts.gate_up_proj" in name for name in weights)
    endings = ("experts.gate_up_proj", "experts.down_proj") if stacked else _PROJECTIONS
    for name, tensor in weights.items():
        if not name.endswith(endings):
            continue
        # [..., outputs, inputs], which gpt-oss has the other way round where it is plain
        shape = tensor.mT.shape if stacked else tensor.shape
        codes = torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)
        mean = int(tensor.float().std().log2()) - 2
        exponents = torch.randint(mean - 1, mean + 2, (*shape[:-1], shape[-1] // 32), generator=generator)
        numbers = torch.tensor(FP4_NUMBERS)[codes.long()] * torch.exp2(exponents).repeat_interleave(32, -1)
        plain[name] = (numbers.mT if stacked else numbers).to(torch.bfloat16)
        packed, scales = codes[..., ::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8)
        del codes_of[name]
        if stacked:
            codes_of |= {name + "_blocks": packed.unflatten(-1, (-1, 16)), name + "_scales": scales}
        else:
            base = name.removesuffix("weight")
            codes_of |= {base + "weight_packed": packed, base + "weight_scale": scales}
    published = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    return _write_both(source, directory, codes_of, plain, published if stacked else mxfp4_config())


def mxfp4_config(**weights: Any) -> dict[str, Any]:
    """That of compressed-tensors; `weights` replace fields."""
    config = bytes_config("float", num_bits=4, strategy="group", group_size=32, scale_dtype="torch.uint8", **weights)
    config["config_groups"]["group_0"]["input_activations"] = None
    return config | {"format": "mxfp4-pack-quantized"}


def _write_both(
    source: Path, directory: Path, codes: dict[str, Tensor], plain: dict[str, Tensor], config: dict[str, Any]
) -> tuple[Path, Path]:
    paths = []
    for kind, tensors in (("codes", codes), ("plain", plain)):
        path = directory / kind
        shutil.copytree(source, path)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / SINGLE_FILE)
        paths.append(path)
    whole = json.loads((source / "config.json").read_text()) | {"quantization_config": config}
    (paths[0] / "config.json").write_text(json.dumps(whole))
    return paths[0], paths[1]


def bytes_config(kind: str, **weights: Any) -> dict[str, Any]:
    """That of compressed-tensors for `kind` ("float" or "int") with activations rounded; `weights` replace fields."""
    numbers = {
        "num_bits": 8, "type": kind, "symmetric": True, "dynamic": False, "actorder": None, "strategy": "channel",
        "group_size": None, "block_structure": None,
    }  # fmt: skip
    activations = {"num_bits": 8, "type": kind, "symmetric": True, "dynamic": True, "strategy": "token"}
    group = {"targets": ["Linear"], "weights": numbers | weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors", "format": f"{kind}-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": group | {"output_activations": None}}, "kv_cache_scheme": None,
    }  # fmt: skip


def quantization_config(method: str, scheme: Scheme) -> dict[str, Any]:
    size = scheme.group_size or -1
    if method == "gptq":
        return {
            "quant_method": "gptq",
            "bits": scheme.bits,
            "group_size": size,
            "desc_act": scheme.ordered,
            "sym": scheme.symmetric,
        }
    if method == "awq":
        return {"quant_method": "awq", "bits": scheme.bits, "group_size": size, "zero_point": True, "version": "gemm"}
    weights = {
        "num_bits": scheme.bits, "type": "int", "symmetric": scheme.symmetric, "dynamic": False,
        "actorder": "group" if scheme.ordered else None,
        "strategy": "group" if scheme.group_size else "channel", "group_size": scheme.group_size,
    }  # fmt: skip
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "kv_cache_scheme": None,
    }  # fmt: skip


def _stored(
    base: str,
    method: str,
    scheme: Scheme,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor,
    groups: Tensor,
    changes: dict[str, Any],
) -> dict[str, Tensor]:
    bits, (outputs, inputs) = scheme.bits, codes.shape
    if method == "compressed-tensors":
        tensors = {"weight_packed": pack_words(codes, bits), "weight_scale": scales}
        tensors["weight_shape"] = torch.tensor([outputs, inputs])
        if scheme.ordered:
            tensors["weight_g_idx"] = groups
        if not scheme.symmetric:
            tensors["weight_zero_point"] = pack_words(zeros.t(), bits).t()
    elif method == "awq":
        tensors = {
            "qweight": pack_words(codes.t(), bits, _AWQ_ORDER),
            "qzeros": pack_words(zeros.t(), bits, _AWQ_ORDER),
            "scales": scales.t(),
        }
    else:
        ones = torch.ones(1, 32 // bits) if changes.get("checkpoint_format") != "gptq_v2" else torch.zeros(1, 1)
        tensors = {
            "qweight": pack_words(codes, bits).t(),
            "qzeros": pack_words(zeros.t(), bits) - pack_words(ones, bits),
            "scales": scales.t(),
            "g_idx": groups,
        }
    return {base + name: tensor for name, tensor in tensors.items()}
