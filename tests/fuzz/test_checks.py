"""What the fuzzing of HTTP takes for a failure of the server."""

import json

import pytest
import requests
import schemathesis
from schemathesis.core.failures import FailureGroup
from schemathesis.core.transport import Response

from tests.fuzz.checks import no_failure

DOCUMENT = {
    "openapi": "3.1.0",
    "info": {"title": "any", "version": "1"},
    "paths": {"/": {"post": {"responses": {"default": {"description": "any"}}}}},
}
LATE, BROKEN, AWAY, BUSY = (
    json.dumps({"error": {"message": "m", "type": kind, "param": None, "code": code}})
    for kind, code in (
        ("timeout_error", "deadline_exceeded"), ("server_error", "internal_error"),
        ("service_unavailable_error", "not_ready"), ("rate_limit_error", "overloaded"),
    )
)  # fmt: skip
FAILED, OVERDUE = (
    json.dumps(
        {"type": "response.failed", "response": {"error": {"code": "server_error", "message": "m", "type": kind}}}
    )
    for kind in ("server_error", "timeout_error")
)
STREAM = 'data: {"choices": []}\n\n'


def passes(status: int, answer: str, asked: bytes, kind: str = "application/json") -> bool:
    case = schemathesis.openapi.from_dict(DOCUMENT)["/"]["POST"].Case()
    request = requests.Request("POST", "http://127.0.0.1/", data=asked).prepare()
    response = Response(status, {"content-type": [kind]}, answer.encode(), request, 0.1, verify=False)
    try:
        case.validate_response(response, checks=[no_failure])
    except FailureGroup:
        return False
    return True


@pytest.mark.parametrize(
    "status, answer, asked, right",
    [
        (200, "{}", b"{}", True),
        (429, BUSY, b"{}", True),
        (500, BROKEN, b"{}", False),
        (503, AWAY, b"{}", False),
        (504, LATE, b'{"deadline_ms": 1}', True),
        (504, LATE, b'{"timeout_ms": 1}', True),
        (504, LATE, b'{"deadline_ms": null}', False),
        (504, LATE, b"{}", False),
        (504, LATE, b"[1, ", False),
        (504, LATE, b"", False),
        (504, "Gateway Timeout", b'{"deadline_ms": 1}', False),
        (504, BROKEN, b'{"deadline_ms": 1}', False),
        (500, LATE, b'{"deadline_ms": 1}', False),
        (502, LATE, b'{"deadline_ms": 1}', False),
    ],
)
def test_of_5xx_only_a_deadline_that_was_set_is_right(status: int, answer: str, asked: bytes, right: bool) -> None:
    assert passes(status, answer, asked) is right


@pytest.mark.parametrize(
    "last, asked, right",
    [
        ("[DONE]", b"{}", True),
        (BUSY, b"{}", True),
        (BROKEN, b"{}", False),
        (BROKEN, b'{"deadline_ms": 1}', False),
        (AWAY, b"{}", False),
        (LATE, b'{"deadline_ms": 1}', True),
        (LATE, b"{}", False),
        (FAILED, b'{"deadline_ms": 1}', False),
        (OVERDUE, b'{"deadline_ms": 1}', True),
        (OVERDUE, b"{}", False),
    ],
)
def test_the_end_of_a_stream_counts(last: str, asked: bytes, right: bool) -> None:
    answer = f"{STREAM}data: {last}\n\ndata: [DONE]\n\n"
    assert passes(200, answer, asked, "text/event-stream; charset=utf-8") is right
