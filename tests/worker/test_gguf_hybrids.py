"""Qwen 3.5 and Qwen3-Next in GGUF files, against the checkpoints that they were made of."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers_divided import check_native, reports_of
from tests.helpers_gguf import directory_of
from tests.helpers_gguf_hybrid import write_hybrid_gguf
from tests.helpers_models import VOCAB_SIZE
from tests.helpers_paged import generate, make_prompts
from tests.worker.test_cpu_build import needs_compiler
from tests.worker.test_hybrid_decoder import (
    CALM,
    LEVELS,
    all_logits,
    error,
    load,
    load_native,
    make,
    matrices,
    round_weights,
)
from tests.worker.test_hybrid_serving import COUNT, WAVES, check_serving
from worker_proc.cpu.features import Level
from worker_proc.cpu.linear import Format
from worker_proc.errors import ModelError
from worker_proc.gguf.directory import GgufError, directory_for
from worker_proc.gguf.names import GgufModel
from worker_proc.models.describe import describe, read_config
from worker_proc.models.hybrid_families import hybrid_spec
from worker_proc.models.registry import has_recurrent_layers

pytestmark = needs_compiler
PROMPTS = make_prompts(VOCAB_SIZE)
SQUARE = {"linear_value_head_dim": 16}  # as many numbers of a value head as of a key head
SIX = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, **SQUARE}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "as many": ("plain", {"linear_num_value_heads": 2, **SQUARE}),
    "in turns": ("plain", SIX),
    "odd": ("odd", SQUARE),
    "mixture": ("mixture", SIX),
    "next": ("next", SQUARE),
    "attention at both ends": (
        "attention-at-both-ends",
        SQUARE | {"attention_bias": False, "linear_num_value_heads": 8},
    ),
}
K = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256, "linear_value_head_dim": 32}
K |= {"shared_expert_intermediate_size": 256, "linear_key_head_dim": 32, "linear_num_value_heads": 8, "head_dim": 64}


def plain_file(case: str, path: Path, **changes: Any) -> tuple[Path, Path]:
    """A checkpoint of one of `CASES`, and the directory of its file in float32."""
    shape, fields = CASES[case]
    source = round_weights(make(shape, path / "source", **(CALM | fields | changes)))
    return source, directory_of(write_hybrid_gguf(source, path / "m.gguf", lambda name: "F32"))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("case", CASES)
def test_a_plain_file_is_the_model_that_it_was_made_of(case: str, level: Level, tmp_path: Path) -> None:
    source, directory = plain_file(case, tmp_path)
    of_file, of_source = (hybrid_spec(read_config(path)) for path in (directory, source))
    assert of_file is not None and of_source is not None and of_file.delta is not None
    tiled = case in ("in turns", "mixture", "attention at both ends", "odd")
    assert of_file.delta.tiled == tiled and describe(directory).dtype == "bfloat16"
    reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    native, other = load_native(directory, level), load_native(source, level)
    assert native.kv_spec == other.kv_spec
    for prompt in PROMPTS:
        with torch.inference_mode():
            want = reference(torch.tensor([prompt])).logits[0]
        assert error(all_logits(native, prompt), want) < 0.04
        assert error(all_logits(native, prompt), all_logits(other, prompt)) < 0.03


def mostly_k(name: str) -> str:
    """As llama.cpp's Q4_K_M: some in 6 bits, so that those of a layer that are one matrix here are not alike."""
    return "Q6_K" if re.search(r"attn_v|attn_qkv|ffn_down|token_embd|^output\.", name) else "Q4_K"


# how a file's matrices are held: those of q, k, v and z, and of b and a
FILES: dict[str, tuple[Any, Format, Format]] = {
    "Q8_0": (lambda name: "Q8_0", Format.INT8, Format.INT8),
    "Q4_0": (lambda name: "F32" if re.search(r"ssm_(alpha|beta|ba)", name) else "Q4_0", Format.INT4, Format.BFLOAT16),
    "Q4_K_M": (mostly_k, Format.INT8, Format.INT4),
}


@pytest.mark.parametrize("shape", ["plain", "mixture", "next"])
@pytest.mark.parametrize("name", FILES)
def test_codes_are_what_they_stand_for(name: str, shape: str, tmp_path: Path) -> None:
    of_kind, of_projections, of_gates = FILES[name]
    source = make(shape, tmp_path / "source", **(CALM | K))
    files = tmp_path / "codes.gguf", tmp_path / "numbers.gguf"
    write_hybrid_gguf(source, files[0], lambda name: "F32" if "ffn_gate_inp" in name else of_kind(name), plain=files[1])
    codes, numbers = (directory_of(file) for file in files)
    assert describe(codes).quantization == "gguf" and describe(codes).dtype == "bfloat16"
    read: list[tuple[int, int]] = []
    native, want = load_native(codes, progress=lambda done, total: read.append((done, total))), load_native(numbers)
    assert read[-1][0] == read[-1][1]
    layer = native.weights.layers[0]
    assert layer.delta is not None
    assert (layer.qkv.struct.format, layer.delta.gates.struct.format) == (of_projections, of_gates)
    # 6 bits become 8, for 128 numbers each; the others are kept but for their rounding to bfloat16 here
    most = 0.012 if name == "Q4_K_M" else 0.003
    for one, other in zip(native.weights.layers, want.weights.layers, strict=True):
        for got, meant in zip(matrices(one), matrices(other), strict=True):
            assert error(*(matrix.unpack(torch.arange(matrix.outputs)) for matrix in (got, meant))) < most
    assert error(all_logits(native, PROMPTS[4]), all_logits(want, PROMPTS[4])) < 0.15


def test_a_scheduler_gets_the_tokens_of_each_request_alone(tmp_path: Path) -> None:
    _, directory = plain_file("in turns", tmp_path)
    model = load_native(directory)
    check_serving(model, [[generate(model, [prompt], COUNT)[0] for prompt in wave] for wave in WAVES])


def test_ranks_compute_what_one_computes(tmp_path: Path) -> None:
    """Where value heads go with key heads by turns, each rank has all key heads."""
    paths = {
        case: plain_file(case, tmp_path / case, num_key_value_heads=2)[1] for case in ("in turns", "mixture", "next")
    }
    for case, (path, reports) in reports_of(2, tmp_path, paths).items():
        one = check_native(path, reports)
        for report in reports:
            assert one.kv_spec.bytes_per_state * 0.4 < report["state_bytes"] < one.kv_spec.bytes_per_state * 0.8, case


def test_what_guesses_further_tokens_is_not_read(tmp_path: Path) -> None:
    source = make("plain", tmp_path / "source", **SIX)
    files = [
        write_hybrid_gguf(source, tmp_path / f"{guesses}.gguf", lambda name: "BF16", guesses=guesses)
        for guesses in (False, True)
    ]
    assert b"blk.4.nextn" in files[1].read_bytes()
    without, with_guesses = (directory_of(file) for file in files)
    assert read_config(without) == read_config(with_guesses)
    first, second = (all_logits(load_native(path), PROMPTS[1]) for path in (without, with_guesses))
    assert torch.equal(first, second)


def test_every_fourth_layer_attends_unless_the_file_says_which(tmp_path: Path) -> None:
    source = make("plain", tmp_path / "source", **SQUARE)
    for recurrent, kinds in ((None, "RRRF"), ([True, True, False, False], "RRFF")):
        settings = {"attention.recurrent_layers": recurrent}
        file = write_hybrid_gguf(source, tmp_path / f"{kinds}.gguf", lambda name: "F32", **settings)
        found = read_config(directory_of(file))["layer_types"]
        assert found == [{"R": "linear_attention", "F": "full_attention"}[kind] for kind in kinds]


@pytest.mark.parametrize("settings", [{"dtype": torch.float32}, {"level": None}], ids=str)
def test_elsewhere_it_is_refused_by_name(settings: dict[str, Any], tmp_path: Path) -> None:
    _, directory = plain_file("as many", tmp_path)
    assert has_recurrent_layers(directory)
    with pytest.raises(ModelError, match=r"GGUF files of qwen3_5_text are read for the native CPU kernels in bfloat16"):
        load(directory, **settings)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("plain", {"ssm.inner_size": 100}, "qwen35.ssm.inner_size = 100: not supported"),
        ("plain", {"ssm.group_count": None}, "qwen35.ssm.group_count = None: must be a whole number"),
        (
            "plain",
            {"attention.recurrent_layers": [True]},
            "attention.recurrent_layers = [True]: must say so for each layer",
        ),
        ("plain", {"nextn_predict_layers": 4}, "qwen35.nextn_predict_layers = 4: must be fewer than the layers"),
        ("plain", {"rope.dimension_count": 0}, "qwen35.rope.dimension_count = 0: must be a whole number"),
        ("plain", {"attention.scale": 0.5}, "qwen35.attention.scale = 0.5: an unknown setting"),
        ("mixture", {"expert_gating_func": 2}, "qwen35moe.expert_gating_func = 2: not supported"),
        ("mixture", {"expert_shared_count": 2}, "qwen35moe.expert_shared_count = 2: not supported"),
        ("next", {"expert_shared_feed_forward_length": None}, "expert_shared_feed_forward_length = None: must be"),
    ],
)
def test_a_setting_that_would_change_the_numbers_is_named(
    kind: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    source = make(kind, tmp_path / "source", **SQUARE)
    file = write_hybrid_gguf(source, tmp_path / "m.gguf", lambda name: "F32", **settings)
    with pytest.raises(GgufError, match=re.escape(message)):
        directory_for(file, tmp_path / "cache")


def test_a_rate_that_is_none_is_named(tmp_path: Path) -> None:
    source = make("plain", tmp_path / "source", **SQUARE)
    file = write_hybrid_gguf(source, tmp_path / "m.gguf", lambda name: "F32")
    (tensor,) = (found for found in GgufModel.open([file]).header.tensors if found.name == "blk.0.ssm_a")
    with file.open("r+b") as writable:
        writable.seek(tensor.begin)
        writable.write(torch.tensor([1.0]).numpy().tobytes())
    with pytest.raises(
        ModelError, match=r"layers.0.linear_attn.A_log = 'a number above 0': in model.gguf these are negative"
    ):
        load(directory_of(file))
