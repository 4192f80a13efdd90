"""Writes the projections of a plain checkpoint in codes, as compressed-tensors stores them, to compare systems.

    python -m bench.quantized_checkpoint SOURCE DIRECTORY --kind w8a8   # int8 per output, activations dynamic per token
    python -m bench.quantized_checkpoint SOURCE DIRECTORY --kind w4a16  # int4 in groups of 128

Codes are rounded to nearest with scales as they are stored, in bfloat16 and positive, as tools do without calibration
(`--quantization` here has scales in float32, which may be negative). Embedding and head stay as they are.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import click
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

GROUP = 128


def quantize(weight: Tensor, kind: str) -> dict[str, Tensor]:
    """Codes and scales of a weight `[outputs, inputs]`, by the names that compressed-tensors gives them."""
    outputs, inputs = weight.shape
    if kind == "w8a8":
        scales = (weight.float().abs().amax(1, keepdim=True) / 127).clamp(min=1e-10).to(torch.bfloat16)
        codes = (weight.float() / scales.float()).round().clamp(-127, 127).to(torch.int8)
        return {"weight": codes, "weight_scale": scales}
    groups = weight.float().view(outputs, -1, GROUP)
    scales = (groups.abs().amax(2) / 7.5).clamp(min=1e-10).to(torch.bfloat16)
    numbers = (groups / scales.float().unsqueeze(2)).round().clamp(-8, 7).to(torch.int32).view(outputs, -1, 8) + 8
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    packed = (numbers << shifts).sum(2, dtype=torch.int64)
    words = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
    return {"weight_packed": words, "weight_scale": scales, "weight_shape": torch.tensor([outputs, inputs])}


def config(kind: str) -> dict[str, Any]:
    whole = kind == "w8a8"
    weights = {
        "num_bits": 8 if whole else 4, "type": "int", "symmetric": True, "dynamic": False, "actorder": None,
        "strategy": "channel" if whole else "group", "group_size": None if whole else GROUP,
    }  # fmt: skip
    activations = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations if whole else None}
    return {
        "quant_method": "compressed-tensors", "format": "int-quantized" if whole else "pack-quantized",
        "quantization_status": "compressed", "ignore": ["lm_head"], "kv_cache_scheme": None,
        "config_groups": {"group_0": group | {"output_activations": None}},
    }  # fmt: skip


@click.command(context_settings={"show_default": True})
@click.argument("source", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("directory", type=click.Path(path_type=Path, exists=False))
@click.option("--kind", type=click.Choice(["w8a8", "w4a16"]), default="w8a8")
def main(source: Path, directory: Path, kind: str) -> None:
    """Write DIRECTORY, the checkpoint in SOURCE with its projections in codes."""
    shutil.copytree(source, directory, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors: dict[str, Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118  (it is no dict)
                tensor = stored.get_tensor(name)
                if name.endswith("_proj.weight"):
                    base = name.removesuffix("weight")
                    tensors |= {base + key: value.contiguous() for key, value in quantize(tensor, kind).items()}
                else:
                    tensors[name] = tensor
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    whole = json.loads((source / "config.json").read_text()) | {"quantization_config": config(kind)}
    (directory / "config.json").write_text(json.dumps(whole, indent=1))


if __name__ == "__main__":
    main()
