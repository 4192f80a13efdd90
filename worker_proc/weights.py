"""safetensors checkpoints: their files, headers and tensors. Needs no torch until a tensor is read.

The format is 8 bytes of header length (little-endian), a JSON header of dtype, shape and byte range per tensor, and
the data (https://github.com/huggingface/safetensors#format). Headers are checked here, against the size of the file,
so that a truncated download is named before anything is computed with it.
"""

import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from worker_proc.errors import ModelError
from worker_proc.gguf.kinds import KINDS, PLAIN_BYTES

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor of a checkpoint is: `begin` and `nbytes` within `file`."""

    name: str
    file: Path
    dtype: str  # safetensors' name, e.g. "BF16", or that of a block in GGUF files, e.g. "Q4_K"
    shape: tuple[int, ...]
    begin: int
    nbytes: int
    heads: int = 0  # the rows of each of so many heads lie by turns: one of its first half, one of its second (GGUF)
    shift: float = 0.0  # is added to the stored numbers (GGUF)
    logarithm: bool = False  # of the stored numbers, with their sign turned, is what is meant (GGUF)

    def of_stack(self, which: tuple[int, int] | None) -> "TensorEntry":
        """One of the equal parts of it along the first dimension: which, of how many. None: all of it."""
        if which is None:
            return self
        size = self.nbytes // which[1]
        return replace(self, shape=self.shape[1:], begin=self.begin + which[0] * size, nbytes=size)

    def renamed(self, name: str, **changes: Any) -> "TensorEntry":
        """The same under another name, and with what has to be undone."""
        return replace(self, name=name, **changes)


class Checkpoint:
    """The tensors of a model directory by name. Opening it reads and checks headers only."""

    def __init__(self, tensors: dict[str, TensorEntry]) -> None:
        self.tensors = tensors

    @classmethod
    def open(cls, directory: Path) -> "Checkpoint":
        """Read the headers of `model.safetensors`, or of every shard in `model.safetensors.index.json`.

        Raises ModelError that names the file and the tensor: no safetensors file (pickled weights are refused by
        name), a shard that is missing, truncated or not what its header or the index says.
        """
        if not directory.is_dir():
            raise ModelError("model", str(directory), "no such directory")
        tensors: dict[str, TensorEntry] = {}
        if (directory / SINGLE_FILE).is_file():
            files, placed = [SINGLE_FILE], {}
        elif (directory / INDEX_FILE).is_file():
            placed = _read_index(directory / INDEX_FILE)
            files = sorted(set(placed.values()))
        else:
            raise _no_weights(directory)
        for file in files:
            for entry in _read_header(directory / file):
                if entry.name in tensors:
                    other = tensors[entry.name].file.name
                    raise ModelError(entry.name, file, f"the tensor is also in {other}")
                tensors[entry.name] = entry
        for name, file in placed.items():
            if name not in tensors or tensors[name].file.name != file:
                raise ModelError(name, file, f"{INDEX_FILE} places the tensor in this file, which does not have it")
        return cls(tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.tensors.values())

    def entry(self, name: str) -> TensorEntry:
        """Raises ModelError if the checkpoint lacks the tensor or stores it in a type that cannot become floating
        point."""
        if name not in self.tensors:
            raise ModelError(name, None, "the checkpoint lacks this tensor")
        entry = self.tensors[name]
        if entry.dtype not in KINDS:
            raise ModelError(
                name, entry.dtype, f"tensor type in {entry.file.name} is not one of {', '.join(PLAIN_BYTES)}"
            )
        return entry

    def refuse_unexpected(self, used: Iterable[str], harmless: Iterable[str] = ()) -> None:
        """Raises ModelError naming a tensor that is neither `used` nor ends in one of the `harmless` suffixes."""
        known, suffixes = set(used), tuple(harmless)
        for name, entry in sorted(self.tensors.items()):
            if name not in known and not name.endswith(suffixes):
                raise ModelError(name, list(entry.shape), f"unexpected tensor in {entry.file.name}")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; raises ModelError that names the file otherwise."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(path.name, str(path), error.strerror or "cannot be read") from None
    except ValueError as error:
        raise ModelError(path.name, str(path), f"not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ModelError(path.name, str(path), "not a JSON object")
    return value


def _no_weights(directory: Path) -> ModelError:
    pickled = sorted(file.name for file in directory.iterdir() if file.suffix in _PICKLE_SUFFIXES)
    if pickled:
        return ModelError(
            "model", pickled[0], "pickled weights can run code and are not read: convert the model to safetensors"
        )
    return ModelError("model", str(directory), f"has neither {SINGLE_FILE} nor {INDEX_FILE}")


def _read_index(path: Path) -> dict[str, str]:
    placed = read_json(path).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise ModelError(f"{path.name}: weight_map", placed, "must be an object of tensor names and file names")
    for name, file in placed.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise ModelError(f"{path.name}: {name}", file, "must be the plain name of a .safetensors file")
    return placed


def _read_header(path: Path) -> list[TensorEntry]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if len(prefix) < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise ModelError(path.name, size, "bytes: truncated or not a safetensors file")
            raw = file.read(length)
    except OSError as error:
        raise ModelError(path.name, str(path), error.strerror or "cannot be read") from None
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        entries = [_parse_entry(path, 8 + length, name, fields) for name, fields in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(path.name, str(path), f"malformed safetensors header ({error})") from None
    for entry in entries:
        if entry.begin + entry.nbytes > size:
            raise ModelError(entry.name, size, f"bytes in {path.name}, but the tensor ends later: truncated file")
    return entries


def _parse_entry(path: Path, data_start: int, name: str, fields: dict[str, Any]) -> TensorEntry:
    begin, end = (int(offset) for offset in fields["data_offsets"])
    shape = tuple(int(length) for length in fields["shape"])
    dtype = str(fields["dtype"])
    if not 0 <= begin <= end or any(length < 0 for length in shape):
        raise ModelError(name, [begin, end], f"impossible byte range or shape in {path.name}")
    if dtype in PLAIN_BYTES and math.prod(shape) * PLAIN_BYTES[dtype] != end - begin:
        raise ModelError(name, list(shape), f"shape and byte range disagree in {path.name}")
    return TensorEntry(name, path, dtype, shape, data_start + begin, end - begin)
