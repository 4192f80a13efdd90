"""uvicorn's HTTP protocol with what it lacks: limits on the size and the slowness of a request's head, refusals in
OpenAI's format, and answers to those who would rather speak another protocol."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import httptools
from pydantic_core import to_json
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from gateway_proc.errors import ApiError

MAX_HEAD_BYTES = 65536  # request line and headers
MAX_HEADERS = 256
HEAD_S = 30.0  # a request's head must have come by then


class _HeadTooLarge(Exception):
    pass


class _Parser(httptools.HttpRequestParser):
    """Goes on in HTTP/1.1 where a client offers to upgrade, as RFC 9110 allows. httptools itself stops behind the head
    of such a request and takes it to have no body; Java's HttpClient offers h2c with every first one."""

    def __init__(self, protocol: "Protocol"):
        super().__init__(protocol)
        self._protocol = protocol

    def feed_data(self, data: Any) -> None:
        rest, parser = memoryview(data), self
        while True:
            try:
                httptools.HttpRequestParser.feed_data(parser, rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not self._protocol.offered:
                    raise
                (end,) = upgrade.args
                rest, parser = rest[end:], self._protocol.read_again()


def _until_close(cycle: RequestResponseCycle) -> Callable[[Any], Coroutine[Any, Any, None]]:
    """How an answer is sent in HTTP/1.0, which has no chunks: one of unknown length ends with its connection."""
    send, open_end = cycle.send, False

    async def sending(message: Any) -> None:
        nonlocal open_end
        if message["type"] == "http.response.start":
            open_end = all(name != b"content-length" for name, _ in message["headers"])
            if open_end:
                cycle.chunked_encoding = False
        elif open_end:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return sending


class Protocol(HttpToolsProtocol):
    """One connection. `scope["abort"]` cuts it off without waiting for its reader; `scope["flow"]` says whether the
    reader is behind (`write_paused`)."""

    _head_bytes = 0  # received while the head is not complete
    _header_bytes = 0
    _in_head = True
    _timer: asyncio.TimerHandle | None = None
    offered = False  # the head that has come offers an upgrade

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.parser = _Parser(self)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]
        self.scope["flow"] = self.flow  # type: ignore[typeddict-unknown-key]
        self._header_bytes = 0
        if self._timer is None:
            self._start_timer()

    def on_url(self, url: bytes) -> None:
        self._header_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value) + 4
        if self._header_bytes > MAX_HEAD_BYTES or len(self.headers) >= MAX_HEADERS:
            self._head_bytes = MAX_HEAD_BYTES + 1
            raise _HeadTooLarge
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self.offered = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if self.offered:
            return
        self._in_head, self._head_bytes = False, 0
        self._stop_timer()
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            self.cycle.send = _until_close(self.cycle)  # type: ignore[method-assign, assignment]

    def read_again(self) -> _Parser:
        """Read the head that has come once more, without its offer. Returns the parser for what follows."""
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = parser = _Parser(self)
        parser.feed_data(b"\r\n".join([*lines, b"", b""]))
        return parser

    def on_message_complete(self) -> None:
        if self.offered:
            return
        self._in_head = True  # already before the next request begins, so that what is none counts too
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, or too much of it, and close the connection."""
        if self._head_bytes > MAX_HEAD_BYTES:
            problem = f"the request line and headers have more than {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} headers"
            self._refuse(ApiError(431, problem, code="too_large"))
        else:
            self._refuse(ApiError(400, "this is not a valid HTTP request", code="invalid_http"))

    def _refuse(self, error: ApiError) -> None:
        body = to_json(error.body())
        head = [STATUS_LINE[error.status], b"content-type: application/json\r\nconnection: close\r\n"]
        head.append(b"content-length: %d\r\n\r\n" % len(body))
        self.transport.write(b"".join([*head, body]))
        self.transport.close()

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(HEAD_S, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self._refuse(ApiError(408, f"the request's head did not come within {HEAD_S:g} s", code="timeout"))

    def handle_websocket_upgrade(self) -> Any:
        raise NotImplementedError  # ws is off: uvicorn never calls this
