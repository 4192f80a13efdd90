"""HTTP as bytes on sockets, for what well-behaved clients never do and for thousands of connections at once."""

import asyncio
import json
import socket
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


def head(path: str, length: int) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {length}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def post(path: str, body: Any) -> bytes:
    """A whole request."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head(path, len(raw)) + raw


async def dial(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(url)
    return await asyncio.open_connection(parts.hostname, parts.port)


def dial_plain(url: str, *, receive_buffer: int | None = None) -> socket.socket:
    """A small `receive_buffer` makes the sender wait early."""
    parts = urlsplit(url)
    plain = socket.socket()
    if receive_buffer is not None:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    plain.settimeout(PATIENCE_S)
    plain.connect((parts.hostname, parts.port))
    return plain


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    """A whole answer, in chunks too."""
    raw = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in raw[1:] if line)}
    if headers.get("transfer-encoding") == "chunked":
        parts = []
        while size := int((await reader.readuntil(b"\r\n")).strip(), 16):
            parts.append((await reader.readexactly(size + 2))[:-2])
        await reader.readexactly(2)
        body = b"".join(parts)
    else:
        body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Answer(int(raw[0].split()[1]), headers, body)


async def exchange(url: str, request: bytes) -> Answer:
    """One request on a connection of its own."""
    reader, writer = await dial(url)
    writer.write(request)
    try:
        return await read_answer(reader)
    finally:
        writer.close()
