"""Reads the header of a GGUF file: its settings, and where each tensor lies
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Everything is checked against the size of the file. The
package gguf reads headers too, but takes ten seconds for a vocabulary of 150,000 tokens, which is passed over here.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker_proc.errors import ModelError
from worker_proc.gguf.kinds import KINDS, NAMES

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_MOST_SETTINGS, _MOST_TENSORS, _MOST_TEXT, _MOST_DIMS = 2**16, 2**20, 2**24, 4
_KEPT = 4096  # numbers of an array that are kept; longer ones, and those of texts, belong to vocabularies
_MOST_KEPT = 2**24  # of a vocabulary
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class Uncounted:
    """An array that is not kept."""

    length: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """`shape` with the outputs first; `begin` in the file."""

    name: str
    kind: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    settings: dict[str, Any]  # numbers, texts, lists, and Uncounted
    tensors: tuple[StoredTensor, ...]


def read_header(path: Path, *, vocabulary: bool = False) -> Header:
    """With `vocabulary`, all arrays are lists. Raises ModelError naming the file, or the tensor, that is truncated,
    malformed or of an unknown kind."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data, vocabulary).header()
    except OSError as error:
        raise ModelError(path.name, str(path), error.strerror or "cannot be read") from None
    except (struct.error, ValueError, IndexError) as error:
        raise ModelError(path.name, str(path), f"truncated or not a GGUF file ({error})") from None


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap, vocabulary: bool) -> None:
        self._path = path
        self._data = data
        self._vocabulary = vocabulary
        self._at = 0

    def header(self) -> Header:
        magic, version = self._data[:4], struct.unpack_from("<I", self._data, 4)[0]
        if magic != _MAGIC or version not in _VERSIONS:
            reason = f"not a GGUF file of version {' or '.join(map(str, _VERSIONS))}"
            raise ModelError(self._path.name, [magic.decode("latin-1"), version], reason)
        self._at = 8
        tensors, settings = self._count(_MOST_TENSORS, "tensors"), self._count(_MOST_SETTINGS, "settings")
        values = dict(self._setting() for _ in range(settings))
        found = [self._tensor() for _ in range(tensors)]
        alignment = values.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise ModelError("general.alignment", alignment, f"in {self._path.name}: must be a power of two")
        start = -(-self._at // alignment) * alignment
        return Header(values, tuple(self._placed(tensor, start) for tensor in found))

    def _placed(self, tensor: StoredTensor, start: int) -> StoredTensor:
        begin = start + tensor.begin
        if begin + tensor.nbytes > len(self._data):
            reason = f"bytes in {self._path.name}, but the tensor ends later: truncated file"
            raise ModelError(tensor.name, len(self._data), reason)
        return StoredTensor(tensor.name, tensor.kind, tensor.shape, begin, tensor.nbytes)

    def _tensor(self) -> StoredTensor:
        name = self._text()
        count = self._number("I")
        if not 0 < count <= _MOST_DIMS:
            raise ModelError(name, count, f"dimensions in {self._path.name}: must be 1 to {_MOST_DIMS}")
        dims = [self._number("Q") for _ in range(count)]
        number, offset = self._number("I"), self._number("Q")
        kind = NAMES.get(number)
        if kind is None:
            raise ModelError(name, number, f"type of a tensor in {self._path.name} is not one of {', '.join(KINDS)}")
        block = KINDS[kind]
        if dims[0] % block.numbers or not all(0 < size < 2**40 for size in dims):
            raise ModelError(name, dims, f"shape in {self._path.name}: rows must be whole blocks of {block.numbers}")
        nbytes = math.prod(dims) // block.numbers * block.nbytes
        return StoredTensor(name, kind, tuple(reversed(dims)), offset, nbytes)

    def _setting(self) -> tuple[str, Any]:
        return self._text(), self._value(self._number("I"))

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind != _ARRAY:
            return self._number(self._format(kind))
        inner, length = self._number("I"), self._number("Q")
        if self._vocabulary and length > _MOST_KEPT:
            raise ValueError(f"an array of {length}")
        if inner == _TEXT:
            if self._vocabulary:
                return [self._text() for _ in range(length)]
            for _ in range(length):
                self._skip(self._number("Q"))
            return Uncounted(length)
        form = self._format(inner)
        if length > _KEPT and not self._vocabulary:
            self._skip(length * struct.calcsize(form))
            return Uncounted(length)
        return [self._number(form) for _ in range(length)]

    def _format(self, kind: int) -> str:
        if kind not in _NUMBERS:
            raise ValueError(f"unknown type {kind} of a setting")
        return _NUMBERS[kind]

    def _count(self, most: int, what: str) -> int:
        count = int(self._number("Q"))
        if count > most:
            raise ModelError(self._path.name, count, f"{what}: at most {most} are read")
        return count

    def _number(self, form: str) -> Any:
        value = struct.unpack_from("<" + form, self._data, self._at)[0]
        self._at += struct.calcsize(form)
        return value

    def _text(self) -> str:
        length = self._number("Q")
        if length > _MOST_TEXT:
            raise ValueError(f"a text of {length} bytes")
        begin = self._at
        self._skip(length)
        return self._data[begin : self._at].decode("utf-8", "replace")

    def _skip(self, nbytes: int) -> None:
        self._at += nbytes
        if self._at > len(self._data):
            raise ValueError("it ends in its header")
