"""The raw bytes of tokens, for every kind of tokenizer."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from common.messages import MAX_TOKEN_BYTES
from tests.examples import examples
from tests.helpers_tokenizers import ALL_KINDS, SENTENCES, SPECIAL, byte_level, sentence_piece
from tokenizer_proc.text_decoder import TextDecoders
from tokenizer_proc.token_bytes import TokenBytes

TEXTS = st.lists(st.sampled_from([*SENTENCES, "é", "🙂", " x", "\n", "<tool>"]), min_size=1, max_size=4).map("".join)


def bytes_of(kind: str) -> tuple[TokenBytes, TextDecoders, object]:
    tokenizer = ALL_KINDS[kind]()
    decoders = TextDecoders(tokenizer)
    return TokenBytes(tokenizer, decoders), decoders, tokenizer


@pytest.mark.parametrize("kind", ["byte-level", "gemma", "llama", "metaspace", "fallback-metaspace"])
def test_the_bytes_of_all_tokens_are_the_text(kind: str) -> None:
    """Whatever the tokens are: of whole characters exactly, and of broken ones with the same replacements."""
    tokens_bytes, decoders, tokenizer = bytes_of(kind)

    @settings(max_examples=examples(100), deadline=None)
    @given(TEXTS)
    def check(text: str) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False).ids  # type: ignore[attr-defined]
        decoder = decoders.new(skip_special_tokens=False, continues=True)
        shown = "".join(map(decoder.push, ids)) + decoder.flush()
        assert b"".join(map(tokens_bytes.of, ids)).decode(errors="replace") == shown

    check()


def test_parts_of_characters() -> None:
    tokenizer = byte_level()
    of = TokenBytes(tokenizer, TextDecoders(tokenizer)).of
    ids = tokenizer.encode("🙂", add_special_tokens=False).ids
    assert len(ids) > 1 and b"".join(map(of, ids)) == "🙂".encode()
    assert of(10**6) == b""
    pieces = sentence_piece()
    of = TokenBytes(pieces, TextDecoders(pieces)).of
    assert of(pieces.token_to_id("<0xE2>")) == b"\xe2"
    assert of(pieces.token_to_id("<tool>")) == b"<tool>"
    assert of(pieces.token_to_id(SPECIAL.content)) == SPECIAL.content.encode()


@pytest.mark.parametrize("make", [byte_level, sentence_piece])
def test_what_is_beyond_what_a_message_carries_is_cut_off(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    tokenizer.add_tokens(["x" * (MAX_TOKEN_BYTES + 1)])
    of = TokenBytes(tokenizer, TextDecoders(tokenizer)).of
    assert of(tokenizer.get_vocab_size() - 1) == b"x" * MAX_TOKEN_BYTES


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_every_token_has_bytes(kind: str) -> None:
    tokens_bytes, _, tokenizer = bytes_of(kind)
    size = tokenizer.get_vocab_size()  # type: ignore[attr-defined]
    assert sum(tokens_bytes.of(token) != b"" for token in range(size)) > 0.9 * size
