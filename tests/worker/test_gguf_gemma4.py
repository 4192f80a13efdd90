"""Gemma 4 in GGUF files, against the checkpoints that they were made of."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, processors

from tests.helpers_divided import check_native, reports_of
from tests.helpers_gemma4 import SHAPES, make_gemma4
from tests.helpers_gguf import directory_of
from tests.helpers_gguf_gemma4 import write_gemma4_gguf
from tests.helpers_models import VOCAB_SIZE
from tests.helpers_paged import make_prompts
from tests.worker.test_cpu_build import needs_compiler
from tests.worker.test_gguf_hybrids import mostly_k
from tests.worker.test_hybrid_decoder import LEVELS, all_logits, error, load, load_native
from worker_proc.cpu.features import Level
from worker_proc.errors import ModelError
from worker_proc.gguf.directory import GgufError, directory_for
from worker_proc.gguf.header import Header
from worker_proc.gguf.tokenizer import _write
from worker_proc.models.describe import describe, read_config
from worker_proc.models.hybrid_families import hybrid_spec

pytestmark = needs_compiler
PROMPTS = make_prompts(VOCAB_SIZE)
FILED = [shape for shape in SHAPES if shape != "unified"]  # which is written as "keys-as-values" is
K = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "head_dim": 64, "global_head_dim": 128}
TIED = {"tie_word_embeddings": True}


def k_sizes(shape: str) -> dict[str, Any]:
    """Rows of whole blocks."""
    return K | ({"hidden_size_per_layer_input": 256} if "inputs" in shape or shape == "all" else {})


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("shape", FILED)
def test_a_plain_file_is_the_model_that_it_was_made_of(shape: str, apart: bool, tmp_path: Path) -> None:
    source = make_gemma4(shape, tmp_path / "source", **TIED)
    file = write_gemma4_gguf(source, tmp_path / "m.gguf", lambda name: "F32", apart=apart)
    directory = directory_of(file)
    assert hybrid_spec(read_config(directory)) == hybrid_spec(read_config(source))
    got, want = (all_logits(load_native(path), PROMPTS[4]) for path in (directory, source))
    assert torch.equal(got, want)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["BF16", "Q8_0", "Q4_0", "K"])
@pytest.mark.parametrize("shape", ["inputs", "all"])
def test_codes_are_what_they_stand_for(shape: str, kind: str, level: Level, tmp_path: Path) -> None:
    source = make_gemma4(shape, tmp_path / "source", **TIED | k_sizes(shape) | {"initializer_range": 0.05})
    kind_of = mostly_k if kind == "K" else lambda name: kind
    file = write_gemma4_gguf(source, tmp_path / "m.gguf", kind_of, plain=tmp_path / "plain")
    directory = directory_of(file)
    assert describe(directory).quantization == (None if kind == "BF16" else "gguf")
    of_codes, of_plain = (load_native(path, level) for path in (directory, tmp_path / "plain"))
    assert of_codes.weights.token_inputs is not None and of_plain.weights.token_inputs is not None
    rows = torch.tensor([3, 3, 0, VOCAB_SIZE - 1])
    tables = [model.weights.token_inputs.table.rows(rows) for model in (of_codes, of_plain)]  # type: ignore[union-attr]
    assert torch.equal(*tables)
    off = error(*(all_logits(model, PROMPTS[4]) for model in (of_codes, of_plain)))
    assert off == 0 if kind == "BF16" else off < 0.1


def test_ranks_compute_what_one_computes(tmp_path: Path) -> None:
    paths = {}
    for shape in ("inputs", "mixture"):
        source = make_gemma4(shape, tmp_path / f"source-{shape}", **TIED | k_sizes(shape))
        paths[shape] = directory_of(write_gemma4_gguf(source, tmp_path / f"{shape}.gguf", lambda name: "Q8_0"))
    for path, reports in reports_of(2, tmp_path, paths).values():
        check_native(path, reports)


@pytest.mark.parametrize("settings", [{"dtype": torch.float32}, {"level": None}], ids=str)
def test_elsewhere_a_file_is_refused_by_name(settings: dict[str, Any], tmp_path: Path) -> None:
    source = make_gemma4("plain", tmp_path / "source", **TIED)
    directory = directory_of(write_gemma4_gguf(source, tmp_path / "m.gguf", lambda name: "F32"))
    with pytest.raises(ModelError, match=r"GGUF files of gemma4_text are read for the native CPU kernels in bfloat16"):
        load(directory, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention.sliding_window_pattern": [True] * 6}, "must have both kinds of layers"),
        ({"attention.sliding_window_pattern": [True, False]}, "[True, False]: must say so for each layer"),
        ({"attention.sliding_window_pattern": 6}, "sliding_window_pattern = 6: must say so for each layer"),
        ({"attention.shared_kv_layers": 6}, "gemma4.attention.shared_kv_layers = 6: must be fewer than the layers"),
        ({"attention.head_count_kv": [1, 1, 1, 1, 2, 1]}, "must be that of all layers of a kind"),
        ({"attention.head_count_kv": [1, 1, 1, 1, 0, 1]}, "must say so for each layer"),
        ({"feed_forward_length": [96, 96, 96, 96, 192, 192]}, "or twice that in those without keys"),
        ({"feed_forward_length": [96, 192, 96, 192, 192, 192]}, "or twice that in those without keys"),
        ({"attention.value_length": 16}, "gemma4.attention.value_length = 16: not supported"),
        ({"attention.value_length_swa": 32}, "gemma4.attention.value_length_swa = 32: not supported"),
        ({"rope.dimension_count": 16}, "gemma4.rope.dimension_count = 16: not supported"),
        ({"rope.dimension_count_swa": 8}, "gemma4.rope.dimension_count_swa = 8: not supported"),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, "rope.scaling.type = 'linear': not supported"),
        ({"attention.sliding_window": None}, "gemma4.attention.sliding_window = None: must be a whole number"),
        ({"final_logit_softcapping": -1.0}, "gemma4.final_logit_softcapping = -1.0: must be a positive number"),
        ({"expert_count": 2}, "gemma4.expert_used_count = None: must be a whole number"),
        ({"attention.scale": 2.0}, "gemma4.attention.scale = 2.0: an unknown setting"),
        ({"factors": [1.0] * 15}, "must leave the first frequencies as they are"),
        ({"factors": [2.0] + [1e30] * 15}, "must leave the first frequencies as they are"),
        ({"factors": [1.0, 1e30, 1.0] + [1e30] * 13}, "must leave the first frequencies as they are"),
    ],
)  # fmt: skip
def test_a_setting_that_would_change_the_numbers_is_named(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    source = make_gemma4("inputs", tmp_path / "source", **TIED)
    file = write_gemma4_gguf(source, tmp_path / "m.gguf", lambda name: "F32", **settings)
    with pytest.raises(GgufError, match=re.escape(message)):
        directory_for(file, tmp_path / "cache")


def test_its_tokenizer_merges_as_the_file_lists(tmp_path: Path) -> None:
    """Spaces are a character of their own, what no token has becomes bytes, and lines are merged, too."""
    pieces = ["a", "b", "\u2581", "\n", "\n\n", "\u2581a", "ab", "ba", "\u2581ab"]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<turn|>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    merges = ["\n \n", "a b", "\u2581 ab", "b a", "\u2581 a"]
    settings = {
        "general.architecture": "gemma4", "tokenizer.ggml.model": "gemma4", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3, 2, 3, *[6] * 256, *[1] * len(pieces)], "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 2, "tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": True,
    }  # fmt: skip
    ends = _write(Header(settings, ()), tmp_path)
    assert ends == {tokens.index("<eos>"), tokens.index("<turn|>")}
    got = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    pairs = [tuple(merge.split(" ")) for merge in merges]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    want = Tokenizer(models.BPE(vocabulary, pairs, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    want.normalizer = normalizers.Replace(" ", "\u2581")
    want.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    want.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    for text in ("ab ab\n\na ba", "  a\n\n\nb", "\u00e9a", "", "aba bab"):
        assert got.encode(text).ids == want.encode(text).ids
        assert got.decode(got.encode(text).ids) == text
    assert [tokens[index] for index in got.encode("a ab\n\n").ids] == ["<bos>", "a", "\u2581ab", "\n\n"]
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["bos_token"] == "<bos>"
