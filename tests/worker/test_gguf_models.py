"""Models in GGUF files, against checkpoints of what the files stand for."""

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from tests.helpers_gguf import directory_of, write_gguf
from tests.helpers_models import VOCAB_SIZE, greedy, make_checkpoint
from tests.helpers_paged import NEW_TOKENS, generate, make_prompts
from tests.worker.test_cpu_build import needs_compiler
from tests.worker.test_quantized_models import LEVELS, error, load_native, load_torch, logits, shard_weights
from worker_proc.checkpoint import open_checkpoint
from worker_proc.cpu.features import Level
from worker_proc.cpu.library import load_library
from worker_proc.cpu.linear import Format
from worker_proc.errors import ModelError
from worker_proc.gguf.config import config_of
from worker_proc.gguf.directory import GgufError, directory_for
from worker_proc.gguf.header import Header, StoredTensor
from worker_proc.gguf.names import GgufModel
from worker_proc.models.describe import describe, read_config
from worker_proc.models.families import parse_spec
from worker_proc.models.loading import Part, WeightLoader
from worker_proc.quantization.rows import QuantizedWeight
from worker_proc.quantization.scheme import ScaleForm, load_time_scheme
from worker_proc.quantization.source import WeightSource
from worker_proc.quantization.stored_config import parse_stored
from worker_proc.quantization.target import WeightTarget

pytestmark = needs_compiler
K = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "initializer_range": 0.05}  # rows of whole blocks
GEMMA3 = {
    "num_hidden_layers": 6, "sliding_window_pattern": 6, "query_pre_attn_scalar": 32, "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}  # fmt: skip
LONGROPE = {
    "head_dim": 16, "partial_rotary_factor": 0.5, "max_position_embeddings": 512, "sliding_window": None,
    "original_max_position_embeddings": 128, "rope_parameters": {
        "rope_type": "longrope", "short_factor": [1.0, 1.25, 1.5, 2.0], "long_factor": [4.0, 5.0, 6.0, 7.0],
        "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "original_max_position_embeddings": 128,
    },
}  # fmt: skip
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
SMOLLM3 = {"num_hidden_layers": 4, "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0]}
KINDS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {}, {}),
    ("llama-gqa-untied", {}, {}),
    ("llama-bias", {}, {}),
    ("llama-rope-linear", {}, {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}),
    ("qwen2", {}, {}),
    ("qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}, YARN),
    ("qwen3-moe", {"num_experts_per_tok": 7, "norm_topk_prob": True}, {}),
    ("mixtral", {"num_experts_per_tok": 4}, {}),
    ("phi3", {}, {}),
    ("phi3", LONGROPE, {}),
    ("gemma", {"tie_word_embeddings": True}, {}),
    ("granite", {}, {}),
    ("smollm3", SMOLLM3, {}),
    ("gpt-oss", {"num_experts_per_tok": 5}, {}),
    ("gemma2", {"tie_word_embeddings": True}, {"attention.sliding_window_pattern": 2}),
    ("gemma3", GEMMA3, {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
]


def made(kind: str, tmp_path: Path, kinds: Any, settings: dict[str, Any], **overrides: Any) -> tuple[Path, Path]:
    """The directory of a GGUF file, and a checkpoint of what it stands for."""
    source = make_checkpoint(kind, tmp_path / "source", **overrides)
    file = write_gguf(source, tmp_path / "m.gguf", kinds, plain=tmp_path / "plain", **settings)
    return directory_of(file), tmp_path / "plain"


@pytest.mark.parametrize(("kind", "overrides", "settings"), KINDS, ids=[kind for kind, _, _ in KINDS])
def test_a_plain_file_is_the_model_that_it_was_made_of(
    kind: str, overrides: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    directory, plain = made(kind, tmp_path, lambda name: "BF16", settings, **overrides)
    assert parse_spec(read_config(directory)) == parse_spec(read_config(plain))
    assert describe(directory).dtype == "bfloat16" and describe(directory).quantization is None
    assert torch.equal(logits(load_torch(directory, None)), logits(load_torch(plain, None)))
    assert torch.equal(logits(load_native(directory, None)), logits(load_native(plain, None)))


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("mixtral", {}), ("phi3", {}), ("phi3", LONGROPE), ("gemma", {"tie_word_embeddings": True}), ("granite", {}),
        ("smollm3", SMOLLM3), ("gpt-oss", {}),
    ],
)  # fmt: skip
def test_greedy_tokens_are_those_of_transformers(kind: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    source = make_checkpoint(kind, tmp_path / "source", **overrides)
    model = load_torch(directory_of(write_gguf(source, tmp_path / "m.gguf", lambda name: "F32")), None)
    prompts = make_prompts(VOCAB_SIZE)
    assert generate(model, prompts, NEW_TOKENS, page_size=8, chunk=9) == greedy(source, prompts, NEW_TOKENS)


def test_experts_may_have_tensors_of_their_own(tmp_path: Path) -> None:
    """As in the first files of Mixtral."""
    source = make_checkpoint("mixtral", tmp_path / "source", **K)
    files = [
        write_gguf(source, tmp_path / f"{merges}.gguf", lambda name: "Q4_0", merges_experts=merges)
        for merges in (True, False)
    ]
    assert b"blk.1.ffn_up.3.weight" in files[1].read_bytes()
    merged, split = (load_native(directory_of(file), None) for file in files)
    assert torch.equal(logits(split), logits(merged))


def mostly_k(name: str) -> str:
    """As llama.cpp's Q4_K_M: values and some others in 6 bits, so that q, k and v are not alike."""
    return "Q6_K" if re.search(r"attn_v|ffn_down|token_embd|^output\.", name) else "Q4_K"


FILES = {
    "Q8_0": (lambda name: "Q8_0", Format.INT8, Format.INT8),
    "Q4_0": (lambda name: "Q4_0", Format.INT4, Format.INT4),
    "Q4_1": (lambda name: "Q8_0" if name == "token_embd.weight" else "Q4_1", Format.INT4, Format.INT8),
    "Q4_K_M": (mostly_k, Format.INT8, Format.INT8),
    "Q4_K": (lambda name: "Q6_K" if "embd" in name else "Q4_K", Format.INT4, Format.INT8),
    "Q5_K": (lambda name: "Q5_K", Format.INT8, Format.INT8),
    "MXFP4": (lambda name: "MXFP4" if "blk" in name else "Q8_0", Format.FLOAT4, Format.INT8),
    "mixed": (lambda name: "Q4_0" if "attn_q." in name else "Q4_K", Format.INT4, Format.INT4),
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("llama", name) for name in FILES),
        ("qwen3-moe", "Q4_K_M"),
        ("mixtral", "Q4_0"),
        ("phi3", "Q4_K"),
        ("gpt-oss", "MXFP4"),
    ],
)
def test_codes_are_what_they_stand_for(kind: str, name: str, tmp_path: Path) -> None:
    of_kind, of_qkv, of_head = FILES[name]
    more = {"num_experts_per_tok": 7, "norm_topk_prob": True, "moe_intermediate_size": 256} if "moe" in kind else {}
    more |= {"num_experts_per_tok": {"mixtral": 4, "gpt-oss": 5}[kind]} if kind in ("mixtral", "gpt-oss") else {}
    directory, plain = made(kind, tmp_path, of_kind, {}, **(K | more))
    assert describe(directory).quantization == "gguf" and describe(directory).dtype == "bfloat16"
    native = load_native(directory, None)
    assert native.weights.layers[0].qkv.struct.format == of_qkv
    assert native.weights.head.struct.format == of_head
    want = logits(load_torch(plain, None))
    # kept where codes have 4 bits or are those of Q8_0; others are rounded to a 127th of the largest of 128
    kept = name in ("Q4_0", "Q4_1", "Q8_0", "MXFP4", "mixed")
    assert error(logits(load_torch(directory, None)), want) < (1e-4 if kept else 0.02)
    assert error(logits(native), want) < 0.03


@pytest.mark.parametrize(
    ("kind", "at", "raw"),
    [
        ("Q4_0", 0, b"\x00\x7c"), ("Q4_K", 0, b"\x01\x7e"), ("Q4_K", 2, b"\x00\x7c"), ("MXFP4", 0, b"\xff"),
        ("Q8_0", 0, b"\x00\xfc"), ("Q6_K", 208, b"\x01\x7e"),
    ],
)  # fmt: skip
def test_a_scale_that_is_no_number_is_named(kind: str, at: int, raw: bytes, tmp_path: Path) -> None:
    source = make_checkpoint("llama", tmp_path / "source", **K)
    file = write_gguf(source, tmp_path / "m.gguf", lambda name: kind)
    (tensor,) = (found for found in GgufModel.open([file]).header.tensors if found.name == "blk.1.attn_output.weight")
    with file.open("r+b") as writable:
        writable.seek(tensor.begin + at)
        writable.write(raw)
    with pytest.raises(ModelError, match=r"layers.1.self_attn.o_proj.weight = 'infinity or NaN': a scale is not a"):
        load_torch(directory_of(file), None)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("name", "forms"),
    [
        ("Q4_0", [ScaleForm.FLOAT16, ScaleForm.FLOAT16]),
        ("Q8_0", [ScaleForm.FLOAT16, ScaleForm.FLOAT16]),
        ("Q4_K", [ScaleForm.FACTORS, ScaleForm.FACTORS]),
        ("mixed", [ScaleForm.FLOAT32, ScaleForm.FACTORS]),
    ],
)
def test_scales_are_held_as_they_are(name: str, forms: list[ScaleForm], level: Level, tmp_path: Path) -> None:
    """Where they multiply sums; elsewhere in float32, with zeros that are no whole numbers in two of the files."""
    directory, _ = made("qwen3", tmp_path, FILES[name][0], {}, **K)
    torchs = load_torch(directory, None)
    plain = load_native(directory, None, level)
    rounded = load_native(directory, load_time_scheme("w4a8", None), level)
    library = load_library(level)
    held = (Format.INT8, Format.INT8_SEGMENTS) if name == "Q8_0" else (Format.INT4, Format.INT4_SEGMENTS)
    keep = [library.scales_sums(held[0]), library.knows(held[1])]
    assert keep[0] == (level == "avx512bf16")
    for native, keeps in zip((plain, rounded), keep, strict=True):
        layer = native.weights.layers[0]
        assert [matrix.scheme.scale_form for matrix in (layer.qkv, layer.o)] == (forms if keeps else [0, 0])
        if not keeps:
            assert layer.o.zeros is None if name in ("Q4_0", "Q8_0") else bool((layer.o.zeros % 1 != 0).any())
        assert error(logits(native), logits(torchs)) < 0.05
        prompts = make_prompts(VOCAB_SIZE)
        together = generate(native, prompts, 16, page_size=16)
        assert generate(native, prompts, 16, page_size=8, chunk=9) == together


@pytest.mark.parametrize("kind", ["llama", "phi3"])
@pytest.mark.parametrize("name", ["BF16", "Q4_K", "Q6_K"])
def test_shards_are_those_of_the_whole(name: str, kind: str, tmp_path: Path) -> None:
    """Heads whose rows lie by turns, columns between blocks, and projections in one matrix."""
    directory, _ = made(kind, tmp_path, lambda _: name, {}, **K, num_key_value_heads=4)
    whole = shard_weights(directory, 0, 1, None)
    ranks = [shard_weights(directory, rank, 2, None) for rank in range(2)]
    for layer, (qkv, o, down, up) in enumerate(whole):
        heads = 4 * 64
        for first, last in ((0, heads), (heads, 2 * heads), (2 * heads, 3 * heads)):
            half = (last - first) // 2
            at = first // 2
            parts = torch.cat([rank[layer][0][at : at + half] for rank in ranks])
            assert torch.equal(parts, qkv[first:last])
        for place, matrix in ((1, o), (2, down)):
            assert torch.equal(torch.cat([rank[layer][place] for rank in ranks], dim=1), matrix)
        assert torch.equal(torch.cat([rank[layer][3] for rank in ranks]), up)


def test_a_rank_may_have_no_rows_of_a_matrix(tmp_path: Path) -> None:
    """Of the vocabulary, where it does not fill the last ranks."""
    directory, _ = made("llama", tmp_path, lambda _: "Q4_0", {}, **K)
    loader = WeightLoader(open_checkpoint(directory), torch.bfloat16, torch.device("cpu"))
    part = Part("model.embed_tokens.weight", (VOCAB_SIZE, 256), (VOCAB_SIZE, VOCAB_SIZE))
    source = WeightSource(loader, None, parse_stored(read_config(directory)))
    scheme = source.scheme((part,))
    assert scheme is not None and scheme.bits == 4
    empty = QuantizedWeight.empty(0, 256, scheme, torch.bfloat16, torch.device("cpu"))
    source.into(part, scheme, WeightTarget(empty, 0))
    loader.run()
    assert part.name in loader.used()


def test_a_file_with_its_tokenizer_is_a_model_directory(tmp_path: Path) -> None:
    source = make_checkpoint("qwen2", tmp_path / "source")
    file = write_gguf(source, tmp_path / "a model.gguf", lambda name: "Q8_0")
    directory = directory_for(file, tmp_path / "cache")
    assert (directory / "model.gguf").resolve() == file
    mine, theirs = (Tokenizer.from_file(str(path / "tokenizer.json")) for path in (directory, source))
    for text in ("the cat sat on the mat", "<|im_start|>user\nÄ 12  \n", "don't"):
        assert mine.encode(text).ids == theirs.encode(text).ids
        assert mine.decode(mine.encode(text).ids) == theirs.decode(theirs.encode(text).ids)
    template = "chat_template.jinja"
    assert (directory / template).read_text() == (source / template).read_text()
    # by its number in the file, and by its name
    assert read_config(directory)["eos_token_id"] == [mine.token_to_id("<|endoftext|>"), mine.token_to_id("<|im_end|>")]
    assert directory_for(file, tmp_path / "cache") == directory, "made once"
    file.touch()
    assert directory_for(file, tmp_path / "cache") != directory, "the file is another one"
    assert sorted(path.name.rsplit("-", 1)[0] for path in (tmp_path / "cache").iterdir()) == ["a model"] * 2


def test_what_cannot_be_served_is_named(tmp_path: Path) -> None:
    source = make_checkpoint("llama", tmp_path / "source")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"expert_count": 8}, r"llama.expert_used_count = None: must be a whole number"),
        ({"expert_used_count": 2}, r"llama.expert_used_count = 2: not supported"),
        ({"attention.sliding_window": 12}, r"llama.attention.sliding_window = 12: not supported"),
        ({"attention.clamp_kqv": 3.0}, r"llama.attention.clamp_kqv = 3.0: an unknown setting"),
        ({"rope.dimension_count": 8}, r"llama.rope.dimension_count = 8: not supported"),
        ({"attention.layer_norm_rms_epsilon": None}, r"layer_norm_rms_epsilon = None: must be a positive number"),
        ({"block_count": 0}, r"llama.block_count = 0: must be a whole number"),
        ({"rope.scaling.type": "longrope"}, r"llama.rope.scaling.type = 'longrope': only linear, and yarn"),
    ]
    for index, (settings, message) in enumerate(cases):
        file = write_gguf(source, tmp_path / f"{index}.gguf", lambda name: "F32", **settings)
        with pytest.raises(GgufError, match=message):
            directory_for(file, tmp_path / "cache")
    file = tmp_path / "m-00001-of-00002.gguf"
    write_gguf(source, file, lambda name: "F32")
    with pytest.raises(GgufError, match=r"m-00002-of-00002.gguf = .*: one of the 2 files of this model is missing"):
        directory_for(file, tmp_path / "cache")
    writer = gguf.GGUFWriter(tmp_path / "bert.gguf", "bert")
    writer.add_tensor("x", np.zeros((2, 2), np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    with pytest.raises(GgufError, match=r"general.architecture = 'bert': of GGUF files, only llama, .* are read"):
        directory_for(tmp_path / "bert.gguf", tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    source = make_checkpoint("qwen2", tmp_path / "source")  # whose norms of queries and keys belong to qwen3
    file = write_gguf(source, tmp_path / "m.gguf", lambda name: "F32")
    raw = file.read_bytes()
    file.write_bytes(raw.replace(b"blk.0.ffn_gate.weight", b"blk.0.ffn_gote.weight"))
    with pytest.raises(GgufError, match=r"blk.0.ffn_gote.weight = \[96, 64\]: unknown tensor in m.gguf"):
        directory_for(file, tmp_path / "cache")


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("granite", {"rope.scaling.finetuned": False}, "granite.rope.scaling.finetuned = False: not supported"),
        ("granite", {"logit_scale": None}, "granite.logit_scale = None: must be a positive number"),
        ("granite", {"attention.sliding_window": 12}, "granite.attention.sliding_window = 12: not supported"),
        ("gemma", {"attention.sliding_window": 12}, "gemma.attention.sliding_window = 12: not supported"),
        ("smollm3", {"attention.scale": 0.5}, "smollm3.attention.scale = 0.5: an unknown setting"),
        ("mixtral", {"expert_gating_func": 2}, "llama.expert_gating_func = 2: not supported"),
        ("mixtral", {"expert_feed_forward_length": 32}, "llama.expert_feed_forward_length = 32: not supported"),
        ("mixtral", {"expert_shared_count": 1}, "llama.expert_shared_count = 1: not supported"),
        ("phi3", {"rope.scaling.attn_factor": 1.5}, "phi3.rope.scaling.attn_factor = 1.5: not supported"),
        ("phi3", {"attention.head_count_kv": 0}, "phi3.attention.head_count_kv = 0: must be a whole number"),
    ],
)
def test_a_setting_that_would_change_the_numbers_is_named(
    kind: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    tied = {"tie_word_embeddings": True} if kind == "gemma" else {}
    source = make_checkpoint(kind, tmp_path / "source", **tied)
    file = write_gguf(source, tmp_path / "m.gguf", lambda name: "F32", **settings)
    with pytest.raises(GgufError, match=re.escape(message)):
        directory_for(file, tmp_path / "cache")


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    source = make_checkpoint("mixtral", tmp_path / "source")
    file = write_gguf(source, tmp_path / "m.gguf", lambda name: "F32", merges_experts=False)
    file.write_bytes(file.read_bytes().replace(b"blk.1.ffn_up.3.weight", b"blk.1.ffn_up.4.weight"))
    with pytest.raises(ModelError, match=r"layers.1.block_sparse_moe.experts.3.w3.weight = None: .* lacks this tensor"):
        load_torch(directory_of(file), None)


def phi3_header(**settings: Any) -> Header:
    named = {
        "block_count": 32, "context_length": 4096, "embedding_length": 3072, "feed_forward_length": 8192,
        "attention.head_count": 32, "rope.dimension_count": 96, "attention.layer_norm_rms_epsilon": 1e-05,
        "rope.scaling.original_context_length": 4096,
    }  # fmt: skip
    values = {f"phi3.{key}": value for key, value in (named | settings).items()}
    tensor = StoredTensor("token_embd.weight", "Q6_K", (32064, 3072), 0, 0)
    return Header({"general.architecture": "phi3"} | values, (tensor,))


def test_what_files_say_of_phi3() -> None:
    """Its first files do not name the window that the models of 4096 tokens have; a file of Phi-4 says that it has
    none."""
    for settings, window in (
        ({}, 2047),
        ({"attention.sliding_window": 1000}, 1000),
        ({"attention.sliding_window": 0}, None),
        ({"context_length": 16384}, None),
    ):
        assert config_of(phi3_header(**settings), {})["sliding_window"] == window
    factors = {"rope_factors_short.weight": [1.0] * 36, "rope_factors_long.weight": [4.0] * 36}
    long = {"context_length": 131072, "rope.dimension_count": 72, "rope.scaling.attn_factor": 1.1902381181716919}
    spec = parse_spec(config_of(phi3_header(**long), factors))
    assert spec.context_length == 4096 and spec.ropes[0].dim == 72
    assert spec.ropes[0].attention_factor == pytest.approx((1 + np.log(32) / np.log(4096)) ** 0.5, rel=1e-6)
    assert spec.ropes[0].short_factor == (1.0,) * 36
    del factors["rope_factors_long.weight"]
    with pytest.raises(ModelError, match=r"rope_factors_long.weight = None: the file lacks this tensor"):
        config_of(phi3_header(**long), factors)


def llama3_header(head_dim: int) -> Header:
    settings = {
        "general.architecture": "llama", "llama.block_count": 2, "llama.context_length": 131072,
        "llama.embedding_length": 2048, "llama.feed_forward_length": 8192, "llama.attention.head_count": 32,
        "llama.attention.head_count_kv": [8, 8], "llama.attention.key_length": head_dim,
        "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06, "llama.rope.freq_base": 500000.0,
    }  # fmt: skip
    return Header(settings, (StoredTensor("token_embd.weight", "Q6_K", (128256, 2048), 0, 0),))


def test_the_factors_of_llama_3_are_recognized() -> None:
    """As llama.cpp's converter computes them (head size 4 of an 8192-token original, factor 32)."""
    header = llama3_header(64)
    factors = []
    for i in range(32):
        frequency = 500000.0 ** (-2 * i / 64)
        length = 2 * np.pi / frequency
        if length < 8192 / 4.0:
            factors.append(1.0)
        elif length > 8192 / 1.0:
            factors.append(32.0)
        else:
            smooth = (8192 / length - 1.0) / (4.0 - 1.0)
            factors.append(1 / ((1 - smooth) / 32.0 + smooth))
    config = config_of(header, {"rope_freqs.weight": [float(x) for x in np.array(factors, np.float32)]})
    assert config["rope_scaling"] == {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    assert config["rms_norm_eps"] == 1e-05 and config["num_key_value_heads"] == 8
    assert config["quantization_config"] == {"quant_method": "gguf"} and config["tie_word_embeddings"]
    assert parse_spec(json.loads(json.dumps(config))).ropes[0].kind == "llama3"
    with pytest.raises(ModelError, match=r"rope_freqs.weight = .*: not the factors of Llama 3"):
        config_of(header, {"rope_freqs.weight": [2.0, *factors[1:]]})
