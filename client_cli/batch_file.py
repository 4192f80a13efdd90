"""OpenAI's batch files: lines of requests in, lines of responses out, and what a file left by an interrupted run holds.

{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
{"id": "...", "custom_id": "a", "response": {"status_code": 200, "request_id": "...", "body": {...}}, "error": null}
"""

import json
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from client_cli.display import json_line
from client_cli.openai_body import CHAT, COMPLETIONS

URLS = (CHAT, COMPLETIONS)
MAX_ID_CHARS = 512
_FIELDS = {"custom_id", "method", "url", "body"}


class BatchError(ValueError):
    """A line is not a request of a batch; the text names line and field."""


@dataclass(frozen=True, slots=True)
class Line:
    """A request of the input file."""

    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a request: a response (of any status), or an error when there was none."""

    custom_id: str
    status: int
    body: dict[str, Any] | None
    error: dict[str, str] | None = None

    @property
    def failed(self) -> bool:
        return self.error is not None or self.status != 200

    @property
    def tokens(self) -> tuple[int, int]:
        """Prompt and completion tokens, 0 where the answer does not say."""
        usage = (self.body or {}).get("usage") or {}
        return usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0

    def as_line(self) -> str:
        """A line of the output file."""
        response = None
        if self.body is not None:
            request_id = str(self.body.get("id") or uuid.uuid4().hex)
            response = {"status_code": self.status, "request_id": request_id, "body": self.body}
        values = {
            "id": f"batch_req_{uuid.uuid4().hex}", "custom_id": self.custom_id, "response": response,
            "error": self.error,
        }  # fmt: skip
        return json_line(values)


def read_lines(lines: Iterable[str], name: str) -> list[Line]:
    """The requests of a file. Raises BatchError for the first line that is none, before anything is sent."""
    found = []
    seen: dict[str, int] = {}
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        where = f"{name}, line {number}"
        line = _line(text, where)
        if line.custom_id in seen:
            raise BatchError(f"{where}: custom_id {line.custom_id!r} is that of line {seen[line.custom_id]} too")
        seen[line.custom_id] = number
        found.append(line)
    return found


def _line(text: str, where: str) -> Line:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BatchError(f"{where}: not JSON: {error}") from None
    if type(values) is not dict:
        raise BatchError(f"{where}: must be a JSON object")
    for field in sorted(_FIELDS - set(values)):
        raise BatchError(f"{where}: {field}: is missing")
    for field in sorted(set(values) - _FIELDS):
        raise BatchError(f"{where}: {field}: is not known; known are {', '.join(sorted(_FIELDS))}")
    custom_id, method, url, body = (values[field] for field in ("custom_id", "method", "url", "body"))
    if type(custom_id) is not str or not 0 < len(custom_id) <= MAX_ID_CHARS:
        raise BatchError(f"{where}: custom_id: must be text of 1 to {MAX_ID_CHARS} characters")
    if method != "POST":
        raise BatchError(f"{where}: method: must be POST, got {method!r}")
    if url not in URLS:
        raise BatchError(f"{where}: url: must be one of {', '.join(URLS)}, got {url!r}")
    if type(body) is not dict:
        raise BatchError(f"{where}: body: must be an object")
    if body.get("stream"):
        raise BatchError(f"{where}: body.stream: a batch has no streams")
    return Line(custom_id, url, body)


@dataclass(frozen=True, slots=True)
class Earlier:
    """What the output file of an earlier run holds: the ids of its good and failed lines, and how much of it is whole
    lines, in bytes."""

    done: frozenset[str]
    failed: frozenset[str]
    whole: int


def read_earlier(data: bytes, name: str) -> Earlier:
    """Read an output file. A last line that was cut off does not count; anything else that is no output is refused,
    so that a wrong file name destroys nothing. Raises BatchError."""
    whole = data.rfind(b"\n") + 1
    done: set[str] = set()
    failed: set[str] = set()
    for number, line in enumerate(data[:whole].splitlines(), 1):
        try:
            values = json.loads(line)
            custom_id, response, error = values["custom_id"], values["response"], values["error"]
            good = error is None and response["status_code"] == 200
        except (ValueError, LookupError, TypeError):
            raise BatchError(f"{name}, line {number}: not the output of a batch; name another file") from None
        (done if good else failed).add(custom_id)
    return Earlier(frozenset(done), frozenset(failed - done), whole)


def without(data: bytes, custom_ids: frozenset[str]) -> bytes:
    """An output file without the lines of some requests."""
    return b"".join(line for line in data.splitlines(True) if json.loads(line)["custom_id"] not in custom_ids)
