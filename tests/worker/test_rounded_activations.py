"""Models whose codes are multiplied with activations of 8 bits: by option, and by what a checkpoint says."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers_gguf import directory_of, write_gguf
from tests.helpers_models import VOCAB_SIZE, make_checkpoint
from tests.helpers_paged import generate, make_prompts
from tests.helpers_quantized import bytes_config, quantization_config, quantize_checkpoint, store_bytes, store_mxfp4
from tests.worker.test_cpu_build import needs_compiler
from tests.worker.test_gguf_models import K
from tests.worker.test_quantized_models import error, load_native, load_torch, logits
from worker_proc.choices import how_held
from worker_proc.cpu.decoder import CpuDecoder
from worker_proc.cpu.features import Level, cpu_features
from worker_proc.cpu.library import load_library
from worker_proc.cpu.linear import Format
from worker_proc.errors import ModelError
from worker_proc.models.describe import describe, read_config
from worker_proc.quantization.scheme import W8A8, Scheme, load_time_scheme
from worker_proc.quantization.stored_config import parse_stored
from worker_proc.weights import SINGLE_FILE

pytestmark = needs_compiler
LEVELS = cpu_features().levels()
ACTIVATIONS = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
PROMPTS = make_prompts(VOCAB_SIZE)
ROUNDED = {
    Format.INT4: Format.INT4_SEGMENTS,
    Format.INT8: Format.INT8_SEGMENTS,
    Format.INT8_CHANNEL: Format.INT8_BOTH,
}


def check_rounds(rounded: CpuDecoder, plain: CpuDecoder, level: Level) -> None:
    """The same weights; activations are rounded where the kernels know how to make use of it."""
    held, want = rounded.weights.layers[0].o, plain.weights.layers[0].o
    known = ROUNDED[Format(want.struct.format)]
    rounds = load_library(level).knows(known)
    assert held.struct.format == (known if rounds else want.struct.format)
    every = torch.arange(held.outputs)
    assert torch.equal(held.unpack(every), want.unpack(every))
    difference = error(logits(rounded), logits(plain))
    assert 1e-3 < difference < 0.05 if rounds else difference == 0


@pytest.mark.parametrize("level", LEVELS)
def test_activations_of_the_head_have_8_bits_where_those_in_groups_are_known(level: Level, tmp_path: Path) -> None:
    native = load_native(make_checkpoint("llama", tmp_path), load_time_scheme("w4a8", None), level)
    known = load_library(level).knows(Format.INT8_SEGMENTS)
    assert native.weights.head.struct.format == (Format.INT8_SEGMENTS if known else Format.INT8_CHANNEL)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("method", "scheme"),
    [
        ("gptq", Scheme(4, 32)),
        ("gptq", Scheme(4, 64, symmetric=False, ordered=True)),
        ("awq", Scheme(4, 64, symmetric=False)),
        ("compressed-tensors", Scheme(4, 128)),
        ("compressed-tensors", Scheme(4)),
        ("gptq", Scheme(8, 32)),
        ("compressed-tensors", Scheme(8)),
    ],
    ids=str,
)
def test_stored_codes_are_multiplied_with_rounded_rows_on_demand(
    method: str, scheme: Scheme, level: Level, tmp_path: Path
) -> None:
    source = make_checkpoint("llama-gqa-untied", tmp_path / "source", intermediate_size=128)
    codes, _ = quantize_checkpoint(source, tmp_path, method, scheme)
    name = f"w{scheme.bits}a8"
    option = load_time_scheme(name, None)
    check_rounds(load_native(codes, option, level), load_native(codes, None, level), level)
    assert option is not None and how_held(describe(codes), option) == f"{method}, {name}"


@pytest.mark.parametrize(("kind", "option"), [("Q4_0", "w4a8"), ("Q4_K", "w4a8"), ("Q8_0", "w8a8"), ("Q6_K", "w4a8")])
@pytest.mark.parametrize("level", LEVELS)
def test_so_are_those_of_a_gguf_file(kind: str, option: str, level: Level, tmp_path: Path) -> None:
    """Zeros of Q4_K are no whole numbers. Files of one name have matrices of both widths, so either option will do."""
    source = make_checkpoint("llama", tmp_path / "source", **K)
    directory = directory_of(write_gguf(source, tmp_path / "m.gguf", lambda _: kind, plain=tmp_path / "plain"))
    rounded = load_native(directory, load_time_scheme(option, None), level)
    check_rounds(rounded, load_native(directory, None, level), level)
    together = generate(rounded, PROMPTS, 16, page_size=16)
    assert generate(rounded, PROMPTS, 16, page_size=8, chunk=9) == together


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("layout", ["pack-quantized", "int-quantized"])
def test_a_checkpoint_says_that_activations_have_8_bits(layout: str, bits: int, tmp_path: Path) -> None:
    """As llm-compressor writes W4A8: a byte for each code, or eight in a word."""
    source = make_checkpoint("llama-gqa-untied", tmp_path / "source", intermediate_size=128)
    scheme = Scheme(bits, 32)
    if layout == "pack-quantized":
        config = quantization_config("compressed-tensors", scheme)
        config["config_groups"]["group_0"]["input_activations"] = ACTIVATIONS
        codes, plain = quantize_checkpoint(source, tmp_path, "compressed-tensors", scheme, **config)
    else:
        config = bytes_config("int", strategy="group", group_size=32, num_bits=bits)
        codes, plain = store_bytes(source, tmp_path, config, (1, 32), "weight_scale")
    stored = parse_stored(read_config(codes))
    assert stored is not None and stored.scheme == replace(scheme, dynamic=True)
    got, want = load_native(codes, None), logits(load_native(plain, None))
    otherwise = Format.INT4 if bits == 4 else Format.INT8
    known = load_library(LEVELS[0]).knows(ROUNDED[otherwise])
    assert got.weights.layers[0].o.struct.format == (ROUNDED[otherwise] if known else otherwise)
    assert error(logits(got), want) < 0.05
    assert error(logits(load_torch(codes, None)), logits(load_torch(plain, None))) < 0.012


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["gpt-oss", "llama-gqa-untied"])
def test_codes_of_mxfp4_are_multiplied_with_rounded_rows_on_demand(kind: str, level: Level, tmp_path: Path) -> None:
    """Experts of a gpt-oss, and all of what compressed-tensors has in that format."""
    more = {"num_experts_per_tok": 5} if kind == "gpt-oss" else {}  # all of them
    codes, _ = store_mxfp4(make_checkpoint(kind, tmp_path / "source", **more), tmp_path)
    option = load_time_scheme("w4a8", None)
    native, other = load_native(codes, option, level), load_native(codes, None, level)
    known = load_library(level).knows(Format.FLOAT4_SEGMENTS)
    (layer, *_), (plain, *_) = native.weights.layers, other.weights.layers
    held = (layer.experts[1].down, plain.experts[1].down) if kind == "gpt-oss" else (layer.down, plain.down)
    formats = [matrix.struct.format for matrix in held]
    assert formats == [Format.FLOAT4_SEGMENTS if known else Format.FLOAT4, Format.FLOAT4]
    every = torch.arange(held[0].outputs)
    assert torch.equal(*(matrix.unpack(every) for matrix in held))
    rest = Scheme(4, 128) if kind == "gpt-oss" else None  # of what is stored plain
    assert error(logits(native), logits(load_torch(codes, rest))) < 0.05


def test_codes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    source = make_checkpoint("llama-gqa-untied", tmp_path / "source", intermediate_size=128)
    config = bytes_config("int", strategy="group", group_size=32, num_bits=4)
    codes, _ = store_bytes(source, tmp_path, config, (1, 32), "weight_scale")
    weights = load_file(codes / SINGLE_FILE)
    weights["model.layers.0.mlp.up_proj.weight"][3, 5] = 8
    save_file(weights, codes / SINGLE_FILE)
    with pytest.raises(ModelError, match=r"mlp.up_proj.weight = 'a code': does not fit into 4 bits"):
        load_native(codes, None)


def test_what_does_not_go_together_is_refused_by_name(tmp_path: Path) -> None:
    source = make_checkpoint("llama-gqa-untied", tmp_path / "source", intermediate_size=128)
    option = load_time_scheme("w4a8", None)
    with pytest.raises(ModelError, match=r"'w4a8': activations are rounded by the native CPU kernels.*: take int4"):
        load_torch(source, option)
    for method, scheme in (("gptq", Scheme(8, 32)), ("compressed-tensors", Scheme(4, 32))):
        (tmp_path / method).mkdir()
        codes, _ = quantize_checkpoint(source, tmp_path / method, method, scheme)
        other = option if scheme.bits == 8 else W8A8
        with pytest.raises(ModelError, match=f"quantization = '{method}': the checkpoint is quantized already"):
            load_native(codes, other)
    settings = json.loads((codes / "config.json").read_text())
    group = settings["quantization_config"]["config_groups"]["group_0"]
    group["input_activations"] = ACTIVATIONS | {"dynamic": False}
    with pytest.raises(ModelError, match=r"input_activations = .*: only int8 per token is supported"):
        parse_stored(settings)
