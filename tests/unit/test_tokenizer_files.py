"""Loading the tokenizer of a model directory."""

import base64
import json
from pathlib import Path

import pytest

from tests.helpers_tokenizers import byte_level, write_tokenizer
from tokenizer_proc.tokenizer_files import TokenizerFilesError, load_special_tokens, load_tokenizer, longest_token

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


def test_mistrals_own_format_is_read(tmp_path: Path) -> None:
    """Mistral Small 3.2, Devstral and Magistral have a tekken.json alone. Texts begin with <s>, as with its others."""
    words = [bytes([i]) for i in range(256)] + [b"th", b"the", b" t", b" th", b" the"]
    vocab = [{"rank": i, "token_bytes": base64.b64encode(w).decode(), "token_str": None} for i, w in enumerate(words)]
    special = [
        {"rank": i, "token_str": text, "is_control": True} for i, text in enumerate(["<unk>", "<s>", "</s>", "[INST]"])
    ]
    sizes = {"default_vocab_size": len(vocab) + 10, "default_num_special_tokens": 10, "num_vocab_tokens": len(vocab)}
    config = {"pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|\s+", "version": "v11"} | sizes
    (tmp_path / "tekken.json").write_text(json.dumps({"config": config, "vocab": vocab, "special_tokens": special}))
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("the the[INST]é").ids
    assert ids == [1, 10 + 257, 10 + 260, 3, 10 + 0xC3, 10 + 0xA9]
    assert tokenizer.encode("the", add_special_tokens=False).ids == [10 + 257]
    assert tokenizer.decode(ids) == "the theé"
    assert load_special_tokens(tmp_path) == {
        "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>",
    }  # fmt: skip


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
