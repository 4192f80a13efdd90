"""How the tokenizer of a GGUF file splits text. What is expected was compared with llama.cpp's own tokens, see docs."""

import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tests.helpers_gguf import write_gguf
from tests.helpers_models import make_checkpoint
from worker_proc.errors import ModelError
from worker_proc.gguf.directory import GgufError, directory_for
from worker_proc.gguf.header import Header
from worker_proc.gguf.splits import SPLITS, splits_of
from worker_proc.gguf.tokenizer import write_tokenizer

TEXT = "I'll SAY'S 12345 camelCase//x\r\n\r\n  y"
PIECES = {
    "gpt-2": ["I", "'ll", " SAY", "'", "S", " 12345", " camelCase", "//", "x", "\r\n\r\n ", " y"],
    "smollm": ["I", "'ll", " SAY", "'", "S", " ", *"12345", " camelCase", "//", "x", "\r\n\r\n ", " y"],
    "qwen2": ["I", "'ll", " SAY", "'S", " ", *"12345", " camelCase", "//", "x", "\r\n\r\n", " ", " y"],
    "qwen35": ["I", "'ll", " SAY", "'S", " ", *"12345", " camelCase", "//", "x", "\r\n\r\n", " ", " y"],
    "llama-bpe": ["I", "'ll", " SAY", "'S", " ", "123", "45", " camelCase", "//", "x", "\r\n\r\n", " ", " y"],
    "dbrx": ["I", "'ll", " SAY", "'S", " ", "123", "45", " camelCase", "//", "x", "\r\n\r\n", " ", " y"],
    "gpt-4o": ["I'll", " SAY'S", " ", "123", "45", " camel", "Case", "//", "x", "\r\n\r\n", " ", " y"],
    "tekken": ["I", "'ll", " SAY", "'S", " ", *"12345", " camel", "Case", "//", "x", "\r\n\r\n", " ", " y"],
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("source") / "model")


def header(**settings: Any) -> Header:
    return Header({f"tokenizer.ggml.{key}": value for key, value in ({"model": "gpt2"} | settings).items()}, ())


def written(source: Path, directory: Path, **settings: Any) -> Tokenizer:
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    file = write_gguf(source, directory / "m.gguf", lambda name: "BF16", tokenizer=ids | settings)
    assert write_tokenizer(file, directory) == {0, 2}, "by their names"
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


@pytest.mark.parametrize("pre", PIECES)
def test_text_is_split_as_the_file_says(pre: str, source: Path, tmp_path: Path) -> None:
    tokenizer = written(source, tmp_path, pre=pre)
    pieces = tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)
    assert [TEXT[begin:end] for _, (begin, end) in pieces] == PIECES[pre]
    assert tokenizer.decode(tokenizer.encode(TEXT).ids) == TEXT
    assert tokenizer.model.ignore_merges == (pre in ("llama-bpe", "tekken"))
    assert (tokenizer.encode("x").ids[0] == 1) == (pre in ("llama-bpe", "tekken")), "as llama.cpp has it"


def test_combining_marks_stay_with_their_letters_as_the_file_says(source: Path, tmp_path: Path) -> None:
    text, found = "cafe\u0301s -\u0301", []
    for pre in ("qwen35", "qwen2"):
        (tmp_path / pre).mkdir()
        pieces = written(source, tmp_path / pre, pre=pre).pre_tokenizer.pre_tokenize_str(text)
        found.append([text[begin:end] for _, (begin, end) in pieces])
    assert found == [["cafe\u0301s", " -", "\u0301"], ["cafe", "\u0301s", " -\u0301"]]


@pytest.mark.parametrize(
    ("flags", "first", "last"), [((True, True), 1, 2), ((False, True), None, 2), ((True, None), 1, None)]
)
def test_a_text_begins_and_ends_as_the_file_says(
    flags: tuple[bool | None, bool | None], first: int | None, last: int | None, source: Path, tmp_path: Path
) -> None:
    both = zip(("add_bos_token", "add_eos_token"), flags, strict=True)
    said = {name: flag for name, flag in both if flag is not None}
    tokenizer = written(source, tmp_path, pre="qwen2", **said)
    bare = tokenizer.encode("the cat", add_special_tokens=False).ids
    wanted = [*([] if first is None else [first]), *bare, *([] if last is None else [last])]
    assert tokenizer.encode("the cat").ids == wanted


def test_transformers_reads_the_directory_too(source: Path, tmp_path: Path) -> None:
    mine = written(source, tmp_path, pre="llama-bpe")
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in (TEXT, "<|im_start|>user\nÄ 12  \n<|im_end|>", ""):
        assert theirs(text)["input_ids"] == mine.encode(text).ids
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (1, 2, None)
    messages = [{"role": "user", "content": "Hi"}]
    assert theirs.apply_chat_template(messages, tokenize=False).startswith("<|im_start|>user\nHi")


def test_an_unknown_way_to_split_text_is_refused() -> None:
    with pytest.raises(
        ModelError, match=r"tokenizer.ggml.pre = 'viking': how its tokenizer splits text must be one of gpt-2"
    ):
        splits_of(header(pre="viking"))
    with pytest.raises(ModelError, match=r"tokenizer.ggml.pre = 'default'"):
        splits_of(header())
    older = Header(header().settings | {"general.architecture": "qwen2"}, ())
    assert splits_of(older) == SPLITS["qwen2"]
    assert splits_of(header(model="llama", pre="viking")) is None, "SentencePiece does not split"
    with pytest.raises(ModelError, match=r"tokenizer.ggml.model = 'bert': .*byte-level BPE"):
        splits_of(header(model="bert"))


def test_a_file_is_refused_before_anything_is_made(source: Path, tmp_path: Path) -> None:
    file = write_gguf(source, tmp_path / "m.gguf", lambda name: "BF16", tokenizer={"pre": "viking"})
    with pytest.raises(GgufError, match=r"tokenizer.ggml.pre = 'viking'"):
        directory_for(file, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokens": ["a", "b", "a"]}, "tokenizer.ggml.tokens = 3: only 2 of them differ"),
        ({"merges": None}, "tokenizer.ggml.merges = None: the file lacks this part of its tokenizer"),
        ({"token_type": None}, "tokenizer.ggml.token_type = None: the file lacks"),
        ({"merges": ["a b", "ab"]}, "tokenizer.ggml.tokens = 'm.gguf': not a tokenizer: "),
        ({"merges": ["a c"]}, "tokenizer.ggml.tokens = 'm.gguf': not a tokenizer: "),
        ({"merges": [1, 2]}, "tokenizer.ggml.tokens = 'm.gguf': not a tokenizer: "),
        ({"tokens": [1, 2, 3]}, "tokenizer.ggml.tokens = 'm.gguf': not a tokenizer: "),
        ({"model": "llama", "scores": ["a", "b", "c"]}, "tokenizer.ggml.tokens = 'm.gguf': not a tokenizer: "),
        ({"model": "llama"}, "tokenizer.ggml.scores = None: the file lacks"),
    ],
)
def test_a_broken_vocabulary_is_refused(
    change: dict[str, Any], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {"pre": "gpt-2", "tokens": ["a", "b", "ab"], "merges": ["a b"], "token_type": [1, 1, 1]} | change
    whole = header(**{name: value for name, value in parts.items() if value is not None})
    monkeypatch.setattr("worker_proc.gguf.tokenizer.read_header", lambda path, vocabulary: whole)
    with pytest.raises(ModelError, match=re.escape(reason)):
        write_tokenizer(tmp_path / "m.gguf", tmp_path)


PIECES_OF_TWO = {
    True: {"ab": ["▁ab"], " ab": ["▁▁", "ab"], "a ab": ["▁a", "▁ab"], "": [], "a</s>ab": ["▁a", "</s>", "▁ab"]},
    False: {"ab": ["ab"], " ab": ["▁ab"], "a ab": ["a", "▁ab"], "": [], "a</s>ab": ["a", "</s>", "ab"]},
}


def test_the_end_of_a_message_ends_no_answer_of_gpt_oss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = ["a", "b", "ab", "<|end|>", "<|endoftext|>", "<|return|>", "<|call|>"]
    for count, ends in ((5, {3, 4}), (7, {4, 5, 6})):
        parts = {"pre": "gpt-4o", "tokens": tokens[:count], "merges": ["a b"], "token_type": [1, 1, 1, 3, 3, 3, 3]}
        whole = header(**parts)
        monkeypatch.setattr("worker_proc.gguf.tokenizer.read_header", lambda path, vocabulary, whole=whole: whole)
        assert write_tokenizer(tmp_path / "m.gguf", tmp_path) == ends


def test_tokens_of_phi3_take_the_spaces_behind_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its own tokenizer has it, and llama.cpp for files that call themselves so. Phi-4's do not."""
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "<|user|>",
        "<|endoftext|>",
        "▁",
        "a",
    ]
    parts = {
        "tokens": tokens, "scores": [0.0] * len(tokens), "token_type": [2, 3, 3, *([6] * 256), 3, 3, 1, 1],
        "add_space_prefix": False, "unknown_token_id": 0,
    }  # fmt: skip
    for architecture, text in (("phi3", "<|user|>a<|endoftext|> a"), ("llama", "<|user|>\n a<|endoftext|> a")):
        settings = header(model="llama", **parts).settings | {"general.architecture": architecture}
        whole = Header(settings, ())
        monkeypatch.setattr("worker_proc.gguf.tokenizer.read_header", lambda path, vocabulary, whole=whole: whole)
        write_tokenizer(tmp_path / "m.gguf", tmp_path)
        tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        ids = tokenizer.encode("<|user|>\n a<|endoftext|> a").ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_merges_the_highest_scores_first(
    prefix: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its space before each text is one even before a space, as llama.cpp has it, and so is one after a token that is
    found as it is."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [2, 3, 3, *([6] * 256)]
    for token, kind in {"\u2581": 1, "a": 1, "b": 1, "ab": 1, "▁a": 1, "▁ab": 1, "▁▁": 1, "||": 4}.items():
        tokens.append(token)
        kinds.append(kind)
    scores = [0.0] * 259 + [-9.0, -8.0, -7.0, -2.0, -3.0, -4.0, -1.0, 0.0]
    flags: dict[str, Any] = {} if prefix else {"add_space_prefix": False}
    whole = header(
        model="llama", tokens=tokens, scores=scores, token_type=kinds, bos_token_id=1, eos_token_id=2,
        unknown_token_id=0, **flags,
    )  # fmt: skip
    monkeypatch.setattr("worker_proc.gguf.tokenizer.read_header", lambda path, vocabulary: whole)
    assert write_tokenizer(tmp_path / "m.gguf", tmp_path) == set()
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text, pieces in PIECES_OF_TWO[prefix].items():
        assert tokenizer.encode(text).tokens == ["<s>", *pieces]
    assert tokenizer.encode("||é", add_special_tokens=False).tokens[0] == "||"
    for text in ("ab", " ab", "a  b é", "||é\n"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == (text if not prefix or text[0] != "|" else "|| é\n")
