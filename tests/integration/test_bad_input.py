"""Wrong values in every field, over HTTP and the cluster's own socket: refused by name, and no process notices."""

import random
from collections.abc import Iterator
from typing import Any

import httpx
import msgpack
import pytest
import zmq

from bench.bad_bodies import BadBody, bad_bodies, bodies
from common.codec import MAX_FRAME_BYTES, Struct, decode, schema_of
from common.fields import Checker, FieldError, Maybe
from common.messages import Beat, ErrorCode, Generate, RequestError, TextBatch, ints
from common.sampling_params import SamplingParams
from common.sockets import open_socket
from tests.helpers_wire import whole_body
from tests.integration.cluster import ROOT, Cluster, running

SHARE = 4  # of the table: bench/pressure.py sends all of it
PATIENCE_MS = 30_000
JUNK: list[Any] = [
    None, True, -1, 2**31, 2**63, -(2**63), 2**64 - 1, 0.5, 1e308, float("nan"), float("inf"), "", "x", "x" * 70_000,
    b"", b"\xff" * 5, b"\x00" * 40_000, [], {}, [None], [[]], [-1], ["x"], [b"\xff"], {"x": 1}, {"": [[]]},
    [0] * 70_000, [[[[[[[[[[]]]]]]]]]],
]  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running(ROOT / "demo_model", "--port", "0", "--log-level", "info") as cluster:
        pids = cluster.info["pids"]
        yield cluster
        assert cluster.info["pids"] == pids and not any(cluster.info["restarts"].values())
        assert "Traceback" not in cluster.log


@pytest.mark.parametrize("path", bodies())
def test_bodies(cluster: Cluster, path: str) -> None:
    chosen: list[BadBody] = random.Random(path).sample(table := list(bad_bodies(path)), len(table) // SHARE)
    with httpx.Client(base_url=cluster.info["addresses"]["http"], timeout=60) as client:
        for bad in chosen:
            answer = client.post(path, content=bad.body, headers={"content-type": "application/json"})
            # a deadline of some milliseconds is right, and may pass
            assert answer.status_code < 500 or answer.json()["error"]["code"] == "deadline_exceeded", (bad, answer.text)
            if bad.wrong:
                assert answer.status_code >= 400, bad
                where = answer.json()["error"]["param"] or ""
                assert not bad.field or where.startswith(bad.field) or (where and bad.field.startswith(where)), bad
    cluster.check_idle()


def places(cls: type, prefix: str = "", at: tuple[int, ...] = ()) -> Iterator[tuple[str, tuple[int, ...], Checker]]:
    """Every field of a message with its name in errors and its place on the wire, those inside others too."""
    for number, (name, checker) in enumerate(schema_of(cls)):
        yield prefix + name, (*at, number), checker
        inner = checker.inner if isinstance(checker, Maybe) else checker
        if isinstance(inner, Struct):
            yield from places(inner.cls, f"{prefix}{name}.", (*at, number))


def exchange(body: list[Any], at: tuple[int, ...], value: Any) -> list[Any]:
    """A copy of a wire body with one value exchanged; where its place is empty, None."""
    here = list(body)
    here[at[0]] = value if len(at) == 1 else exchange(here[at[0]], at[1:], value)
    return here


def refuses(checker: Checker, value: Any) -> bool:
    try:
        checker.unpack(msgpack.unpackb(msgpack.packb(value, use_bin_type=True)), "x")
    except FieldError:
        return True
    return False


def test_generate_over_the_clusters_own_socket(cluster: Cluster) -> None:
    base = Generate(0, None, ints(5, 6), None, SamplingParams(max_tokens=2, seed=1))
    body = whole_body(base)
    asked: dict[int, tuple[str, Any, bool]] = {}
    with zmq.Context() as context:
        address = cluster.info["addresses"]["frontend"]
        socket = open_socket(context, zmq.DEALER, connect=address)
        socket.linger = 0
        for name, at, checker in places(Generate):
            if name == "rid":
                continue
            for value in JUNK:
                rid = len(asked) + 1
                wire = exchange(body, (2,), rid)
                try:
                    wire = exchange(wire, (at[0] + 2, *at[1:]), value)
                except TypeError:
                    continue  # inside something that is not there
                frame = msgpack.packb(wire, use_bin_type=True)
                assert len(frame) < MAX_FRAME_BYTES
                asked[rid] = (name, value, refuses(checker, value))
                socket.send(frame)
                answer = first_answer(socket, rid)
                if asked[rid][2]:
                    assert isinstance(answer, RequestError) and answer.code == ErrorCode.INVALID, (asked[rid], answer)
                    assert answer.field.startswith(name) or name.startswith(answer.field), (asked[rid], answer)
                elif isinstance(answer, RequestError):
                    assert answer.code != ErrorCode.INTERNAL, (asked[rid], answer)
        socket.close()
    assert sum(wrong for _, _, wrong in asked.values()) > 500
    cluster.check_idle()


def first_answer(socket: "zmq.Socket[bytes]", rid: int) -> RequestError | TextBatch:
    """The first answer to a request, which must not be silence."""
    while True:
        assert socket.poll(PATIENCE_MS), f"request {rid} was not answered"
        msg = decode(socket.recv_multipart()[-1], {RequestError, TextBatch, Beat})
        if isinstance(msg, RequestError) and msg.rid == rid:
            return msg
        if isinstance(msg, TextBatch) and rid in msg.rids:
            return msg


def test_tokens_outside_the_vocabulary(cluster: Cluster) -> None:
    with httpx.Client(base_url=cluster.info["addresses"]["http"], timeout=60) as client:
        size = client.get("/server_info").json()
        vocabulary = size.get("vocab_size") or size["info"]["vocab_size"]
        for path, body, field in (
            ("/v1/completions", {"prompt": [1, vocabulary]}, "prompt[1]"),
            ("/generate", {"input_ids": [1, vocabulary]}, "input_ids[1]"),
            ("/detokenize", {"tokens": [vocabulary]}, "tokens[0]"),
            ("/v1/completions", {"prompt": "x", "stop_token_ids": [vocabulary]}, "stop_token_ids[0]"),
            (
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": "x"}], "logit_bias": {vocabulary: 1}},
                "logit_bias",
            ),
        ):
            answer = client.post(path, json=body)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"].startswith(field), answer.text
