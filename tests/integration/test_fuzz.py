"""A minute of fuzzing, the same every time: HTTP from its descriptions, and what takes bytes under atheris.
`python -m tests.fuzz.http`, `python -m tests.fuzz.wire` and `--fuzz-seconds` draw other inputs each time."""

import json
import platform
import re
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.fuzz import http, wire
from tests.fuzz.checks import has_deadline
from tests.fuzz.targets import TARGETS

on_linux_x86 = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="atheris has no packages for other platforms"
)


SEED = 1
RUNS = {"frame": 300_000, "link": 30_000, "body": 150_000, "answer": 8_000, "events": 30_000}  # a few seconds each


@pytest.mark.timeout(0)
@pytest.mark.parametrize("api", http.APIS)
def test_http(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], api: str) -> None:
    seconds: int | None = request.config.getoption("--fuzz-seconds")
    if seconds:
        extent = http.Extent(secrets.randbelow(2**32), seconds=seconds)
    else:
        extent = http.Extent(SEED, examples=http.APIS[api].examples)
    assert http.run([api], extent), capsys.readouterr().out


def test_failures_of_a_server_are_found(tmp_path: Path) -> None:
    """Through schemathesis' own command line: our check is asked, and it takes the right 504 alone."""
    with failing_server() as url:
        api = http.Api(f"{url}/openapi.json", url, ("no_failure",), 5, phases=("fuzzing",))
        sound, said = http.fuzz(url, api, http.Extent(SEED, examples=5), tmp_path)
    assert not sound
    found = set(re.findall(r"^_+ POST /(\w+) _+$", said, re.MULTILINE))
    assert found == {"broken", "late", "stream"}, said


@contextmanager
def failing_server() -> Iterator[str]:
    """Its paths fail in ways of their own; `asked` only with the deadline that each request to it has."""
    deadline = {"type": "object", "required": ["deadline_ms"], "properties": {"deadline_ms": {"type": "integer"}}}
    nothing = {"type": "object", "maxProperties": 0}
    paths = {
        f"/{name}": {
            "post": {
                "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
                "responses": {"default": {"description": "any"}},
            }
        }
        for name, schema in {"broken": nothing, "late": nothing, "stream": nothing, "asked": deadline}.items()
    }
    document = {"openapi": "3.1.0", "info": {"title": "failures", "version": "1"}, "paths": paths}
    late = {"error": {"message": "x", "type": "timeout_error", "param": None, "code": "deadline_exceeded"}}
    mistake = {"error": {"message": "x", "type": "server_error", "param": None, "code": "internal_error"}}

    class Handler(BaseHTTPRequestHandler):
        def answer(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self.answer(200, "application/json", json.dumps(document).encode())

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"] or 0))
            match self.path:
                case "/broken":
                    self.answer(500, "application/json", json.dumps(mistake).encode())
                case "/stream":
                    self.answer(200, "text/event-stream", f"data: {json.dumps(mistake)}\n\n".encode())
                case "/asked" if not has_deadline(body):
                    self.answer(400, "application/json", b"{}")
                case _:
                    self.answer(504, "application/json", json.dumps(late).encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@on_linux_x86
@pytest.mark.parametrize("target", TARGETS)
def test_bytes(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert wire.fuzz(target, tmp_path, SEED, runs=RUNS[target]), capsys.readouterr().out
