"""The served application on real sockets: what is too slow, too large or gone in the middle."""

import socket
import time
from collections.abc import Iterable
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from common.config import HttpConfig
from common.messages import Abort, Finish, Generate
from gateway_proc import http, middleware, protocol
from tests.helpers_http import dial, head, post, until, until_closed
from tests.unit.fake_frontend import FakeFrontend, rows, silent_after_one_row
from tests.unit.gateway_world import answering, serve, words

HELLO = answering(words("He", "llo"))


def flooding(msg: Any) -> Iterable[Any]:
    """Answer with more than any socket buffers hold, and end when told to."""
    if isinstance(msg, Generate):
        for _ in range(300):
            yield rows(msg.rid, "x" * 100_000, 1)
    elif isinstance(msg, Abort):
        yield rows(msg.rid, "", finish=Finish.ABORT)
    else:
        yield from HELLO(msg)


def silent(msg: Any) -> Iterable[Any]:
    yield from silent_after_one_row(msg) if isinstance(msg, Generate | Abort) else HELLO(msg)


def generated(cluster: FakeFrontend) -> int:
    """The id of the next Generate that the cluster gets."""
    while not isinstance(msg := cluster.received.get(timeout=20), Generate):
        pass
    return msg.rid


def aborted(cluster: FakeFrontend) -> int:
    """The id of the next Abort."""
    while not isinstance(msg := cluster.received.get(timeout=20), Abort):
        pass
    return msg.rid


def test_a_slow_head_is_cut_off(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_S", 0.2)

    def test(url: str, cluster: FakeFrontend) -> None:
        for sent in (b"", b"GET /health HTTP/1.1\r\nX: "):
            with dial(url) as connection:
                connection.sendall(sent)
                assert b"408" in until_closed(connection)
        with dial(url) as connection:  # a head that comes in time may have a slow body
            body = b'{"prompt": "x"}'
            connection.sendall(head("/v1/completions", len(body)))
            time.sleep(0.3)
            connection.sendall(body)
            assert b"Hello" in until(connection, b"Hello")

    serve(short_dir, HELLO, test)


def test_a_slow_body_is_refused(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BODY_S", 0.1)

    def test(url: str, cluster: FakeFrontend) -> None:
        with dial(url) as connection:
            connection.sendall(head("/v1/completions", 100) + b'{"prompt"')
            assert until(connection, b"}}").startswith(b"HTTP/1.1 408")

    serve(short_dir, HELLO, test)


@pytest.mark.parametrize(("path", "code"), [("/v1/nothing", b"404"), ("/v1/completions", b"413")])
def test_a_refusal_reaches_a_client_that_sends_all_first(short_dir: Path, path: str, code: bytes) -> None:
    body = b" " * (HttpConfig().max_body_bytes + 2**20)
    whole = head(path, len(body), extra="Connection: close\r\n") + body

    def test(url: str, cluster: FakeFrontend) -> None:
        for sent in (whole, whole.replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"Connection: close\r\n", b"")):
            with dial(url) as connection:
                connection.sendall(sent)
                assert until_closed(connection).startswith(b"HTTP/1.1 " + code)

    serve(short_dir, HELLO, test)


def test_a_refusal_does_not_wait_for_ever_for_the_rest(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "LINGER_S", 0.1)

    def test(url: str, cluster: FakeFrontend) -> None:
        with dial(url) as connection:
            connection.sendall(head("/v1/nothing", 100, extra="Connection: close\r\n"))
            assert until_closed(connection).endswith(b"}}")

    serve(short_dir, HELLO, test)


def test_a_body_does_not_count_as_the_next_head(short_dir: Path) -> None:
    """On one connection: a large body, a head in two packets, and what is no request at all."""

    def test(url: str, cluster: FakeFrontend) -> None:
        with dial(url) as connection:
            connection.sendall(post("/v1/completions", {"prompt": "x", "ignored": "y" * 200_000}))
            until(connection, b"Hello")
            connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: x\r\n")
            time.sleep(0.2)
            connection.sendall(b"Accept: */*\r\n\r\n")
            assert until(connection, b"}").startswith(b"HTTP/1.1 200")
            for _ in range(7):
                connection.sendall(b"\r\n" * 5_000)
            assert b" 431 " in until_closed(connection)

    serve(short_dir, HELLO, test)


OFFERS = (
    "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk\r\n",
    "Connection: upgrade\r\nuPgRaDe: websocket\r\nSec-WebSocket-Key: eA==\r\n",
)


@pytest.mark.parametrize("offer", OFFERS)
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("width", [1, 60, 10_000])
def test_an_offered_upgrade_is_passed_over(short_dir: Path, offer: str, chunked: bool, width: int) -> None:
    """Both requests of a connection are served, however their bytes come."""
    body = b'{"prompt": "Upgrade: h2c"}'
    framed = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body
    extra = offer + ("Transfer-Encoding: chunked\r\n" if chunked else "")
    request = head("/v1/completions", None if chunked else len(body), extra=extra) + framed

    def test(url: str, cluster: FakeFrontend) -> None:
        with dial(url) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(2):
                for at in range(0, len(request), width):
                    connection.sendall(request[at : at + width])
                answer = until(connection, b"Hello")
                assert answer.startswith(b"HTTP/1.1 200")
                prompt = cluster.received.get(timeout=20)
                while not isinstance(prompt, Generate):
                    prompt = cluster.received.get(timeout=20)
                assert prompt.text == "Upgrade: h2c"
            connection.sendall(request * 300)  # all at once, also for the parser
            assert until(connection, b"Hello").startswith(b"HTTP/1.1 200")

    serve(short_dir, HELLO, test)


def test_head_asks_for_a_head_alone(short_dir: Path) -> None:
    """As load balancers do; what follows on the connection is read as it is."""

    def test(url: str, cluster: FakeFrontend) -> None:
        connection = HTTPConnection(url.removeprefix("http://"), timeout=20)
        for path in ("/health", "/health/live", "/health/ready", "/v1/models"):
            for method in ("HEAD", "GET", "HEAD"):
                connection.request(method, path)
                answer = connection.getresponse()
                assert answer.status == 200 and int(answer.headers["content-length"]) > 0
                assert bool(answer.read()) == (method == "GET")
        connection.close()

    serve(short_dir, HELLO, test)


def test_http_1_0_has_no_chunks(short_dir: Path) -> None:
    def test(url: str, cluster: FakeFrontend) -> None:
        for stream in (True, False):
            with dial(url) as connection:
                whole = post("/v1/completions", {"prompt": "x", "stream": stream})
                connection.sendall(whole.replace(b"HTTP/1.1", b"HTTP/1.0"))
                answer_head, _, body = until_closed(connection).partition(b"\r\n\r\n")
            assert b"transfer-encoding" not in answer_head and b"connection: close" in answer_head
            if stream:
                events = body.split(b"\n\n")
                assert all(event.startswith(b"data: {") for event in events[:-2]), body
                assert events[-2:] == [b"data: [DONE]", b""]
            else:
                assert b"content-length: %d" % len(body) in answer_head

    serve(short_dir, HELLO, test)


def test_a_tunnel_is_refused(short_dir: Path) -> None:
    def test(url: str, cluster: FakeFrontend) -> None:
        with dial(url) as connection:
            connection.sendall(head("x:443", None, method="CONNECT"))
            assert b"HTTP/1.1 4" in until(connection, b"\r\n\r\n")

    serve(short_dir, HELLO, test)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_noticed_at_once(short_dir: Path, stream: bool) -> None:
    def test(url: str, cluster: FakeFrontend) -> None:
        with dial(url) as connection:
            connection.sendall(post("/v1/completions", {"prompt": "x", "stream": stream}))
            rid = generated(cluster)
            if stream:
                until(connection, b"begun")
        assert aborted(cluster) == rid

    serve(short_dir, silent, test)


def test_a_reader_that_takes_nothing_is_cut_off(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "STALL_S", 0.3)

    def test(url: str, cluster: FakeFrontend) -> None:
        with dial(url, receive_buffer=4096) as connection:
            connection.sendall(post("/v1/completions", {"prompt": "x", "stream": True}))
            assert aborted(cluster) == 1  # 0 was the question who is there
            assert not until_closed(connection).rstrip().endswith(b"[DONE]")

    serve(short_dir, flooding, test)


def test_a_reader_that_is_slow_gets_everything(short_dir: Path) -> None:
    def answer(msg: Any) -> Iterable[Any]:
        if isinstance(msg, Generate):
            for i in range(40):
                yield rows(msg.rid, "x" * 100_000, 1, finish=Finish.STOP if i == 39 else Finish.NONE)
        else:
            yield from HELLO(msg)

    def test(url: str, cluster: FakeFrontend) -> None:
        with dial(url, receive_buffer=4096) as connection:
            connection.sendall(post("/v1/completions", {"prompt": "x", "stream": True}))
            found = 0
            while True:
                data = connection.recv(65536)
                found += data.count(b"x")
                if b"[DONE]" in data:
                    break
            assert found >= 40 * 100_000

    serve(short_dir, answer, test)
