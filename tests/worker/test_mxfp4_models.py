"""MXFP4: gpt-oss as it is published, and compressed-tensors, against what their codes stand for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers_models import VOCAB_SIZE, make_checkpoint
from tests.helpers_paged import generate, make_prompts
from tests.helpers_quantized import mxfp4_config, store_mxfp4
from tests.worker.test_cpu_build import needs_compiler
from tests.worker.test_quantized_models import (
    INT4,
    INT8,
    LEVELS,
    check_refused,
    check_same_model,
    error,
    load_native,
    load_torch,
    logits,
    shard_weights,
)
from tests.worker.test_stored_config import check_field
from worker_proc.cpu.features import Level
from worker_proc.cpu.linear import Format
from worker_proc.models.describe import describe
from worker_proc.quantization.scheme import FP8, Scheme
from worker_proc.weights import SINGLE_FILE

pytestmark = needs_compiler
GPT_OSS = {"num_experts_per_tok": 5}  # all of them


@pytest.mark.parametrize(("kind", "overrides"), [("llama-gqa-untied", {}), ("gpt-oss", GPT_OSS)])
def test_stored_fp4_is_what_it_stands_for(kind: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    source = make_checkpoint(kind, tmp_path / "source", **overrides)
    codes, plain = store_mxfp4(source, tmp_path)
    method = "mxfp4" if kind == "gpt-oss" else "compressed-tensors"
    assert describe(codes).quantization == method and describe(codes).dtype == "bfloat16"
    check_same_model(codes, plain)
    assert error(logits(load_torch(codes, None)), logits(load_torch(plain, None))) < 0.012


@pytest.mark.parametrize("level", LEVELS)
def test_experts_in_fp4_are_those_of_torch(level: Level, tmp_path: Path) -> None:
    codes, _ = store_mxfp4(make_checkpoint("gpt-oss", tmp_path / "source", **GPT_OSS), tmp_path)
    native = load_native(codes, None, level)
    assert native.weights.layers[0].experts[1].down.struct.format == Format.FLOAT4
    assert error(logits(native), logits(load_torch(codes, None))) < 0.03
    prompts = make_prompts(VOCAB_SIZE)
    together = generate(native, prompts, 16, page_size=16)
    assert generate(native, prompts, 16, page_size=8, chunk=9) == together


@pytest.mark.parametrize("scheme", [INT8, INT4, FP8], ids=str)
def test_the_rest_of_a_gpt_oss_may_become_codes(scheme: Scheme, tmp_path: Path) -> None:
    """Attention and head; experts stay as they are stored, and routers and embeddings plain."""
    codes, _ = store_mxfp4(make_checkpoint("gpt-oss", tmp_path / "source", **GPT_OSS), tmp_path)
    native, plain = load_native(codes, scheme), load_native(codes, None)
    layer, other = native.weights.layers[0], plain.weights.layers[0]
    assert torch.equal(layer.experts[2].up.memory, other.experts[2].up.memory)
    assert layer.router is not None and layer.router.struct.format == Format.BFLOAT16
    formats = {Format(matrix.struct.format) for matrix in (layer.qkv, layer.o, native.weights.head)}
    assert formats <= {Format.INT8_CHANNEL, Format.INT4, Format.FLOAT8_CHANNEL}
    assert error(logits(native), logits(load_torch(codes, scheme))) < 0.03
    assert error(logits(native), logits(plain)) > 1e-3, "nothing was quantized"


def test_stored_fp4_is_checked(tmp_path: Path) -> None:
    codes, _ = store_mxfp4(make_checkpoint("gpt-oss", tmp_path / "source"), tmp_path)
    weights, base = load_file(codes / SINGLE_FILE), "model.layers.1.mlp.experts.down_proj"
    broken = weights[base + "_scales"].clone()
    broken[4, 7, 1] = 255
    for change, message in (
        ({base + "_scales": broken}, "down_proj = 'NaN': a scale is not a number"),
        ({base + "_scales": broken[:, :-1].contiguous()}, r"down_proj_scales = \[5, 63, 3\]: .*\[5, 64, 3\]"),
        ({base + "_blocks": weights[base + "_blocks"].int()}, r"down_proj_blocks = 'I32': .*U8"),
        ({base + "_bias": weights[base + "_bias"][:4].contiguous()}, r"down_proj_bias = \[4, 64\]: .*\[5, 64\]"),
        ({base + "_extra": torch.zeros(3)}, r"down_proj_extra = \[3\]: unexpected tensor"),
    ):
        check_refused(codes, weights | change, message)
    del weights[base + "_scales"]
    check_refused(codes, weights, r"down_proj_scales = None: the checkpoint lacks")


def test_fp4_needs_whole_groups(tmp_path: Path) -> None:
    config = json.loads((make_checkpoint("gpt-oss", tmp_path, intermediate_size=80) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    weights = load_file(tmp_path / SINGLE_FILE)
    weights["model.layers.0.mlp.experts.down_proj_blocks"] = torch.zeros(5, 64, 2, 16, dtype=torch.uint8)
    check_refused(tmp_path, weights, r"down_proj = \[64, 80\]: MXFP4 needs inputs in whole groups of 32")


def test_shards_of_fp4_are_those_of_the_whole(tmp_path: Path) -> None:
    """Channels of gates and ups, which lie by turns, and of down projections."""
    source = make_checkpoint("gpt-oss", tmp_path / "source", intermediate_size=128)
    codes, _ = store_mxfp4(source, tmp_path)
    whole = shard_weights(codes, 0, 1, None)
    ranks = [shard_weights(codes, rank, 2, None) for rank in range(2)]
    for layer, (_, _, _, _, *experts) in enumerate(whole):
        for index, matrix in enumerate(experts):
            first, second = (rank[layer][4 + index] for rank in ranks)
            # gates and ups are packed by 16
            assert torch.equal(torch.cat((first, second), dim=index % 2), matrix)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_bits": 8}, "num_bits"),
        ({"type": "int"}, "type"),
        ({"group_size": 16}, "group_size"),
        ({"strategy": "tensor_group"}, "strategy"),
        ({"scale_dtype": "torch.float8_e4m3fn"}, "scale_dtype"),
        ({"symmetric": False}, "symmetric"),
    ],
)
def test_other_fp4_is_refused_by_name(change: dict[str, Any], field: str, tmp_path: Path) -> None:
    stored = mxfp4_config()
    stored["config_groups"]["group_0"]["weights"] |= change
    check_field(tmp_path, stored, field)
