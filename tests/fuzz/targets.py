"""What is fuzzed below HTTP: each target takes any bytes and must come back without an exception.

A target raises when what it checks does not hold; that, and any exception of the code under test, is a finding.
"""

import json
from collections.abc import Callable
from itertools import count
from typing import Any

import zmq

from client_cli.sse import SseError, SseParser
from common.codec import FrameError, decode, encode, message_types
from common.messages import Abort, AddRequest, GetStats
from common.parsers import THINK, Reasoning, ToolFormat, make_parser
from common.parsers.reasoning import APERTUS, COHERE, GEMMA, HUNYUAN, HUNYUAN3, MISTRAL, SEED
from common.sockets import Inbox
from common.stamps import Stamper
from gateway_proc.app import ROUTES
from gateway_proc.errors import ApiError
from gateway_proc.requests import BodyReader

_ALL = frozenset(message_types())
_BODIES = [route.body for route in ROUTES if route.body is not None]
_READER = BodyReader(2**26)
_FORMATS = (None, *ToolFormat)
_TAGS = (THINK, HUNYUAN, HUNYUAN3, COHERE, GEMMA, SEED, MISTRAL, APERTUS)


def frame(data: bytes) -> None:
    """A frame is refused with FrameError, or it is a message that comes back as it was."""
    try:
        msg = decode(data, _ALL)
    except FrameError as error:
        assert error.cause and str(error)
        return
    assert decode(encode(msg), _ALL) == msg


def link(data: bytes) -> None:
    """Whatever comes, an inbox between processes takes it and hears its partner's next frame, unless it says that
    something is lost."""
    address = "ipc:///x/scheduler-0.sock"
    with zmq.Context.instance().socket(zmq.PULL) as socket:
        inbox = Inbox(socket, Abort, AddRequest, GetStats, senders=("tokenizer",), address=address)
    stamper = Stamper("tokenizer", address)
    first = stamper.stamp()
    assert inbox.parse(first + encode(Abort(1))) == Abort(1)
    assert inbox.parse(data) is None
    assert inbox.parse(first + data) is None
    assert inbox.parse(stamper.stamp() + encode(Abort(2))) == Abort(2)


def body(data: bytes) -> None:
    """A body is refused with a 4xx, or it is one."""
    kind = _BODIES[data[0] % len(_BODIES)] if data else _BODIES[0]
    try:
        model = _READER.parse(data[1:], kind)
    except ApiError as error:
        assert 400 <= error.status < 500 and error.message
        json.dumps(error.body())
        return
    model.unknown_fields()


def answer(data: bytes) -> None:
    """The parser of tool calls and reasoning finds the same, however the text is cut."""
    head, text = data[:2].ljust(2, b"\0"), data[2:].decode(errors="replace")
    tools, reasoning = _FORMATS[head[0] % len(_FORMATS)], list(Reasoning)[head[0] // 32 % len(Reasoning)]
    step, tags = head[1] % 7 + 1, _TAGS[head[1] // 8 % len(_TAGS)]

    def read(pieces: list[str]) -> list[Any]:
        ids = count()
        parser = make_parser(tools=tools, reasoning=reasoning, tags=tags, new_id=lambda: f"id{next(ids)}")
        found = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
        merged: list[Any] = []
        for delta in found:
            same = merged and type(merged[-1]) is type(delta) and hasattr(delta, "text")
            if same and getattr(merged[-1], "index", 0) == getattr(delta, "index", 0):
                values = {name: getattr(delta, name) for name in delta.__dataclass_fields__}
                merged[-1] = type(delta)(**values | {"text": merged[-1].text + delta.text})
            else:
                merged.append(delta)
        return merged

    assert read([text]) == read([text[at : at + step] for at in range(0, len(text), step)])


def events(data: bytes) -> None:
    """Server-sent events are the same, however they are cut."""

    def read(pieces: list[bytes]) -> list[str] | None:
        parser = SseParser()
        try:
            return [event for piece in pieces for event in parser.feed(piece)]
        except SseError:
            return None

    step = data[0] % 5 + 1 if data else 1
    assert read([data]) == read([data[at : at + step] for at in range(0, len(data), step)])


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target for target in (frame, link, body, answer, events)
}
