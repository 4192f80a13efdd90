"""What the tokenizer tells of requests that come over its own socket: a line in the log and a span each."""

import re

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from common.messages import Abort, ErrorCode, Finish, RequestError
from common.story import GATEWAY
from common.tracing import Traces
from tests.unit.frontend_world import World, request, run, text_batch
from tokenizer_proc.clients import Sent

MS = 10**6


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, str]]:
    """The words of each line that tells a story."""
    found = [r.getMessage() for r in caplog.records if r.name == "tokenizer_proc.stories"]
    assert all(line.startswith("request ") for line in found)
    return [dict(re.findall(r"(\w+)=('.*'|\S+)", line)) for line in found]


def test_a_request_that_ends_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        world = World()
        exporter = InMemorySpanExporter()
        world.stories._traces = Traces(exporter, batch=False, wall=lambda: 10**9, monotonic=lambda: world.now)
        rids = await world.choices(2)
        for now, rid, finish in ((3, 0, Finish.NONE), (5, 1, Finish.STOP), (9, 0, Finish.LENGTH)):
            world.now = 99 + now * MS
            assert not lines(caplog)
            batch = text_batch(rids[rid], "x", finish, (9, 9))
            batch.cached[0] += rid  # the first choice computes what the others find
            world.frontend.on_detokenizer(batch)
        (span,) = (s for s in exporter.get_finished_spans() if s.parent is None)
        assert span.name == "IPC generate" and span.attributes is not None
        assert span.attributes["gen_ai.usage.output_tokens"] == 6
        assert span.attributes["gen_ai.response.finish_reasons"] == ("length", "stop")
        assert not any(name.startswith("http.") for name in span.attributes)
        assert span.start_time is not None and span.end_time is not None and span.end_time - span.start_time == 9 * MS

    with caplog.at_level("INFO"):
        run(test)
    (told,) = lines(caplog)
    assert told["id"] == f"{b'a'.hex()}-5" and told["method"] == "IPC" and told["model"] == "m"
    assert (told["prompt"], told["cached"], told["output"], told["finish"]) == ("3", "2", "6", "length,stop")
    assert (told["ttft_ms"], told["e2e_ms"]) == ("3.0", "9.0") and "error" not in told and len(told["trace"]) == 32


def test_other_ends(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        world = World()
        world.receive(request(1, text="x" * 10**6))
        (rid,) = await world.choices(1)
        world.frontend.on_detokenizer(RequestError(rid, ErrorCode.OVERLOADED, "the queue is full"))
        (rid,) = await world.choices(1)
        world.receive(Abort(5))
        world.frontend.on_detokenizer(text_batch(rid, "", Finish.ABORT, ()))
        await world.choices(1)
        world.state[b"a"] = Sent.GONE
        for _ in range(2):  # at the second one nothing was sent since the one before
            world.frontend.beat()
        world.state.clear()
        await world.choices(1, owner=b"b")
        world.frontend.shut_down()

    with caplog.at_level("INFO"):
        run(test)
    told = [(line["finish"], line.get("error")) for line in lines(caplog)]
    assert told == [
        ("-", "too_long"), ("-", "overloaded"), ("abort", None), ("-", "client_closed"), ("-", "shutting_down"),
    ]  # fmt: skip


def test_the_gateway_tells_its_own(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        world = World()
        (rid,) = await world.choices(1, owner=GATEWAY + b"12345678")
        world.frontend.on_detokenizer(text_batch(rid, "x", Finish.STOP))

    with caplog.at_level("INFO"):
        run(test)
    assert not lines(caplog)
