"""Raw HTTP on a socket, for what well-behaved clients never do."""

import json
import socket
from typing import Any
from urllib.parse import urlsplit

PATIENCE_S = 30.0


def head(path: str, length: int | None, *, method: str = "POST", extra: str = "") -> bytes:
    """A request's head; `length` None leaves Content-Length out."""
    lines = [f"{method} {path} HTTP/1.1", "Host: x", "Content-Type: application/json"]
    if length is not None:
        lines.append(f"Content-Length: {length}")
    return ("\r\n".join(lines) + "\r\n" + extra + "\r\n").encode()


def post(path: str, body: Any) -> bytes:
    """A whole request."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head(path, len(raw)) + raw


def dial(url: str, *, receive_buffer: int | None = None) -> socket.socket:
    """A connection to a server. A small `receive_buffer` makes its sender wait early."""
    parts = urlsplit(url)
    assert parts.hostname and parts.port
    plain = socket.socket()
    if receive_buffer is not None:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    plain.settimeout(PATIENCE_S)
    plain.connect((parts.hostname, parts.port))
    return plain


def until_closed(connection: socket.socket) -> bytes:
    """Everything that comes until the other side closes."""
    parts = []
    while data := connection.recv(65536):
        parts.append(data)
    return b"".join(parts)


def until(connection: socket.socket, mark: bytes) -> bytes:
    """Everything up to and with the chunk that brings `mark`."""
    found = b""
    while mark not in found:
        data = connection.recv(65536)
        assert data, found
        found += data
    return found
