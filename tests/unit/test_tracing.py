"""Spans of HTTP requests, in memory and at a real collector; and what is said where the packages are missing."""

import importlib.util
import queue
import threading
import time
from array import array
from collections.abc import Iterable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from common.config import ConfigError, HttpConfig
from common.messages import ErrorCode, Finish, Generate, RequestError, Timing
from common.story import Story
from common.tracing import Traces, phases, to_collector, traces_url
from launch import main as launch
from tests.unit.fake_frontend import rows
from tests.unit.gateway_world import World, answering, play, words

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE}-{SPAN}-01", "x-request-id": "traced-1"}
MS = 10**6


def timed(msg: Generate) -> Iterable[Any]:
    """Three tokens: begun 2 ms after now, the first after 3 ms, the last after 7 ms."""
    now = time.monotonic_ns()
    for i, finish in enumerate((Finish.NONE, Finish.NONE, Finish.LENGTH)):
        row = rows(msg.rid, "x", 20 + i, finish=finish)
        timings = (Timing(0, now, now + 2 * MS, now + 3 * MS),) if i != 1 else ()
        yield replace(row, times=array("q", [now + (3 + 2 * i) * MS]), timings=timings)


def spans_of(
    path: Path, generate: Any, *requests: tuple[str, Any], log: pytest.LogCaptureFixture | None = None, **options: Any
) -> list[ReadableSpan]:
    exporter = InMemorySpanExporter()

    async def test(world: World) -> None:
        for route, body in requests:
            if body is None:
                await world.client.get(route)
            else:
                await world.post(route, body, headers=HEADERS)

    play(path, answering(generate), test, traces=Traces(exporter, batch=False), **options)
    return list(exporter.get_finished_spans())


def test_a_request_is_a_span_with_its_waits_inside(short_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        *inside, root = spans_of(short_dir, timed, ("/v1/completions", {"prompt": "secret", "stream": True}))
    assert root.name == "POST /v1/completions" and root.kind is SpanKind.SERVER
    context = root.get_span_context()
    assert context is not None and f"{context.trace_id:032x}" == TRACE, "the caller's trace goes on"
    assert root.parent is not None and f"{root.parent.span_id:016x}" == SPAN
    told = dict(root.attributes or {})
    assert told["gen_ai.request.id"] == "traced-1" and told["http.response.status_code"] == 200
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (3, 3)
    assert told["gen_ai.usage.cache_read.input_tokens"] == 2 and told["gen_ai.response.finish_reasons"] == ("length",)
    assert "secret" not in str(told), "prompts are nobody's business"
    assert [span.name for span in inside] == ["queue", "prefill", "decode"]
    queue_, prefill, decode = inside
    assert all(span.parent is not None and span.parent.span_id == context.span_id for span in inside)
    assert queue_.start_time == root.start_time and queue_.end_time == prefill.start_time
    assert prefill.end_time is not None and prefill.start_time is not None and decode.end_time is not None
    assert (prefill.end_time - prefill.start_time, decode.end_time - prefill.end_time) == (MS, 4 * MS)
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("request ")]
    assert f"trace={TRACE}" in line and "itl_ms=2.00" in line


def test_whatever_becomes_of_a_request_it_has_one_span(short_dir: Path) -> None:
    def fail(msg: Generate) -> Iterable[Any]:
        yield RequestError(msg.rid, ErrorCode.TOO_LONG, "too long", "text")

    found = spans_of(
        short_dir, fail, ("/v1/completions", {"prompt": "x"}), ("/v1/completions", {}), ("/tokenize", {"zap": 1}),
        ("/nowhere", {}), ("/metrics", None), ("/health", None),
    )  # fmt: skip
    roots = [span for span in found if span.kind is SpanKind.SERVER]
    statuses = [(s.attributes or {})["http.response.status_code"] for s in roots]
    assert statuses == [400, 400, 400, 404] and all(s.status.status_code is StatusCode.ERROR for s in roots)
    assert (roots[0].attributes or {})["error.type"] == "context_length_exceeded"
    assert [s.name for s in found if s.kind is not SpanKind.SERVER] == ["queue"], "where it ended"
    assert roots[3].name == "POST unknown", "paths that nobody serves are not names of spans"


def test_a_request_without_a_trace_begins_one(short_dir: Path) -> None:
    exporter = InMemorySpanExporter()

    async def test(world: World) -> None:
        for header in ("", "garbage", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "ff" * 400):
            await world.post("/v1/completions", {"prompt": "x"}, headers={"traceparent": header})

    play(short_dir, answering(words("a")), test, traces=Traces(exporter, batch=False))
    roots = [s for s in exporter.get_finished_spans() if s.kind is SpanKind.SERVER]
    assert len(roots) == 4 and all(s.parent is None for s in roots)
    assert len({s.context.trace_id for s in roots if s.context}) == 4


def test_phases_tell_only_what_is_known() -> None:
    story = Story("a", "POST", generates=True, arrival_ns=100)
    assert phases(story, 900) == [("queue", 100, 900)]
    story.started_ns, story.first_ns = 200, 300
    assert phases(story, 900) == [("queue", 100, 200), ("prefill", 200, 300)]
    story.last_ns = 400
    assert phases(story, 900)[-1] == ("decode", 300, 400)
    story.generates = False
    assert phases(story, 900) == []
    ended = Story("b", "POST", generates=True, arrival_ns=100, finish={"abort": 1})
    assert phases(ended, 900) == []


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://h:4318", "http://h:4318/v1/traces"),
        ("https://h/", "https://h/v1/traces"),
        ("http://h:4318/otlp/v1/traces", "http://h:4318/otlp/v1/traces"),
    ],
)
def test_the_address_of_a_collector(given: str, url: str) -> None:
    assert traces_url(given) == url
    HttpConfig(otlp_endpoint=given)


@pytest.mark.parametrize("given", ["h:4318", "ftp://h", "http://", "grpc://h:4317", ""])
def test_what_is_no_address(given: str) -> None:
    with pytest.raises(ConfigError, match="otlp-endpoint must be a URL"):
        HttpConfig(otlp_endpoint=given)


def test_spans_reach_a_collector() -> None:
    received: queue.Queue[tuple[str, bytes]] = queue.Queue()

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.put((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        traces = to_collector(f"http://127.0.0.1:{server.server_address[1]}")
        traces.told(Story("a", "POST", "/generate", generates=True, finish={"stop": 1}, started_ns=1, first_ns=2))
        traces.close()
        server.shutdown()
        thread.join()
    path, body = received.get(timeout=10)
    (sent,) = ExportTraceServiceRequest.FromString(body).resource_spans
    assert path == "/v1/traces" and [s.name for s in sent.scope_spans[0].spans] == [
        "queue",
        "prefill",
        "POST /generate",
    ]
    assert {a.key: a.value.string_value for a in sent.resource.attributes}["service.name"] == "rhizome"


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if "opentelemetry" in name else find(name))
    result = CliRunner().invoke(launch, ["--otlp-endpoint", "http://127.0.0.1:4318"])
    assert result.exit_code == 1 and "pip install 'rhizome[otel]'" in result.output
    assert "--otlp-endpoint" in result.output
    refused = CliRunner().invoke(launch, ["--otlp-endpoint", "nowhere"])
    assert refused.exit_code == 1 and "otlp-endpoint must be a URL" in refused.output
