"""Incremental decoding against the tokenizers library itself, on real tokenizers and arbitrary token sequences."""

import sys
from collections.abc import Callable
from functools import cache
from itertools import chain, product
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from tests.examples import examples
from tests.helpers_tokenizers import ALL_KINDS, SENTENCES, UNSUPPORTED, byte_level
from tokenizer_proc.text_decoder import TextDecoder, TextDecoders, UnsupportedDecoder

KINDS = sorted(ALL_KINDS)


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    make: Callable[[], Tokenizer] = ALL_KINDS[kind]
    return make()


@cache
def decoders_of(kind: str) -> TextDecoders:
    return TextDecoders(tokenizer_of(kind))


def decode(decoder: TextDecoder, tokens: list[int]) -> str:
    return "".join([decoder.push(token) for token in tokens]) + decoder.flush()


@cache
def token_lists(kind: str) -> st.SearchStrategy[list[int]]:
    """Any ids, some unknown, with runs of one-byte tokens and of added tokens often enough to meet."""
    vocab = tokenizer_of(kind).get_vocab(with_added_tokens=True)
    short = sorted(i for token, i in vocab.items() if len(token) == 1 or token.startswith("<0x"))
    rest = sorted(i for token, i in vocab.items() if len(token) > 1 and not token.startswith("<0x"))
    added = sorted(tokenizer_of(kind).get_added_tokens_decoder())
    one = st.one_of(
        st.sampled_from(short), st.sampled_from(rest), st.sampled_from(added), st.integers(0, len(vocab) + 5)
    )
    text = st.text(max_size=12).map(lambda t: tokenizer_of(kind).encode(t, add_special_tokens=False).ids)
    return st.lists(st.one_of(one.map(lambda t: [t]), text), max_size=24).map(lambda runs: [*chain.from_iterable(runs)])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(300), deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_joined_deltas_equal_the_full_decode(kind: str, data: st.DataObject, skip: bool) -> None:
    tokens = data.draw(token_lists(kind))
    decoder = decoders_of(kind).new(skip_special_tokens=skip)
    assert decode(decoder, tokens) == tokenizer_of(kind).decode(tokens, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(150), deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_a_continuation_is_what_the_whole_decode_adds(kind: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = tokenizer_of(kind)
    prompt = tokenizer.encode("The quick", add_special_tokens=False).ids
    tokens = data.draw(token_lists(kind))
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    whole = tokenizer.decode(prompt + tokens, skip_special_tokens=skip)
    decoder = decoders_of(kind).new(skip_special_tokens=skip, continues=True)
    assert whole == before + decode(decoder, tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_shown_before_it_is_certain(kind: str) -> None:
    """Every prefix of the deltas is a prefix of the final text."""
    tokenizer = tokenizer_of(kind)
    for sentence in SENTENCES:
        tokens = tokenizer.encode(sentence, add_special_tokens=False).ids
        decoder = decoders_of(kind).new()
        full = tokenizer.decode(tokens)
        shown = ""
        for token in tokens:
            shown += decoder.push(token)
            assert full.startswith(shown)


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.ByteFallback(),
        decoders.Strip("▁", 2, 0),
        decoders.Sequence([decoders.Fuse(), decoders.Strip("▁", 2, 0)]),
        *(decoders.Metaspace(prepend_scheme=scheme) for scheme in ("always", "first", "never")),
    ],
)
def test_tokens_that_look_like_others(decoder: decoders.Decoder) -> None:
    names = [
        "<0x41>",
        "<0xc3>",
        "<0x+A>",
        "<0x 4>",
        "<0x4G>",
        "<0x4>",
        "<0x414>",
        "<0x41]",
        "x0x41>",
        "<0x１２>",
        "<0xé>",
    ]
    names += ["▁", "▁▁▁a", "b▁c", "▁d", " e", "f"]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, names[0]))
    tokenizer.decoder = decoder
    new = TextDecoders(tokenizer).new
    for tokens in product(range(len(names)), repeat=2):
        assert decode(new(), list(tokens)) == tokenizer.decode(tokens)


def test_ascii_text_is_shown_at_once() -> None:
    tokenizer = tokenizer_of("byte-level")
    decoder = decoders_of("byte-level").new()
    for token in tokenizer.encode("The quick brown fox", add_special_tokens=False).ids:
        assert decoder.push(token) == tokenizer.decode([token])


@given(st.binary(max_size=24))
@settings(max_examples=examples(500), deadline=None)
def test_invalid_utf8_becomes_as_many_replacement_characters_as_in_the_library(raw: bytes) -> None:
    tokenizer = tokenizer_of("byte-level")
    ids = [tokenizer.token_to_id(_BYTE_CHARS[b]) for b in raw]
    assert decode(decoders_of("byte-level").new(), ids) == tokenizer.decode(ids)


def _byte_chars() -> list[str]:
    from tokenizer_proc.decoder_stages import _BYTES

    by_byte = {byte: char for char, byte in _BYTES.items()}
    return [by_byte[b] for b in range(256)]


_BYTE_CHARS = _byte_chars()


def test_the_byte_alphabet_is_the_librarys() -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    assert sorted(_BYTE_CHARS) == sorted(ByteLevel.alphabet())
    for code in (0, 10, 32, 65, 127, 160, 173, 255):
        text = chr(code)
        encoded = [pair[0] for pair in ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)]
        assert "".join(_BYTE_CHARS[b] for b in text.encode()) == "".join(encoded)


@pytest.mark.parametrize("named", sorted(UNSUPPORTED))
def test_other_decoders_are_refused_by_name(named: str) -> None:
    tokenizer = byte_level()
    tokenizer.decoder = UNSUPPORTED[named]
    with pytest.raises(UnsupportedDecoder, match=named):
        TextDecoders(tokenizer)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["byte-level", "llama", "word-piece"])
def test_work_is_linear_over_100_000_tokens(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    some = tokenizer.encode("".join(SENTENCES), add_special_tokens=False).ids
    tokens = (some * (100_000 // len(some) + 1))[:100_000]
    deltas: list[str] = []
    calls = [_calls(lambda n=n: deltas.append(decode(decoders_of(kind).new(), tokens[:n]))) for n in (50_000, 100_000)]
    assert calls[1] < 2.1 * calls[0]
    assert deltas[1] == tokenizer.decode(tokens)


def _calls(work: Callable[[], object]) -> int:
    """Function calls made by `work`, of Python and C: the same on every machine."""
    count = 0

    def on_event(_frame: FrameType, event: str, _arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(on_event)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_a_decoder_holds_no_more_than_a_cut_character() -> None:
    """So that no step of a long stream costs more than another (byte fallback runs apart, which must be held)."""
    tokenizer = tokenizer_of("byte-level")
    tokens = tokenizer.encode("".join(SENTENCES), add_special_tokens=False).ids * 20
    decoder = decoders_of("byte-level").new()
    raw = shown = 0
    for token in tokens:
        piece = tokenizer.id_to_token(token)
        assert piece is not None
        raw += len(piece)  # a character of the alphabet is a byte
        shown += len(decoder.push(token).encode())
        assert 0 <= raw - shown <= 3
