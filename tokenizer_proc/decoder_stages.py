"""The stages of `text_decoder`, each with the meaning of the decoder of that name in the tokenizers library (0.22)."""

import codecs
from functools import lru_cache
from typing import TypeAlias

Pieces: TypeAlias = list[str]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet of 256 visible characters: printable Latin-1 ones stand for themselves, the other bytes for
    the characters from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTES = _byte_alphabet()


class ByteLevel:
    """Tokens of GPT-2's byte alphabet to bytes to UTF-8, each maximal invalid part to one U+FFFD."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, pieces: Pieces) -> Pieces:
        return [self._utf8.decode(to_bytes(piece)) for piece in pieces]

    def flush(self) -> Pieces:
        return [self._utf8.decode(b"", final=True)]


@lru_cache(maxsize=2**14)  # the frequent tokens of a vocabulary
def to_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTES[char] for char in token])
    except KeyError:  # an added token with characters outside the alphabet stands for itself
        return token.encode()


class ByteFallback:
    """Runs of tokens such as <0xE2> to text: valid UTF-8 as a whole, or one U+FFFD per byte. A run is held to its
    end, because its last byte decides."""

    def __init__(self) -> None:
        self._run = bytearray()

    def push(self, pieces: Pieces) -> Pieces:
        out: Pieces = []
        for piece in pieces:
            byte = fallback_byte(piece)
            if byte is None:
                out += self.flush()
                out.append(piece)
            else:
                self._run.append(byte)
        return out

    def flush(self) -> Pieces:
        if not self._run:
            return []
        run, self._run = bytes(self._run), bytearray()
        try:
            return [run.decode()]
        except UnicodeDecodeError:
            return ["\ufffd"] * len(run)


def fallback_byte(piece: str) -> int | None:
    if len(piece) != 6 or not piece.startswith("<0x") or not piece.endswith(">"):
        return None
    digits = piece[3:5]
    try:
        # Like Rust's from_str_radix: two hexadecimal digits, or a plus sign and one; int() takes more than that.
        return int(digits, 16) if digits.isascii() and digits.lstrip("+").isalnum() else None
    except ValueError:
        return None


class Metaspace:
    """The mark (usually U+2581) to a space; in the first token, which has one by the tokenizer's rule, to nothing."""

    def __init__(self, mark: str, strip_first: bool):
        self._mark = mark
        self._strip_next = strip_first

    def push(self, pieces: Pieces) -> Pieces:
        if self._strip_next and pieces:
            self._strip_next = False
            return [pieces[0].replace(self._mark, ""), *(p.replace(self._mark, " ") for p in pieces[1:])]
        return [piece.replace(self._mark, " ") for piece in pieces]

    def flush(self) -> Pieces:
        return []


# Applied in this order to one token at a time, as the library does.
_CLEANUP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


class WordPiece:
    """Tokens with the prefix (usually ##) go on a word, all others start one after a space."""

    def __init__(self, prefix: str, cleanup: bool, continues: bool):
        self._prefix = prefix
        self._cleanup = cleanup
        self._started = continues

    def push(self, pieces: Pieces) -> Pieces:
        return [self._word(piece) for piece in pieces]

    def flush(self) -> Pieces:
        return []

    def _word(self, piece: str) -> str:
        if self._started:
            piece = piece[len(self._prefix) :] if piece.startswith(self._prefix) else " " + piece
        self._started = True
        if self._cleanup:
            for old, new in _CLEANUP:
                piece = piece.replace(old, new)
        return piece


class JoinWords:
    """What the library does without a decoder: tokens with spaces between them."""

    def __init__(self, continues: bool):
        self._started = continues

    def push(self, pieces: Pieces) -> Pieces:
        if not pieces:
            return []
        first = [" "] if self._started else []
        self._started = True
        return [*first, " ".join(pieces)]

    def flush(self) -> Pieces:
        return []


class StripText:
    """Remove up to `count` leading `char` from the whole text, which arrives in fragments."""

    def __init__(self, char: str, count: int):
        self._char = char
        self._left = count

    def push(self, pieces: Pieces) -> Pieces:
        if not self._left:
            return pieces
        text = "".join(pieces)
        at = 0
        while self._left and at < len(text):
            if text[at] == self._char:
                at += 1
                self._left -= 1
            else:
                self._left = 0
        return [text[at:]]

    def flush(self) -> Pieces:
        return []
