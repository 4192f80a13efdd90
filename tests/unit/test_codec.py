"""Hostile bytes: decode raises FrameError and nothing else, and what it lets through is a valid message."""

from array import array
from dataclasses import MISSING, dataclass, fields, replace
from typing import Annotated, Any, ClassVar

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.codec import (
    MAX_CONTAINERS,
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    FrameError,
    RefusedFrames,
    Struct,
    checked,
    decode,
    encode,
    message,
    message_types,
    schema_of,
)
from common.fields import (
    Bool,
    Bytes,
    FieldError,
    Float,
    Floats,
    Int,
    IntMap,
    Ints,
    ListOf,
    MapOf,
    Maybe,
    OneOf,
    Str,
)
from common.messages import Abort, AddRequest, Beat, Generate, GetStats, Ready, Stats, TokenBatch, ints
from common.sampling_params import Grammar, SamplingParams
from tests.examples import examples
from tests.helpers_wire import whole_body
from tests.unit.wire_strategies import messages_of

ALL = message_types()
any_message = st.sampled_from(ALL).flatmap(messages_of)

# What msgpack can carry, valid for us or not: extreme numbers, odd keys, nesting, extension types.
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=16)
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=4))
    | st.just(msgpack.Timestamp(1, 1))
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4) | st.integers(-9, 9), inner, max_size=3)
    ),
    max_leaves=12,
)


def pack(body: Any) -> bytes:
    return bytes(msgpack.packb(body))


def refused(frame: bytes, allowed: Any = ALL, **options: Any) -> FrameError:
    with pytest.raises(FrameError) as caught:
        decode(frame, allowed, **options)
    return caught.value


def decodes_or_refuses(frame: bytes) -> None:
    """Only FrameError may come out; a message that comes out is one that we could have sent."""
    try:
        msg = decode(frame, ALL)
    except FrameError:
        return
    assert decode(encode(msg), ALL) == msg


@settings(max_examples=examples(300))
@given(st.binary(max_size=200))
@example(b"")
@example(b"\xc1")
@example(b"\xdd\xff\xff\xff\xff")  # an array that claims four billion entries
@example(b"\xdf\xff\xff\xff\xff")  # a map that does
@example(b"\xc6\xff\xff\xff\xff")  # four gigabytes of bytes
@example(b"\xc9\xff\xff\xff\xff\x00")  # an extension of that size
@example(b"\xd6\xff\x00\x00\x00\x00")  # a timestamp
def test_random_bytes(frame: bytes) -> None:
    decodes_or_refuses(frame)


@settings(max_examples=examples(300))
@given(any_message, st.data())
def test_mutated_frames(msg: Any, data: st.DataObject) -> None:
    frame = bytearray(encode(msg))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(frame) - 1))
        how = data.draw(st.sampled_from(("set", "insert", "delete")))
        if how == "set":
            frame[at] = data.draw(st.integers(0, 255))
        elif how == "insert":
            frame[at:at] = data.draw(st.binary(max_size=8))
        elif len(frame) > 1:
            del frame[at]
    decodes_or_refuses(bytes(frame))


@given(any_message)
def test_every_truncation_is_refused(msg: Any) -> None:
    frame = encode(msg)
    for length in range(len(frame)):
        assert refused(frame[:length]).cause == "malformed"


@given(any_message, st.binary(min_size=1, max_size=5))
def test_trailing_bytes_are_refused(msg: Any, tail: bytes) -> None:
    assert refused(encode(msg) + tail).cause == "malformed"


@settings(max_examples=examples(300))
@given(st.sampled_from([cls.TAG for cls in ALL]), st.lists(values, max_size=16))
def test_well_formed_frames_with_arbitrary_fields(tag: int, fields: list[Any]) -> None:
    decodes_or_refuses(pack([PROTOCOL_VERSION, tag, *fields]))


@settings(max_examples=examples(400))
@given(any_message, values, st.data())
def test_one_arbitrary_field(msg: Any, value: Any, data: st.DataObject) -> None:
    body = whole_body(msg)
    if len(body) == 2:
        return
    position = data.draw(st.integers(2, len(body) - 1))
    body[position] = value
    frame = pack(body)
    try:
        decode(frame, ALL)
    except FrameError as error:
        assert error.cause in ("invalid", "malformed")
        assert error.cause == "malformed" or error.field


@given(any_message, st.integers(1, 3))
def test_extra_fields_are_refused(msg: Any, amount: int) -> None:
    assert refused(pack(whole_body(msg) + [0] * amount)).cause == "invalid"


@given(any_message)
def test_last_fields_may_be_left_out_where_they_have_defaults(msg: Any) -> None:
    """A frame ends with the first field that is needed; from there on every length says the same as with defaults."""
    body, columns = whole_body(msg), fields(type(msg))
    needed = 2 + max((i + 1 for i, f in enumerate(columns) if f.default is f.default_factory is MISSING), default=0)
    for length in range(2, needed):
        assert refused(pack(body[:length])).cause == "invalid"
    whole = decode(pack(body), ALL)
    assert whole == msg and decode(encode(msg), ALL) == msg
    sent = msgpack.unpackb(encode(msg))
    assert len(sent) >= needed
    for length in range(needed, len(body) + 1):
        left_out = {f.name: f.default for f in columns[length - 2 :] if f.default is not MISSING}
        left_out |= {f.name: f.default_factory() for f in columns[length - 2 :] if f.default_factory is not MISSING}
        try:
            expected = replace(msg, **left_out)
        except ValueError:  # columns that do not fit any more
            assert refused(pack(body[:length])).cause == "invalid"
            continue
        assert decode(pack(body[:length]), ALL) == expected
        assert (expected == msg) == (length >= len(sent)), "what is sent is the shortest"


@pytest.mark.parametrize(
    "version",
    [0, PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1, -1, 2**63, None, True, "1", float(PROTOCOL_VERSION), [], {}],
    ids=repr,
)
def test_wrong_versions(version: Any) -> None:
    assert refused(pack([version, Beat.TAG])).cause == "version"


@pytest.mark.parametrize("tag", [0, 127, -1, 2**63, None, True, "2", 2.0, [2], {}], ids=repr)
def test_wrong_tags(tag: Any) -> None:
    assert refused(pack([PROTOCOL_VERSION, tag, 1])).cause == "unknown"


@pytest.mark.parametrize("body", [None, 1, "x", b"x", {}, {"a": 1}, [], [1]], ids=repr)
def test_frames_that_are_no_messages(body: Any) -> None:
    assert refused(pack(body)).cause == "malformed"


def test_only_allowed_messages_pass() -> None:
    assert refused(encode(Abort(1)), {GetStats}).cause == "unknown"
    assert decode(encode(Abort(1)), {GetStats, Abort}) == Abort(1)


@pytest.mark.parametrize("depth", [10, 500, 5_000, 100_000])
@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a"], ids=["lists", "maps"])
def test_deep_nesting(depth: int, opening: bytes) -> None:
    nested = opening * depth + b"\xc0"
    assert refused(nested).cause == "malformed"
    assert refused(bytes([0x93, PROTOCOL_VERSION, 3]) + nested).cause in ("malformed", "invalid")


def test_oversized_frames_are_refused_before_they_are_parsed() -> None:
    frame = encode(Abort(1))
    assert refused(frame, max_bytes=len(frame) - 1).cause == "oversized"
    assert decode(frame, ALL, max_bytes=len(frame)) == Abort(1)
    assert refused(bytes(MAX_FRAME_BYTES + 1)).cause == "oversized"


def test_a_message_that_nobody_would_take_is_not_sent() -> None:
    too_long = array("i", bytes(MAX_FRAME_BYTES))
    draw = SamplingParams().draw(0)
    with pytest.raises(FrameError, match="oversized"):
        encode(AddRequest(1, too_long, 1, array("i"), draw))


@given(st.integers(-(2**70), 2**70), st.integers(0, 400), st.text(max_size=300) | st.just("\ud800"))
def test_a_sender_knows_what_would_be_refused(number: int, entries: int, label: str) -> None:
    """Its own check, which names the field, and the receiver's say the same."""
    msg = Ready("worker-0", 1, {f"n{i}": number for i in range(entries)}, {"architecture": label})
    try:
        frame = encode(msg)
        taken = decode(frame, {Ready}) == msg
    except (FrameError, OverflowError, UnicodeEncodeError):
        taken = False
    if taken:
        assert checked(msg) is msg
    else:
        with pytest.raises(FieldError, match=r"^Ready\.(info|labels\.architecture)"):
            checked(msg)


def test_non_utf8_and_surrogates_are_refused() -> None:
    body = msgpack.unpackb(encode(Ready("worker", 1, {})))
    for raw in (b"\xff\xfe", b"\xed\xa0\x80", b"\xc0\x80"):  # no UTF-8, a surrogate, an overlong NUL
        body[2] = raw.decode("latin-1")
        frame = pack(body)
        damaged = frame.replace(raw.decode("latin-1").encode(), raw)
        damaged = damaged.replace(bytes([0xA0 + len(body[2].encode())]), bytes([0xA0 + len(raw)]), 1)
        assert refused(damaged).cause == "malformed"
    with pytest.raises(FieldError, match="Unicode"):
        Str(10).unpack("\ud800", "name")


def test_non_string_and_oversized_map_keys_are_refused() -> None:
    for key in (1, b"bytes", "x" * 65, ""):
        frame = pack([PROTOCOL_VERSION, Stats.TAG, 1, {key: 1}])
        assert refused(frame).cause in ("invalid", "malformed")
    many = {f"k{i}": i for i in range(1025)}
    assert refused(pack([PROTOCOL_VERSION, Stats.TAG, 1, many])).field == "values"


def test_an_array_of_the_wrong_width_is_not_sent() -> None:
    """array("q") bytes read as int32 would be twice as many wrong tokens."""
    with pytest.raises(TypeError, match="typecode"):
        Floats(9).pack(array("d", [1.0]))
    with pytest.raises(TypeError, match="typecode"):
        encode(AddRequest(1, array("q", [1, 2]), 1, array("i"), SamplingParams().draw(0)))


def test_a_tag_is_taken_once() -> None:
    @dataclass(frozen=True, slots=True)
    class Intruder:
        TAG: ClassVar[int] = Abort.TAG
        rid: Annotated[int, Int(0, 1)]

    with pytest.raises(TypeError, match="Abort"):
        message(Intruder)
    assert decode(encode(Abort(1)), ALL) == Abort(1)


def test_a_field_without_a_checker_is_a_programming_error() -> None:
    @dataclass(frozen=True, slots=True)
    class Unchecked:
        count: int

    with pytest.raises(TypeError, match=r"Unchecked\.count"):
        schema_of(Unchecked)


def test_refusals_are_counted_by_cause() -> None:
    counted = RefusedFrames()
    for frame in (b"", b"\xc1", pack([PROTOCOL_VERSION + 1, 9]), pack([PROTOCOL_VERSION, 2, -1])):
        counted.count(refused(frame))
    assert (counted.total, dict(counted.by_cause)) == (4, {"malformed": 2, "version": 1, "invalid": 1})


@pytest.mark.parametrize(
    ("checker", "wrong", "limit"),
    [
        (Int(1, 9), 10, "between 1 and 9"),
        (Int(1, 9), True, "integer"),
        (Float(0.0, 2.0), 2.5, "at most 2"),
        (Float(0.0, 1.0, open_low=True), 0.0, "more than 0"),
        (Float(0.0, 1.0), float("nan"), "at most 1"),
        (Float(0.0, 1.0), 10**400, "at most 1"),
        (Bool(), 1, "true or false"),
        (Str(3), "abcd", "0 to 3"),
        (Str(3, 1), "", "1 to 3"),
        (Bytes(2), b"abc", "at most 2"),
        (Bytes(2), "ab", "bytes"),
        (Ints(1), array("i", [1, 2]).tobytes(), "at most 1"),
        (Ints(9), b"\0" * 5, "4-byte"),
        (Ints(9), array("i", [-1]).tobytes(), "between 0"),
        (Ints(9), array("i", [1, -1]).tobytes(), "between 0"),
        (Ints(9, 0, 5), array("i", [6]).tobytes(), "and 5"),
        (Ints(9, 0, 5), array("i", [0, 6]).tobytes(), "and 5"),
        (Floats(1), array("f", [1, 2]).tobytes(), "at most 1"),
        (Floats(9), b"\0" * 5, "4-byte"),
        (Floats(9), array("f", [1, float("nan")]).tobytes(), "finite"),
        (Floats(9), array("f", [float("inf"), 1]).tobytes(), "finite"),
        (Floats(9), [1.0], "raw bytes"),
        (OneOf(("a", "b")), "c", "one of a, b"),
        (OneOf(("a", "b")), ["a"], "one of a, b"),
        (Ints(9), [1], "raw bytes"),
        (ListOf(Bool(), 1), [True, True], "0 to 1"),
        (ListOf(Bool(), 1), [1], "true or false"),
        (MapOf(Bool(), 1), {"a": True, "b": True}, "at most 1"),
        (MapOf(Bool(), 1), [], "map"),
        (IntMap(Ints(1), Bool()), [array("i", [1, 2]).tobytes(), [True, True]], "at most 1"),
        (IntMap(Ints(9), Bool()), [array("i", [1, 1]).tobytes(), [True, True]], "no key twice"),
        (IntMap(Ints(9), Bool()), [array("i", [1, 2]).tobytes(), [True]], "one value for each key"),
        (IntMap(Ints(9), Bool()), [array("i", [1]).tobytes(), [1]], "true or false"),
        (IntMap(Ints(9), Bool()), [array("i", [1]).tobytes(), {1: True}], "map from integers"),
        (IntMap(Ints(9), Bool()), [b"", [], []], "map from integers"),
        (IntMap(Ints(9), Bool()), {1: True}, "map from integers"),
        (IntMap(Ints(9), Bool()), {0: b"", 1: []}, "map from integers"),
        (Maybe(Bool()), 1, "true or false"),
        (Struct(Grammar), 5, "a Grammar"),
        (Struct(Grammar), "abcde", "a Grammar"),
        (Struct(Grammar), [], "1 to 5 fields"),
        (ListOf(Bool(), 1), 5, "a list"),
        (ListOf(Bool(), 1), "a", "a list"),
        (Int(1, 9), 1.0, "integer"),
        (Ints(9), 5, "raw bytes"),
    ],
    ids=repr,
)
def test_checkers_name_field_and_limit(checker: Any, wrong: Any, limit: str) -> None:
    with pytest.raises(FieldError) as caught:
        checker.unpack(wrong, "what")
    assert caught.value.field.startswith("what") and limit in caught.value.problem
    assert len(caught.value.problem) < 200


@pytest.mark.parametrize(
    ("checker", "limits"),
    [
        (Int(1, 9), [1, 9]),
        (Float(0.0, 2.0), [0.0, 2.0]),
        (Float(0.0, 1.0, open_low=True), [5e-324, 1.0]),
        (Str(3, 1), ["a", "abc", "\U0001f642" * 3]),
        (OneOf(("a", "b")), ["a", "b"]),
        (Bytes(2), [b"", b"ab"]),
        (Ints(2, 0, 5), [array("i"), array("i", [0, 5]), array("i", [5, 0])]),
        (Ints(2, -(2**63), 2**63 - 1, "q"), [array("q", [-(2**63), 2**63 - 1])]),
        (Floats(2), [array("f"), array("f", [-(2.0**127), 2.0**127])]),
        (ListOf(Bool(), 2, 1), [(True,), (True, False)]),
        (MapOf(Bool(), 1), [{}, {"a": True}, {"x" * 64: False}]),
        (IntMap(Ints(2, 0, 5), Int(1, 9)), [{}, {5: 1, 0: 9}]),
        (Maybe(Bool()), [None, True]),
    ],
    ids=repr,
)
def test_what_is_just_allowed_is_taken_and_comes_back(checker: Any, limits: list[Any]) -> None:
    for value in limits:
        assert checker.unpack(msgpack.unpackb(msgpack.packb(checker.pack(value))), "what") == value


def test_the_sender_of_an_oversized_request_is_named():
    frame = encode(Generate(77, "x" * 5000, None, None, SamplingParams()))
    with pytest.raises(FrameError) as refused:
        decode(frame, {Generate}, max_bytes=4000)
    assert refused.value.cause == "oversized" and refused.value.rids == (77,)
    other_version = msgpack.packb([PROTOCOL_VERSION + 1, *msgpack.unpackb(frame)[1:]])
    unnamed = pack([PROTOCOL_VERSION, [], 77])
    for other in (b"\xc1" * 5000, b"", other_version, unnamed, encode(Abort(77))):
        with pytest.raises(FrameError) as refused:
            decode(other + b"\x00" * 5000, {Generate}, max_bytes=4000)
        assert refused.value.rids == ()


def test_all_of_whom_a_refused_frame_speaks_are_named() -> None:
    columns = TokenBatch(ints(5, 6), ints(1, 1), ints(8, 9), bytes(2), ints(0, 0), array("q", [1]))
    body = whole_body(columns)
    body[4] = b"odd"
    assert refused(encode(columns), max_bytes=40).rids == refused(pack(body)).rids == (5, 6)


@pytest.mark.parametrize("empty", [b"\x90", b"\x80"])
def test_a_frame_of_nothing_but_containers_is_refused_before_it_fills_memory(empty: bytes) -> None:
    count = 4 * MAX_CONTAINERS
    error = refused(b"\xdd" + count.to_bytes(4, "big") + empty * count)
    assert error.cause == "malformed" and str(MAX_CONTAINERS) in error.problem
