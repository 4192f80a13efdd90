"""Loading the tokenizer of a model directory."""

import json
from pathlib import Path

import pytest

from tests.helpers_tokenizers import byte_level, write_tokenizer
from tokenizer_proc.tokenizer_files import TokenizerFilesError, load_tokenizer, longest_token

TEXT = "The quick brown fox, isn't it? 🙂"


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path: Path) -> None:
    tokenizer = byte_level()
    whole = tokenizer.encode(TEXT).ids
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    write_tokenizer(tmp_path, tokenizer)
    assert load_tokenizer(tmp_path).encode(TEXT).ids == whole


def test_older_formats_are_converted(tmp_path: Path) -> None:
    """A GPT-2 directory with vocab.json and merges.txt only."""
    model = json.loads(byte_level().to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode(TEXT).ids
    assert ids == byte_level().encode(TEXT, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == TEXT


@pytest.mark.parametrize("content", ["", "{}", "[1, 2"])
def test_a_broken_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerFilesError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(TokenizerFilesError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(TokenizerFilesError, match="not a model directory"):
        load_tokenizer(tmp_path / "nowhere")


def test_the_longest_token() -> None:
    tokenizer = byte_level()
    assert longest_token(tokenizer) == max(len(token) for token in tokenizer.get_vocab())
    tokenizer.add_tokens(["x" * 100])
    assert longest_token(tokenizer) == 100
