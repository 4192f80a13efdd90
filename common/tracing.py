"""A span for each request, with its waits as children, sent to an OpenTelemetry collector (the extra `otel`).

Spans are made when a request has ended, from the times in its story. Attributes have the names of OpenTelemetry's
conventions for HTTP and generative AI; prompts and answers are never among them.
"""

import importlib.util
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from common.config import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from common.story import Story

EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
SERVICE = "rhizome"
EXPORT_S = 2.0  # for one request to the collector, and for the last one at the end
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/generate": "text_completion",
}


def require_extra() -> None:
    """Raises ConfigError where the packages for spans are not installed. Loads none of them."""
    try:
        found = importlib.util.find_spec(EXPORTER) is not None and importlib.util.find_spec("opentelemetry.sdk")
    except ModuleNotFoundError:
        found = None
    if not found:
        raise ConfigError("--otlp-endpoint: OpenTelemetry is not installed; pip install 'rhizome[otel]'")


def to_collector(endpoint: str) -> "Traces":
    """Traces that are sent by OTLP over HTTP to the URL of a collector, in batches, by a thread."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    logging.getLogger(EXPORTER).setLevel(logging.ERROR)  # one line for each batch that could not be sent
    return Traces(OTLPSpanExporter(traces_url(endpoint), timeout=EXPORT_S))


def traces_url(endpoint: str) -> str:
    """Where traces go: the endpoint, with OTLP's own path where it has none."""
    scheme, _, rest = endpoint.partition("://")
    host, slash, path = rest.partition("/")
    return endpoint if slash and path else f"{scheme}://{host}/v1/traces"


class Traces:
    """Turns stories into spans. `wall` gives Unix nanoseconds, `monotonic` those of the stories' clock."""

    def __init__(
        self, exporter: "SpanExporter", *, batch: bool = True,
        wall: Callable[[], int] = time.time_ns, monotonic: Callable[[], int] = time.monotonic_ns,
    ):  # fmt: skip
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        processor = BatchSpanProcessor(exporter) if batch else SimpleSpanProcessor(exporter)
        self._provider = TracerProvider(resource=Resource.create({"service.name": SERVICE}), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("rhizome")
        self._propagator = TraceContextTextMapPropagator()
        self._wall = wall
        self._monotonic = monotonic

    def told(self, story: "Story") -> None:
        """A request has ended. Fills in its `trace_id`; the caller's trace is continued where the request named one."""
        if story.method != "POST" and not story.generates:
            return  # probes and scrapes
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        now = self._monotonic()
        to_wall = self._wall() - now
        root = self._tracer.start_span(
            f"{story.method} {story.route}",
            self._propagator.extract({"traceparent": story.traceparent}),
            SpanKind.SERVER,
            attributes=_attributes(story),
            start_time=story.arrival_ns + to_wall,
        )
        if story.error and story.status != 499:
            root.set_status(Status(StatusCode.ERROR, story.problem))
        inside = set_span_in_context(root)
        for name, begin, end in phases(story, now):
            child = self._tracer.start_span(name, inside, start_time=begin + to_wall)
            child.end(end + to_wall)
        root.end(now + to_wall)
        story.trace_id = f"{root.get_span_context().trace_id:032x}"

    def close(self) -> None:
        """Send what is left, for a moment at most."""
        self._provider.force_flush(int(EXPORT_S * 1000))
        self._provider.shutdown()


def phases(story: "Story", now: int) -> list[tuple[str, int, int]]:
    """What a request waited for: name, begin and end. The phase in which it ended early goes to its end."""
    if not story.generates:
        return []
    ends = (("queue", story.started_ns), ("prefill", story.first_ns), ("decode", story.last_ns))
    found: list[tuple[str, int, int]] = []
    begin = story.arrival_ns
    for name, end in ends:
        if not end:
            if story.finish or found:  # it was there; what is not known is not told
                break
            return [(name, begin, now)]
        found.append((name, begin, max(begin, end)))
        begin = max(begin, end)
    return found


def _attributes(story: "Story") -> dict[str, Any]:
    own: dict[str, Any] = {"gen_ai.request.id": story.id}
    if story.status:  # it came over HTTP
        own |= {
            "http.request.method": story.method,
            "http.route": story.route,
            "http.response.status_code": story.status,
        }
    if story.error:
        own["error.type"] = story.error
    if story.generates:
        own |= {
            "gen_ai.operation.name": OPERATIONS.get(story.route, "chat"),
            "gen_ai.provider.name": "rhizome",
            "gen_ai.request.model": story.model,
            "gen_ai.usage.input_tokens": story.prompt_tokens,
            "gen_ai.usage.output_tokens": story.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": story.cached_tokens,
            "gen_ai.response.finish_reasons": tuple(
                name for name, count in sorted(story.finish.items()) for _ in range(count)
            ),
        }
    if story.first_ns:
        own["gen_ai.latency.time_to_first_token"] = (story.first_ns - story.arrival_ns) / 1e9  # vLLM's name
    if story.key != "-":
        own["rhizome.key"] = story.key
    return own
