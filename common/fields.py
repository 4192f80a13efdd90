"""Field checkers: what a value on the wire may be, and how it is packed.

A message field is declared as `Annotated[python_type, checker]`. A checker has two methods: `pack` turns the
Python value into what msgpack can carry, `unpack` turns it back and refuses anything outside the declared type,
range or size with a `FieldError` that names the field and the limit.
"""

import math
import sys
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    IntArray: TypeAlias = array[int]
    FloatArray: TypeAlias = array[float]
else:
    IntArray = FloatArray = array  # Python 3.11's array cannot be subscripted at run time

_LITTLE_ENDIAN = sys.byteorder == "little"


class FieldError(ValueError):
    """A field holds a value that the schema does not allow. `field` is its name, `problem` says what is allowed."""

    def __init__(self, field: str, problem: str):
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class Checker(Protocol):
    def pack(self, value: Any) -> Any: ...

    def unpack(self, wire: Any, field: str) -> Any: ...


@dataclass(frozen=True, slots=True)
class Int:
    """An integer in [lo, hi]. A bool is not an integer."""

    lo: int
    hi: int

    def pack(self, value: int) -> int:
        return value

    def unpack(self, wire: Any, field: str) -> int:
        if type(wire) is not int:
            raise FieldError(field, f"must be an integer, not {type(wire).__name__}")
        if not self.lo <= wire <= self.hi:
            raise FieldError(field, f"must be between {self.lo} and {self.hi}, got {_short(wire)}")
        return wire


@dataclass(frozen=True, slots=True)
class Float:
    """A finite float in [lo, hi], or in (lo, hi] when `open_low`. NaN and infinities are refused."""

    lo: float
    hi: float
    open_low: bool = False

    def pack(self, value: float) -> float:
        return float(value)

    def unpack(self, wire: Any, field: str) -> float:
        if type(wire) is not float and type(wire) is not int:
            raise FieldError(field, f"must be a number, not {type(wire).__name__}")
        if not self.lo <= wire <= self.hi or (self.open_low and wire == self.lo):
            low = "more than" if self.open_low else "at least"
            raise FieldError(field, f"must be {low} {self.lo:g} and at most {self.hi:g}, got {_short(wire)}")
        return float(wire)


@dataclass(frozen=True, slots=True)
class Bool:
    def pack(self, value: bool) -> bool:
        return value

    def unpack(self, wire: Any, field: str) -> bool:
        if type(wire) is not bool:
            raise FieldError(field, f"must be true or false, not {type(wire).__name__}")
        return wire


@dataclass(frozen=True, slots=True)
class Str:
    """Text of `least` to `most` characters."""

    most: int
    least: int = 0

    def pack(self, value: str) -> str:
        return value

    def unpack(self, wire: Any, field: str) -> str:
        if type(wire) is not str:
            raise FieldError(field, f"must be text, not {type(wire).__name__}")
        if not self.least <= len(wire) <= self.most:
            raise FieldError(field, f"must have {self.least} to {self.most} characters, got {len(wire)}")
        try:
            wire.encode()
        except UnicodeEncodeError:
            raise FieldError(field, "must be valid Unicode text") from None
        return wire


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of a few names."""

    names: tuple[str, ...]

    def pack(self, value: str) -> str:
        return value

    def unpack(self, wire: Any, field: str) -> str:
        if type(wire) is not str or wire not in self.names:
            raise FieldError(field, f"must be one of {', '.join(self.names)}, got {_short(wire)}")
        return wire


@dataclass(frozen=True, slots=True)
class Bytes:
    """At most `most` raw bytes."""

    most: int

    def pack(self, value: bytes) -> bytes:
        return value

    def unpack(self, wire: Any, field: str) -> bytes:
        if type(wire) is not bytes:
            raise FieldError(field, f"must be bytes, not {type(wire).__name__}")
        if len(wire) > self.most:
            raise FieldError(field, f"must have at most {self.most} bytes, got {len(wire)}")
        return wire


@dataclass(frozen=True, slots=True)
class Ints:
    """An `array` of `least` to `most` signed integers, raw little-endian on the wire: typecode "i" (int32) or "q"
    (int64)."""

    most: int
    lo: int = 0
    hi: int = 2**31 - 1
    typecode: str = "i"
    least: int = 0

    def pack(self, value: IntArray) -> bytes:
        if value.typecode != self.typecode:  # would be silently misread by the receiver
            raise TypeError(f"an array of typecode {self.typecode!r} expected, not {value.typecode!r}")
        if _LITTLE_ENDIAN:
            return value.tobytes()
        swapped = array(self.typecode, value)
        swapped.byteswap()
        return swapped.tobytes()

    def unpack(self, wire: Any, field: str) -> IntArray:
        if type(wire) is not bytes:
            raise FieldError(field, f"must be raw bytes, not {type(wire).__name__}")
        values = array(self.typecode)
        if not wire and not self.least:  # most columns of most steps
            return values
        if len(wire) % values.itemsize:
            raise FieldError(field, f"must be whole {values.itemsize}-byte integers, got {len(wire)} bytes")
        values.frombytes(wire)
        if not _LITTLE_ENDIAN:
            values.byteswap()
        if len(values) > self.most:
            raise FieldError(field, f"must have at most {self.most} entries, got {len(values)}")
        if len(values) < self.least:
            raise FieldError(field, f"must have at least {self.least} entries, got {len(values)}")
        if not (self.lo <= min(values) and max(values) <= self.hi):
            raise FieldError(field, f"entries must be between {self.lo} and {self.hi}")
        return values


@dataclass(frozen=True, slots=True)
class Floats:
    """An `array` of finite float32 numbers (typecode "f"), raw little-endian on the wire."""

    most: int

    def pack(self, value: FloatArray) -> bytes:
        if value.typecode != "f":  # would be silently misread by the receiver
            raise TypeError(f"an array of typecode 'f' expected, not {value.typecode!r}")
        if _LITTLE_ENDIAN:
            return value.tobytes()
        swapped = array("f", value)
        swapped.byteswap()
        return swapped.tobytes()

    def unpack(self, wire: Any, field: str) -> FloatArray:
        if type(wire) is not bytes:
            raise FieldError(field, f"must be raw bytes, not {type(wire).__name__}")
        values = array("f")
        if len(wire) % values.itemsize:
            raise FieldError(field, f"must be whole {values.itemsize}-byte numbers, got {len(wire)} bytes")
        values.frombytes(wire)
        if not _LITTLE_ENDIAN:
            values.byteswap()
        if len(values) > self.most:
            raise FieldError(field, f"must have at most {self.most} entries, got {len(values)}")
        if not all(map(math.isfinite, values)):
            raise FieldError(field, "entries must be finite numbers")
        return values


@dataclass(frozen=True, slots=True)
class ListOf:
    """A list of `least` to `most` items, each checked by `item`; a tuple in Python."""

    item: Checker
    most: int
    least: int = 0

    def pack(self, value: tuple[Any, ...]) -> list[Any]:
        return [self.item.pack(v) for v in value]

    def unpack(self, wire: Any, field: str) -> tuple[Any, ...]:
        if type(wire) is not list:
            raise FieldError(field, f"must be a list, not {type(wire).__name__}")
        if not self.least <= len(wire) <= self.most:
            raise FieldError(field, f"must have {self.least} to {self.most} entries, got {len(wire)}")
        return tuple(self.item.unpack(v, f"{field}[{i}]") for i, v in enumerate(wire))


@dataclass(frozen=True, slots=True)
class MapOf:
    """A map from short names to checked values, at most `most` of them."""

    value: Checker
    most: int
    key: Str = Str(64, 1)

    def pack(self, value: dict[str, Any]) -> dict[str, Any]:
        return {k: self.value.pack(v) for k, v in value.items()}

    def unpack(self, wire: Any, field: str) -> dict[str, Any]:
        if type(wire) is not dict:
            raise FieldError(field, f"must be a map, not {type(wire).__name__}")
        if len(wire) > self.most:
            raise FieldError(field, f"must have at most {self.most} entries, got {len(wire)}")
        return {self.key.unpack(k, f"{field} key"): self.value.unpack(v, f"{field}.{k}") for k, v in wire.items()}


@dataclass(frozen=True, slots=True)
class IntMap:
    """A map from integers, checked by `key`, to checked values; a dict in Python, keys and values apart on the wire."""

    key: Ints
    value: Checker

    def pack(self, value: dict[int, Any]) -> list[Any]:
        return [self.key.pack(array(self.key.typecode, value)), [self.value.pack(v) for v in value.values()]]

    def unpack(self, wire: Any, field: str) -> dict[int, Any]:
        if type(wire) is not list or len(wire) != 2 or type(wire[1]) is not list:
            raise FieldError(field, "must be a map from integers")
        keys = self.key.unpack(wire[0], f"{field} keys")
        if len(keys) != len(wire[1]) or len(set(keys)) != len(keys):
            raise FieldError(field, "must have one value for each key, and no key twice")
        return {k: self.value.unpack(v, f"{field}[{k}]") for k, v in zip(keys, wire[1], strict=True)}


@dataclass(frozen=True, slots=True)
class Maybe:
    """None, or what `inner` allows."""

    inner: Checker

    def pack(self, value: Any) -> Any:
        return None if value is None else self.inner.pack(value)

    def unpack(self, wire: Any, field: str) -> Any:
        return None if wire is None else self.inner.unpack(wire, field)


PLAIN = (Int, Bool, Str, OneOf, Bytes)  # checkers of values that msgpack carries as they are


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
