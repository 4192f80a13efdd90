"""Reads values as Python writes them, or as Gemma 4 and FunctionGemma do, and writes them as JSON while they come.

    (a=1, b='it\\'s', c=[None, {"d": (True,)}])             Python: the arguments of a call, in round brackets
    {a:1,b:<|"|>it's<|"|>,c:[null,{d:[true]}]}               Gemma: strings between marks, and keys without any
    {a:1,b:<escape>it's<escape>}                             FunctionGemma

Nothing is evaluated: a value is a text, a number, a word, or these in brackets. There is no recursion.
"""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from common.parsers.scanning import find_marker

MAX_DEPTH = 100  # of brackets
_MAX_WORD = 1024  # characters of keys, and of values that are no strings in quotes
_MAX_SPACE = 64  # behind what may be the quote at a string's end
_MAX_ESCAPE = 10  # characters, of \U0001f600
_STRING = frozenset({"string"})
_CLOSES = {"(": ")", "[": "]", "{": "}"}
_QUOTE = re.compile(r"([rRbBuUfF]{0,2})('''|\"\"\"|'|\")")
_QUOTE_PREFIX = re.compile(r"[rRbBuUfF]{0,2}(?:''?|\"\"?)?")
_IN_QUOTES = {"'": re.compile(r"['\\]"), '"': re.compile(r'["\\]')}
_ESCAPE = re.compile(r"\\(?:[0-7]{1,3}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|\r\n|[\s\S])")
_ESCAPED = dict(zip("abfnrtv\\'\"\n\r", "\a\b\f\n\r\t\v\\'\"\0\0", strict=True))  # \0: nothing
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_PYTHON_NUMBER = re.compile(r"[+-]?[\d.][\w.+-]*", re.ASCII)


class Dialect(Enum):
    """The value is the mark around strings."""

    PYTHON = ""
    GEMMA = '<|"|>'
    FUNCTION_GEMMA = "<escape>"


class _Expects(Enum):
    FIRST = auto()  # an item, or the end of what has none
    ITEM = auto()  # behind a comma: an item, or the end
    COLON = auto()  # behind a key in quotes
    VALUE = auto()  # of a key
    STRING = auto()  # in quotes
    NEXT = auto()  # behind an item


@dataclass(frozen=True, slots=True)
class _Bracket:
    close: str
    has_keys: bool
    colon: str  # behind keys


class ArgumentsLiteral:
    """The arguments of a call, from their opening bracket to the one that closes it. `done` and `broken` end it.

    `is_text` says of a key that its value must be a string: a number without quotes is one then. A quote ends a string
    only where what follows it may follow a string, for models write quotes into their strings as they are.
    """

    def __init__(self, dialect: Dialect, is_text: Callable[[str], bool] = lambda key: False) -> None:
        self._python = dialect is Dialect.PYTHON
        self._mark = dialect.value
        self._is_text = is_text
        self._stack: list[_Bracket] = []
        self._expects = _Expects.VALUE
        self._quote = ""  # around the string that is being read
        self._raw = False  # in which backslashes mean themselves
        self._key: list[str] | None = None  # the parts of a key in quotes
        self._name = ""  # of the argument
        self._read: list[str] = []
        self.done = False
        self.broken = False

    def take(self) -> str:
        """The JSON text of what was read since the last call."""
        read = "".join(self._read)
        self._read.clear()
        return read

    def feed(self, text: str, at: int, *, final: bool) -> int:
        """Read on from `at`; returns the index behind what has been read. What is left must be seen again together with
        more text, or is no part of the arguments where these have ended."""
        while at < len(text) and not (self.done or self.broken):
            if self._expects is not _Expects.STRING and text[at].isspace():
                at += 1
                continue
            end = self._step(text, at, final)
            if end is None:
                break
            at = end
        return at

    def _step(self, text: str, at: int, final: bool) -> int | None:
        """The index behind what was read, None where more text is needed."""
        match self._expects:
            case _Expects.STRING:
                return self._in_mark(text, at, final) if self._quote == self._mark else self._in_quotes(text, at, final)
            case _Expects.COLON if text[at] == self._stack[-1].colon:
                self._expects = _Expects.VALUE
                return at + 1
            case _Expects.NEXT if text[at] == ",":
                self._expects = _Expects.ITEM
                return at + 1
            case _Expects.COLON:
                return self._break(at)
        top = self._stack[-1] if self._stack else None
        if top is not None and self._expects is not _Expects.VALUE and text[at] == top.close:
            return self._pop(at)
        if self._expects is _Expects.NEXT:
            return self._break(at)
        as_key = top is not None and top.has_keys and self._expects is not _Expects.VALUE
        if as_key and top is not None and top.colon == "=":
            return self._word(text, at, final, as_key=True)
        if top is None and text[at] not in _CLOSES:
            return self._break(at)
        return self._item(text, at, final, as_key=as_key)

    def _item(self, text: str, at: int, final: bool, *, as_key: bool) -> int | None:
        """A value, or a key that may be in quotes."""
        if text[at] in _CLOSES:
            return self._break(at) if as_key or len(self._stack) >= MAX_DEPTH else self._push(text[at], at)
        if not self._python and text.startswith(self._mark, at):
            return self._open(self._mark, False, at + len(self._mark), as_key=as_key)
        if not self._python and self._mark.startswith(text[at:]):
            return len(text) if final else None
        begun = text[at : at + 5]  # two letters, three quotes
        if not final and len(begun) < 5 and _QUOTE_PREFIX.fullmatch(begun):
            return None  # the quotes may be three, or three of their beginning
        quoted = _QUOTE.match(begun)
        if quoted is not None:
            return self._open(quoted[2], "r" in quoted[1].lower(), at + quoted.end(), as_key=as_key)
        return self._word(text, at, final, as_key=as_key)

    def _push(self, bracket: str, at: int) -> int:
        self._begin_item()
        outermost = not self._stack
        has_keys = bracket == "{" or outermost
        self._stack.append(_Bracket(_CLOSES[bracket], has_keys, "=" if outermost and self._python else ":"))
        self._read.append("{" if has_keys else "[")
        self._expects = _Expects.FIRST
        return at + 1

    def _pop(self, at: int) -> int:
        self._read.append("}" if self._stack.pop().has_keys else "]")
        self._expects = _Expects.NEXT
        self.done = not self._stack
        return at + 1

    def _break(self, at: int) -> int:
        self.broken = True
        return at

    def _begin_item(self) -> None:
        if self._expects is _Expects.ITEM:
            self._read.append(", ")

    def _open(self, quote: str, raw: bool, at: int, *, as_key: bool) -> int:
        self._begin_item()
        self._quote, self._raw = quote, raw
        self._key = [] if as_key else None
        self._read.append('"')
        self._expects = _Expects.STRING
        return at

    def _close(self) -> None:
        self._read.append('"' if self._key is None else '": ')
        if self._key is None:
            self._expects = _Expects.NEXT
            return
        if len(self._stack) == 1:
            self._name = "".join(self._key)
        self._expects = _Expects.COLON

    def _show(self, text: str) -> None:
        self._read.append(json.dumps(text, ensure_ascii=False)[1:-1])
        if self._key is not None:
            self._key.append(text)

    def _in_mark(self, text: str, at: int, final: bool) -> int | None:
        end, mark = find_marker(text[at:], (self._mark,), final=final)
        self._show(text[at : at + end])
        if mark:
            self._close()
        return at + end + len(mark) if end or mark else None

    def _in_quotes(self, text: str, at: int, final: bool) -> int | None:
        quote = self._quote
        found = _IN_QUOTES[quote[0]].search(text, at)
        end = found.start() if found else len(text)
        if end > at:
            self._show(text[at:end])
            return end
        if text[at] == "\\":
            return self._escape(text, at, final)
        behind = at + len(quote)
        if not final and len(text) < behind and quote.startswith(text[at:]):
            return None
        if not text.startswith(quote, at):
            self._show(text[at])
            return at + 1
        space = behind
        while space < len(text) and space - behind < _MAX_SPACE and text[space].isspace():
            space += 1
        if space == len(text) and space - behind < _MAX_SPACE and not final:
            return None
        follows = ":=" if self._key is not None else ",)]}"
        if len(quote) == 1 and space < len(text) and space - behind < _MAX_SPACE and text[space] not in follows:
            self._show(quote)
        else:
            self._close()
        return behind

    def _escape(self, text: str, at: int, final: bool) -> int | None:
        if len(text) - at < _MAX_ESCAPE and not final:
            return None
        found = _ESCAPE.match(text, at)
        if found is None:  # the answer was cut here
            return at + 1
        escape = found.group()[1:]
        if self._raw:
            self._show("\\" + escape[0])
            return at + 2
        if escape[0] in "01234567":
            self._show(chr(int(escape, 8)))
        elif len(escape) > 2:
            self._show_code(int(escape[1:], 16), found.group())
        elif escape == "/" and not self._python:
            self._show("/")
        elif escape[0] in _ESCAPED:
            self._show(_ESCAPED[escape[0]].strip("\0"))
        else:
            self._show("\\" + escape)
        return found.end()

    def _show_code(self, code: int, written: str) -> None:
        if 0xD800 <= code < 0xE000 and self._key is None:  # half of a pair, as JSON writes it
            self._read.append(f"\\u{code:04x}")
        elif code < 0x110000 and not 0xD800 <= code < 0xE000:
            self._show(chr(code))
        else:
            self._show(written)

    def _word(self, text: str, at: int, final: bool, *, as_key: bool) -> int | None:
        """A key without quotes, or a number, True, None and the like; Gemma's strings without quotes, too."""
        ends = self._stack[-1].colon if as_key else ",)]}" if self._python else ",]}"
        stops = ends + "([{,)]}'\"" if as_key or self._python else ends
        end, most = at, min(len(text), at + _MAX_WORD)
        while end < most and text[end] not in stops:
            end += 1
        if end == len(text) and end - at < _MAX_WORD:
            return len(text) if final else None  # a value that may go on is not shown
        word = text[at:end].strip()
        spaced = as_key and self._stack[-1].colon == "=" and len(word.split()) > 1
        if end - at == _MAX_WORD or text[end] not in ends or not word or spaced:
            return self._break(at)
        self._begin_item()
        if not as_key:
            self._read.append(_json(word, is_text=len(self._stack) == 1 and self._is_text(self._name)))
            self._expects = _Expects.NEXT
            return end
        if len(self._stack) == 1:
            self._name = word
        self._read.append(f"{json.dumps(word, ensure_ascii=False)}: ")
        self._expects = _Expects.COLON
        return end


def _json(word: str, *, is_text: bool) -> str:
    """What a word is in JSON: a string where it is nothing else."""
    low = word.lower()
    if low in ("true", "false"):
        return low
    if low in ("null", "none"):
        return "null"
    if not is_text and _NUMBER.fullmatch(word):
        return word
    if not is_text and _PYTHON_NUMBER.fullmatch(word):
        for reads in (int, lambda text: int(text, 0), float):
            try:
                value = reads(word)
                if math.isfinite(value):
                    return json.dumps(value)
            except (ValueError, OverflowError):
                pass
    return json.dumps(word, ensure_ascii=False)
