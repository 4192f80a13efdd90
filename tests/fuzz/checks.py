"""The check of ours that schemathesis runs (schemathesis.toml names this module): `no_failure`.

Schemathesis' `not_a_server_error` calls every 5xx a failure of the server. But 504 is what a request with a deadline
asks for when it passes. And an answer that is streamed has said 200 before it fails: its last event tells how.
"""

import json
from typing import Any

import schemathesis
from schemathesis.checks import CheckContext, not_a_server_error
from schemathesis.core.failures import ServerError
from schemathesis.core.transport import Response

from client_cli.sse import SseError, SseParser

DEADLINES = ("deadline_ms", "timeout_ms")  # the names that bodies have for it; no header or parameter sets one
FAILURES = {
    "server_error": 500, "service_unavailable_error": 503, "timeout_error": 504,
    "api_error": 500, "overloaded_error": 503,  # Anthropic's
}  # fmt: skip


@schemathesis.check
def no_failure(ctx: CheckContext, response: Response, case: schemathesis.Case) -> bool | None:
    """No 5xx, neither as the status nor at the end of a stream, but for a deadline that the request has set."""
    error = _streamed(response) or _error(response.content)
    status = FAILURES.get(str(error.get("type"))) if response.status_code == 200 else response.status_code
    late = error.get("code") == "deadline_exceeded" or error.get("type") == "timeout_error"  # a response that failed
    if status == 504 and late and has_deadline(response.request.body or b""):
        return None
    if status is not None and status != response.status_code:
        raise ServerError(
            operation=case.operation.label, status_code=status, message=f"at the end of a stream: {error}"
        )
    return not_a_server_error(ctx, response, case)


def has_deadline(body: bytes | str) -> bool:
    """Whether a request with this body sets a deadline."""
    asked = _parsed(body)
    return isinstance(asked, dict) and any(asked.get(name) is not None for name in DEADLINES)


def _streamed(response: Response) -> dict[str, Any]:
    """The error with which a stream ended; empty if there is none."""
    if not response.headers.get("content-type", [""])[0].startswith("text/event-stream"):
        return {}
    try:
        events = SseParser().feed(response.content)
    except SseError:
        return {}
    return next((error for event in reversed(events) if (error := _error(event))), {})


def _error(answer: bytes) -> dict[str, Any]:
    parsed = _parsed(answer)
    if isinstance(parsed, dict) and parsed.get("type") == "response.failed":
        parsed = parsed["response"]
    error = parsed.get("error") if isinstance(parsed, dict) else None
    return error if isinstance(error, dict) else {}


def _parsed(text: bytes | str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
