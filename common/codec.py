"""msgpack frames <-> message dataclasses.

A frame is the msgpack array `[PROTOCOL_VERSION, tag, field, field, ...]` in the order of the dataclass, so names are
never repeated on the wire, and last fields that hold their defaults are left out. `decode` raises `FrameError` and
nothing else, whatever the bytes are.
"""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import MISSING, Field, dataclass, fields
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Protocol, TypeVar, get_args, get_origin, get_type_hints

import msgpack

from common.fields import PLAIN, Checker, FieldError

PROTOCOL_VERSION = 15
MAX_FRAME_BYTES = 32 * 2**20
MAX_CONTAINERS = 2**17  # lists and maps of a frame: empty ones take a byte there, and seventy in memory


class FrameError(ValueError):
    """A frame that is refused. `cause` is a short name for counting, `field` names the offending field where one is
    to blame, and `rids` are the requests that the frame spoke of where they could be read (so that somebody can be
    told).
    """

    def __init__(self, cause: str, problem: str, field: str = "", rids: tuple[int, ...] = ()):
        super().__init__(f"{cause}: {problem}")
        self.cause = cause
        self.problem = problem
        self.field = field
        self.rids = rids


class Message(Protocol):
    TAG: ClassVar[int]
    __dataclass_fields__: ClassVar[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Layout:
    """How the fields of a dataclass lie on the wire.

    `values_of` takes them from an object, in order. `packs` and `unpacks` are the two methods of their checkers, None
    for a value that is carried as it is. Of the last ones `defaults` may be left out, the last field's comes first.
    """

    names: tuple[str, ...]
    values_of: Callable[[Any], tuple[Any, ...]]
    packs: tuple[Callable[[Any], Any] | None, ...]
    unpacks: tuple[tuple[Callable[[Any, str], Any], str], ...]
    defaults: tuple[Any, ...]

    def pack(self, value: Any) -> list[Any]:
        """What msgpack carries of an object: its fields up to the last one that does not hold its default."""
        values = self.values_of(value)
        length = len(values)
        for default in self.defaults:
            if values[length - 1] != default:
                break
            length -= 1
        return [v if pack is None else pack(v) for v, pack in zip(values[:length], self.packs, strict=False)]

    def unpack(self, cls: type, wire: list[Any], prefix: str) -> Any:
        """The object. Raises FieldError, with `prefix` before the name of the field."""
        most = len(self.names)
        if not most - len(self.defaults) <= len(wire) <= most:
            least = f"{most - len(self.defaults)} to " if self.defaults else ""
            raise FieldError(prefix + cls.__name__, f"must have {least}{most} fields, got {len(wire)}")
        if prefix:
            return cls(*[unpack(v, prefix + name) for v, (unpack, name) in zip(wire, self.unpacks, strict=False)])
        return cls(*[unpack(v, name) for v, (unpack, name) in zip(wire, self.unpacks, strict=False)])


_BY_TAG: dict[int, type[Message]] = {}
_CHECKERS: dict[type, tuple[tuple[str, Checker], ...]] = {}
_LAYOUTS: dict[type, Layout] = {}
_M = TypeVar("_M", bound=type)
_T = TypeVar("_T", bound=Message)


def schema_of(cls: type) -> tuple[tuple[str, Checker], ...]:
    """The (name, checker) pairs of a dataclass whose fields are all `Annotated[type, checker]`."""
    known = _CHECKERS.get(cls)
    if known is None:
        hints = get_type_hints(cls, include_extras=True)
        known = tuple((f.name, _checker_of(cls, f.name, hints[f.name])) for f in fields(cls))
        _CHECKERS[cls] = known
    return known


def layout_of(cls: type) -> Layout:
    """The layout of a dataclass that `schema_of` takes."""
    known = _LAYOUTS.get(cls)
    if known is None:
        schema = schema_of(cls)
        names = tuple(name for name, _ in schema)
        packs = tuple(None if isinstance(checker, PLAIN) else checker.pack for _, checker in schema)
        unpacks = tuple((checker.unpack, name) for name, checker in schema)
        known = _LAYOUTS[cls] = Layout(names, _getter(names), packs, unpacks, tuple(_defaults(fields(cls))))
    return known


def _getter(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: tuple(getattr(value, name) for name in names)


def _defaults(columns: tuple[Field[Any], ...]) -> list[Any]:
    """Of the last fields, all that have one, beginning with the last."""
    found: list[Any] = []
    for column in reversed(columns):
        if column.default_factory is not MISSING:
            found.append(column.default_factory())
        elif column.default is not MISSING:
            found.append(column.default)
        else:
            break
    return found


def _checker_of(cls: type, name: str, hint: Any) -> Checker:
    if get_origin(hint) is not Annotated:
        raise TypeError(f"{cls.__name__}.{name} must be declared as Annotated[type, checker]")
    checker: Checker = get_args(hint)[1]
    return checker


def message(cls: _M) -> _M:
    """Register a dataclass as a message; its `TAG` is its name on the wire."""
    tag = cls.TAG  # type: ignore[attr-defined]
    if tag in _BY_TAG:
        raise TypeError(f"tag {tag} is taken by {_BY_TAG[tag].__name__}")
    _BY_TAG[tag] = cls
    return cls


def message_types() -> tuple[type[Message], ...]:
    return tuple(_BY_TAG.values())


@dataclass(frozen=True, slots=True)
class Struct:
    """A checker for a nested dataclass, packed as a list of its fields."""

    cls: type

    def pack(self, value: Any) -> list[Any]:
        return layout_of(self.cls).pack(value)

    def unpack(self, wire: Any, field: str) -> Any:
        if type(wire) is not list:
            raise FieldError(field, f"must be a {self.cls.__name__}, not {type(wire).__name__}")
        return layout_of(self.cls).unpack(self.cls, wire, f"{field}.")


def encode(msg: Message) -> bytes:
    """One frame. Raises FrameError when the message is larger than any receiver accepts."""
    body = [PROTOCOL_VERSION, msg.TAG, *layout_of(type(msg)).pack(msg)]
    frame: bytes = msgpack.packb(body, use_bin_type=True)
    if len(frame) > MAX_FRAME_BYTES:
        raise FrameError("oversized", f"{len(frame)} bytes, the limit is {MAX_FRAME_BYTES}")
    return frame


def checked(msg: _T) -> _T:
    """The message, if whoever receives it takes it. Raises FieldError naming message, field and limit: a sender that
    waits for what follows should end with that, as nothing follows a frame that is refused."""
    layout = layout_of(type(msg))
    layout.unpack(type(msg), layout.pack(msg), f"{type(msg).__name__}.")
    return msg


def decode(frame: bytes | memoryview, allowed: Collection[type], *, max_bytes: int = MAX_FRAME_BYTES) -> Any:
    """The message in a frame, which must be one of the `allowed` types. Raises FrameError only."""
    if len(frame) > max_bytes:
        rids = _rids_of_start(frame[:64], allowed)
        raise FrameError("oversized", f"the message has {len(frame)} bytes, the limit is {max_bytes}", rids=rids)
    try:
        count = _Containers() if len(frame) > MAX_CONTAINERS else None  # else there cannot be too many
        body = msgpack.unpackb(
            frame, raw=False, strict_map_key=True, use_list=True, max_ext_len=0, list_hook=count, object_hook=count
        )
    except FrameError:
        raise
    except Exception as error:  # msgpack raises many kinds: truncated, extra data, bad UTF-8, nesting, key types
        raise FrameError("malformed", f"not a msgpack frame ({type(error).__name__})") from None
    if type(body) is not list or len(body) < 2:
        raise FrameError("malformed", "a frame is a list of version, tag and fields")
    version, tag, *values = body
    if type(version) is not int or version != PROTOCOL_VERSION:
        raise FrameError("version", f"this side speaks protocol version {PROTOCOL_VERSION}")
    cls = _BY_TAG.get(tag) if type(tag) is int else None
    if cls is None or cls not in allowed:
        raise FrameError("unknown", "this socket does not take such a message")
    try:
        return layout_of(cls).unpack(cls, values, "")
    except FieldError as error:
        raise FrameError("invalid", error.problem, error.field, _readable_rids(cls, values)) from None
    except ValueError as error:  # a message's own check across fields
        raise FrameError("invalid", str(error), cls.__name__, _readable_rids(cls, values)) from None


class _Containers:
    """Counts lists and maps while a frame is read."""

    def __init__(self) -> None:
        self._left = MAX_CONTAINERS

    def __call__(self, container: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise FrameError("malformed", f"more than {MAX_CONTAINERS} lists and maps")
        return container


def _rids_of_start(start: bytes | memoryview, allowed: Collection[type]) -> tuple[int, ...]:
    """The request ids at the beginning of a frame that is too large to be read as a whole."""
    unpacker = msgpack.Unpacker(raw=False)
    unpacker.feed(start)
    try:
        unpacker.read_array_header()
        version, tag, first = unpacker.unpack(), unpacker.unpack(), unpacker.unpack()
    except Exception:  # whatever it is, it is not one of our frames
        return ()
    cls = _BY_TAG.get(tag) if type(tag) is int and version == PROTOCOL_VERSION else None
    return _readable_rids(cls, [first]) if cls is not None and cls in allowed else ()


def _readable_rids(cls: type, values: list[Any]) -> tuple[int, ...]:
    """Those in the first field of a message, where that can be read."""
    layout = layout_of(cls)
    name = layout.names[0] if layout.names else ""
    if name not in ("rid", "rids") or not values:
        return ()
    unpack, _ = layout.unpacks[0]
    try:
        found = unpack(values[0], name)
    except FieldError:
        return ()
    return tuple(found) if name == "rids" else (found,)


class RefusedFrames:
    """Counts refused frames by cause."""

    def __init__(self) -> None:
        self.by_cause: Counter[str] = Counter()

    def count(self, error: FrameError) -> None:
        self.by_cause[error.cause] += 1

    @property
    def total(self) -> int:
        return self.by_cause.total()
