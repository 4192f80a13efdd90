"""Token ids to text, a token at a time.

The `decoder` section of tokenizer.json describes how the tokenizers library turns a whole list of tokens into text. It
is read here into a chain of small stages with the same meaning that work incrementally: the joined outputs of `push`
plus that of `flush` equal `Tokenizer.decode` of all the tokens, for every sequence, and the work is linear in it.
"""

import json
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from tokenizers import Tokenizer

from tokenizer_proc.decoder_stages import ByteFallback, ByteLevel, JoinWords, Metaspace, Pieces, StripText, WordPiece


class UnsupportedDecoder(ValueError):
    """The tokenizer's decoder has a part that cannot be followed incrementally; the text names it."""


class Stage(Protocol):
    """One stage of a stream's chain. A piece is what the library calls a token of a decoder's input or output."""

    def push(self, pieces: Pieces) -> Pieces: ...

    def flush(self) -> Pieces:
        """What was held back, at the end."""
        ...


class TextDecoder:
    """The text of one token sequence. Made by `TextDecoders.new`."""

    def __init__(self, token_of: Callable[[int], str | None], hidden: frozenset[str], stages: list[Stage]):
        self._token_of = token_of
        self._hidden = hidden
        self._stages = stages

    def push(self, token_id: int) -> str:
        """The text that is certain with this token. Ids that the tokenizer does not know have no text."""
        token = self._token_of(token_id)
        if token is None or token in self._hidden:
            return ""
        pieces = [token]
        for stage in self._stages:
            pieces = stage.push(pieces)
        return "".join(pieces)

    def flush(self) -> str:
        """The rest of the text. The decoder must not be used afterwards."""
        pieces: Pieces = []
        for stage in self._stages:
            pieces = stage.push(pieces) + stage.flush()
        return "".join(pieces)


class TextDecoders:
    """Makes a TextDecoder per stream. Raises UnsupportedDecoder for a decoder that it cannot follow."""

    def __init__(self, tokenizer: Tokenizer):
        self._token_of: Callable[[int], str | None] = tokenizer.id_to_token
        added = tokenizer.get_added_tokens_decoder().values()
        self._special = frozenset(token.content for token in added if token.special)
        decoder = tokenizer.decoder
        # A decoder's state is its JSON text as in tokenizer.json, which need not be read a second time.
        self._makers = _parse(None if decoder is None else json.loads(decoder.__getstate__()))

    def new(self, *, skip_special_tokens: bool = True, continues: bool = False) -> TextDecoder:
        """A decoder for a new sequence.

        With `continues` the tokens come after others (an answer after its prompt), so that the rules for the first
        token of a text do not apply: the result is what `decode(prompt + tokens)` has after `decode(prompt)`, for a
        prompt that has text and does not end inside a character.
        """
        hidden = self._special if skip_special_tokens else frozenset[str]()
        return TextDecoder(self._token_of, hidden, [make(continues) for make in self._makers])


class _EachPiece:
    """A stage that changes every piece by itself."""

    def __init__(self, change: Callable[[str], str]):
        self._change = change

    def push(self, pieces: Pieces) -> Pieces:
        return [self._change(piece) for piece in pieces]

    def flush(self) -> Pieces:
        return []


_Maker = Callable[[bool], Stage]


def _parse(section: dict[str, Any] | None) -> list[_Maker]:
    if section is None:
        return [JoinWords]
    makers: list[_Maker] = []
    fused = False  # from here on the library sees one single token, and we see fragments of it
    for part in _flatten(section):
        kind = part["type"]
        if kind == "Fuse":
            fused = True
        elif fused:
            makers.append(_parse_fused(part))
        else:
            makers.append(_parse_pieces(part))
            fused = kind == "ByteLevel"
    return makers


def _flatten(section: dict[str, Any]) -> Iterable[dict[str, Any]]:
    if section["type"] != "Sequence":
        yield section
        return
    for part in section["decoders"]:
        yield from _flatten(part)


def _parse_pieces(part: dict[str, Any]) -> _Maker:
    match part:
        case {"type": "ByteLevel"}:
            return lambda _: ByteLevel()
        case {"type": "ByteFallback"}:
            return lambda _: ByteFallback()
        case {"type": "Metaspace", "replacement": str(mark), "prepend_scheme": str(scheme)}:
            return lambda continues: Metaspace(mark, strip_first=scheme != "never" and not continues)
        case {"type": "WordPiece", "prefix": str(prefix), "cleanup": bool(cleanup)}:
            return lambda continues: WordPiece(prefix, cleanup, continues)
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
            return lambda _: _EachPiece(lambda piece: piece.replace(old, new))
        case {"type": "Strip", "content": str(char), "start": int(start), "stop": 0}:
            return lambda _: _EachPiece(lambda piece: piece[_leading(piece, char, start) :])
    raise _unsupported(part)


def _parse_fused(part: dict[str, Any]) -> _Maker:
    match part:
        case {"type": "Strip", "content": str(char), "start": int(start), "stop": 0}:
            return lambda continues: StripText(char, 0 if continues else start)
    raise _unsupported(part, " after the tokens are fused")


def _leading(piece: str, char: str, most: int) -> int:
    """How many of the first `most` characters are `char` without a gap."""
    head = piece[:most]
    return len(head) - len(head.lstrip(char))


def _unsupported(part: dict[str, Any], where: str = "") -> UnsupportedDecoder:
    return UnsupportedDecoder(f"the tokenizer's decoder {json.dumps(part)}{where} is not supported")
