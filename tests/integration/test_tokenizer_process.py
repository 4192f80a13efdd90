"""The real tokenizer and detokenizer; the test takes the places of launcher, scheduler and clients."""

import os
import signal
import socket
import time
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgpack
import psutil
import pytest
import zmq

from common.child import END
from common.codec import Message, decode, encode, message_types
from common.config import ClusterConfig, ModelConfig
from common.messages import (
    Abort,
    AddRequest,
    Beat,
    ChatMessage,
    ErrorCode,
    Fatal,
    Finish,
    Generate,
    GetStats,
    Go,
    Ready,
    RequestError,
    Resync,
    Stats,
    TextBatch,
    TokenBatch,
    ints,
)
from common.sampling_params import SamplingParams
from common.sockets import Endpoints, open_socket
from common.stamps import Stamper
from tests.helpers_launcher import StandInLauncher
from tests.helpers_tokenizers import CHATML, SPECIAL, byte_level, write_tokenizer
from tests.helpers_wire import StampedSocket, unstamped

PATIENCE_MS = 30_000
NAMES = ("tokenizer", "detokenizer")
M = TypeVar("M")
TOKENIZER = byte_level()


class Peer:
    """One of the test's own sockets."""

    def __init__(self, socket: "zmq.Socket[bytes]"):
        self.socket = socket
        socket.linger = 0

    def send(self, msg: Message) -> None:
        self.socket.send(encode(msg))

    def receive(self, expected: type[M]) -> M:
        """The next message (beats are passed over), which must be of this type."""
        msg = self.receive_any(beats=expected is Beat)
        assert isinstance(msg, expected), msg
        return msg

    def receive_any(self, *, beats: bool = False) -> Message:
        """The next message, beats among them or not."""
        deadline = time.monotonic() + PATIENCE_MS / 1000
        while True:
            left_ms = max(0, int(1000 * (deadline - time.monotonic())))
            assert self.socket.poll(left_ms), "nothing came"
            frame = self.socket.recv()
            msg = decode(unstamped(frame) if self.socket.type == zmq.PULL else frame, set(message_types()))
            if beats or not isinstance(msg, Beat):
                return msg


class Cluster:
    """Both processes, started as launch.py starts them, up to Go."""

    def __init__(self, run_dir: Path, stack: ExitStack, template: str, tokenizer_text: str | None, **config: Any):
        model = run_dir / "model"
        model.mkdir()
        write_tokenizer(model, TOKENIZER, template)
        if tokenizer_text is not None:
            (model / "tokenizer.json").write_text(tokenizer_text)
        ClusterConfig(str(run_dir), ModelConfig(str(model)), start_timeout_s=30.0, **config).save()
        self._stack = stack
        self._context: zmq.Context[zmq.Socket[bytes]] = stack.enter_context(zmq.Context())
        self.endpoints = Endpoints(run_dir)
        self.launcher = StandInLauncher(run_dir, self._context, stack)
        self.scheduler = self.open(zmq.PULL, bind=self.endpoints.scheduler(0))
        self.detokenizer = StampedSocket(self._context, "scheduler", self.endpoints.detokenizer(0))
        stack.enter_context(self.detokenizer.socket)
        self.processes = {name: self.launcher.start(f"tokenizer_proc.{name}") for name in NAMES}

    def open(self, kind: int, **address: str) -> Peer:
        return Peer(self._stack.enter_context(open_socket(self._context, kind, **address)))

    def go(self, context_len: int = 4096) -> "Cluster":
        identities = {}
        while len(identities) < len(NAMES):
            identity, msg = self.launcher.next_said()
            assert isinstance(msg, Ready), msg
            assert msg.pid == self.processes[msg.name].pid
            identities[msg.name] = identity
        limits = Go(512, 16, context_len, TOKENIZER.get_vocab_size(), ints(TOKENIZER.token_to_id(SPECIAL.content)))
        for identity in identities.values():
            self.launcher.tell(identity, limits)
        return self

    def client(self, address: str | None = None) -> Peer:
        return self.open(zmq.DEALER, connect=address or self.endpoints.frontend)

    def step(self, *rows: tuple[int, list[int], int]) -> None:
        """Send the tokens of a step as the scheduler would: request, tokens, finish code."""
        self.detokenizer.send(token_batch(*rows))

    def stats(self, client: Peer) -> dict[str, int]:
        client.send(GetStats(3))
        query = self.scheduler.receive(GetStats)
        self.detokenizer.send(Stats(query.query, {"scheduler.steps": 1}))
        stats = client.receive(Stats)
        assert stats.query == 3
        return stats.values


@contextmanager
def running(
    run_dir: Path, template: str = CHATML, tokenizer_text: str | None = None, **config: Any
) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(run_dir, stack, template, tokenizer_text, **config)


@pytest.fixture
def cluster(short_dir: Path) -> Iterator[Cluster]:
    with running(short_dir) as cluster:
        yield cluster.go()


def request(rid: int = 1, stream: bool = True, params: SamplingParams | None = None, **prompt: Any) -> Generate:
    given = {"text": None, "token_ids": None, "chat": None} | (prompt or {"text": "The quick"})
    return Generate(rid=rid, params=params or SamplingParams(seed=1), stream=stream, **given)


def token_batch(*rows: tuple[int, list[int], int]) -> TokenBatch:
    return TokenBatch(
        ints(*(rid for rid, _, _ in rows)),
        ints(*(len(tokens) for _, tokens, _ in rows)),
        ints(*(t for _, tokens, _ in rows for t in tokens)),
        bytes(finish for _, _, finish in rows),
        ints(*(0 for _ in rows)),
        array("q", range(5)),
    )


def ids_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids


def read_all(client: Peer) -> tuple[str, list[int], int]:
    """Text, tokens and finish code of the one request of a client."""
    text, tokens = "", []
    while True:
        batch = client.receive(TextBatch)
        text += "".join(batch.texts)
        tokens += list(batch.token_ids)
        if batch.finish[-1]:
            return text, tokens, batch.finish[-1]


@pytest.mark.parametrize("stream", [True, False])
def test_a_prompt_goes_in_and_its_text_comes_out(cluster: Cluster, stream: bool) -> None:
    client = cluster.client()
    client.send(request(stream=stream, chat=(ChatMessage("user", "hé"),)))
    add = cluster.scheduler.receive(AddRequest)
    assert TOKENIZER.decode(list(add.prompt)) == "<|im_start|>user\nhé<|im_end|>\n<|im_start|>assistant\n"
    answer = [*ids_of(" fox 🙂 naïve 你好"), TOKENIZER.token_to_id(SPECIAL.content)]
    for token in answer[:-1]:
        cluster.step((add.rid, [token], Finish.NONE))
    cluster.step((add.rid, answer[-1:], Finish.STOP))
    assert read_all(client) == (" fox 🙂 naïve 你好", answer, Finish.STOP)
    values = cluster.stats(client)
    assert values["tokenizer.live_requests"] == values["detokenizer.streams"] == 0
    assert values["tokenizer.refused_frames"] == values["detokenizer.refused_frames"] == 0
    assert values["scheduler.steps"] == 1


def test_times_grow_along_the_way(cluster: Cluster) -> None:
    client = cluster.client()
    client.send(request())
    before = time.monotonic_ns()
    cluster.step((cluster.scheduler.receive(AddRequest).rid, ids_of(" fox"), Finish.LENGTH))
    batch = client.receive(TextBatch)
    after = time.monotonic_ns()
    assert list(batch.times[:5]) == [0, 1, 2, 3, 4] and len(batch.times) == 8
    assert before < batch.times[5] <= batch.times[6] <= batch.times[7] < after
    assert list(batch.prompt_tokens) == [len(TOKENIZER.encode("The quick").ids)]


def test_a_stop_string_is_not_shown_and_ends_the_request_everywhere(cluster: Cluster) -> None:
    client = cluster.client()
    client.send(request(params=SamplingParams(stop=("fox jumps",))))
    rid = cluster.scheduler.receive(AddRequest).rid
    for text in ("Well,", " fox", " jumps", " over"):
        cluster.step((rid, ids_of(text), Finish.NONE))
    text, _, finish = read_all(client)
    assert (text, finish) == ("Well, ", Finish.STOP)
    assert cluster.scheduler.receive(Abort) == Abort(rid)
    assert cluster.stats(client)["detokenizer.streams"] == 1
    cluster.step((rid, [], Finish.ABORT))
    assert cluster.stats(client)["detokenizer.streams"] == 0  # its answer would have come first


def test_bad_frames_hurt_nobody(cluster: Cluster) -> None:
    bad, good = cluster.client(), cluster.client()
    for frame in (b"", b"\xc1", os.urandom(200), encode(request())[:-3], encode(Beat()), encode(Abort(1)) + b"x"):
        bad.socket.send(frame)
        cluster.detokenizer.socket.send(frame)
        cluster.detokenizer.socket.send_multipart([frame, frame])
    bad.socket.send_multipart([b"two", b"parts"])
    wrong = bytearray(encode(request(9, params=SamplingParams(temperature=1.5))))
    at = wrong.index(encode_float(1.5))
    wrong[at : at + 9] = encode_float(-1.5)
    bad.socket.send(wrong)
    error = bad.receive(RequestError)
    assert (error.rid, error.code, error.field) == (9, ErrorCode.INVALID, "params.temperature")
    good.send(request())
    rid = cluster.scheduler.receive(AddRequest).rid
    cluster.step((rid, ids_of(" fox"), Finish.NONE))
    again = Stamper("scheduler", cluster.endpoints.detokenizer(0)).stamp()
    cluster.detokenizer.socket.send(again + encode(token_batch((rid, ids_of(" fox"), Finish.NONE))))
    cluster.step((rid, ids_of(" jumps"), Finish.LENGTH))
    assert read_all(good)[0] == " fox jumps"
    values = cluster.stats(good)
    assert values["tokenizer.refused_frames"] == 8 and values["detokenizer.refused_frames"] == 19


def test_what_the_scheduler_said_and_cannot_be_read_ends_with_an_error_and_a_new_term(cluster: Cluster) -> None:
    """Never in silence: those whose rows are lost hear it, and the launcher is asked to have the others handed in
    again; nothing more is heard of the scheduler until then."""
    client = cluster.client()
    for rid in (1, 2):
        client.send(request(rid))
    # ids are given in the order of arrival, whatever tokenizing takes
    first, second = sorted(cluster.scheduler.receive(AddRequest).rid for _ in range(2))
    cluster.detokenizer.send(replace(token_batch((first, ids_of(" fox"), Finish.NONE)), cached=ints(-1)))
    cluster.step((second, ids_of(" fox"), Finish.NONE))
    error = client.receive(RequestError)
    assert (error.rid, error.code) == (1, ErrorCode.INTERNAL) and "lost" in error.problem
    _, resync = cluster.launcher.next_said()
    assert isinstance(resync, Resync) and resync.name == "detokenizer" and "scheduler" in resync.problem
    assert cluster.scheduler.receive(Abort).rid == first


def test_a_missing_frame_is_noticed(cluster: Cluster) -> None:
    client = cluster.client()
    client.send(request())
    rid = cluster.scheduler.receive(AddRequest).rid
    cluster.step((rid, ids_of(" fox"), Finish.NONE))
    cluster.detokenizer.stamper.stamp()
    cluster.step((rid, ids_of(" jumps"), Finish.NONE))
    batch = client.receive(TextBatch)
    assert batch.texts == (" fox",)
    _, resync = cluster.launcher.next_said()
    assert isinstance(resync, Resync) and "missing" in resync.problem


def encode_float(value: float) -> bytes:
    packed: bytes = msgpack.packb(value)
    return packed


def test_requests_of_a_dead_client_are_aborted(cluster: Cluster) -> None:
    dead, alive = cluster.client(), cluster.client()
    for rid in (1, 2):
        dead.send(request(rid))
    rids = {cluster.scheduler.receive(AddRequest).rid for _ in range(2)}
    alive.send(request())
    other = cluster.scheduler.receive(AddRequest).rid
    dead.socket.close()
    died = time.monotonic()
    assert {cluster.scheduler.receive(Abort).rid for _ in range(2)} == rids
    assert time.monotonic() - died < 10  # about half a second; the bound is only for a stalled test machine
    cluster.step((other, ids_of(" fox"), Finish.LENGTH))
    assert read_all(alive)[0] == " fox"
    assert cluster.stats(alive)["tokenizer.live_requests"] == 0


def test_silent_clients_hear_that_the_cluster_lives(cluster: Cluster) -> None:
    client = cluster.client()
    client.send(request())
    client.receive(Beat)
    client.receive(Beat)


def test_a_client_that_does_not_read_loses_only_its_own_stream(cluster: Cluster) -> None:
    slow, fast = cluster.client(), cluster.client()
    slow.send(request())
    slow_rid = cluster.scheduler.receive(AddRequest).rid
    fast.send(request())
    fast_rid = cluster.scheduler.receive(AddRequest).rid
    token = ids_of("a")
    sent = fast_got = 0
    while not cluster.scheduler.socket.poll(0):  # until the tokenizer gives up on it
        for _ in range(100):
            cluster.step((slow_rid, token, Finish.NONE), (fast_rid, token, Finish.NONE))
        sent += 100
        while fast_got < sent:  # a row can hold several tokens, when its OpenStream came late
            fast_got += len(fast.receive(TextBatch).token_ids)
        assert sent < 100_000
    assert cluster.scheduler.receive(Abort) == Abort(slow_rid)
    cluster.step((slow_rid, [], Finish.ABORT), (fast_rid, [], Finish.LENGTH))
    assert read_all(fast)[2] == Finish.LENGTH
    received = 0
    while True:
        assert slow.socket.poll(PATIENCE_MS)
        msg = decode(slow.socket.recv(), {TextBatch, RequestError, Beat})
        if isinstance(msg, RequestError):
            break
        received += len(msg.token_ids) if isinstance(msg, TextBatch) else 0
    assert (msg.rid, msg.code) == (1, ErrorCode.OVERLOADED) and 4096 < received <= sent
    slow.send(request(2))
    cluster.step((cluster.scheduler.receive(AddRequest).rid, token, Finish.LENGTH))
    assert read_all(slow)[0] == "a"


def test_the_detokenizer_keeps_what_a_stopped_tokenizer_does_not_take(cluster: Cluster) -> None:
    client = cluster.client()
    client.send(request(stream=False))
    rid = cluster.scheduler.receive(AddRequest).rid
    cluster.processes["tokenizer"].send_signal(signal.SIGSTOP)
    token = ids_of("a")
    count = 12_000  # more than the queues of both sockets hold
    for _ in range(count - 1):
        cluster.step((rid, token, Finish.NONE))
    cluster.step((rid, token, Finish.LENGTH))
    wait_until_idle(cluster.processes["detokenizer"].pid)  # else it may find the way free by chance
    cluster.processes["tokenizer"].send_signal(signal.SIGCONT)
    assert read_all(client)[0] == "a" * count


def wait_until_idle(pid: int) -> None:
    """Until the process has used no processor time for a while; the test holds if this comes too early, too."""
    process = psutil.Process(pid)
    used, since = process.cpu_times(), time.monotonic()
    while time.monotonic() < since + 0.2:
        time.sleep(0.02)
        if (now := process.cpu_times()) != used:
            used, since = now, time.monotonic()


def test_an_endless_template_holds_up_no_other_request(short_dir: Path) -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with running(short_dir, endless) as cluster:
        cluster.go()
        client = cluster.client()
        client.send(request(1, chat=(ChatMessage("user", "x"),)))
        client.send(request(2))
        rid = cluster.scheduler.receive(AddRequest).rid
        cluster.step((rid, ids_of(" fox"), Finish.LENGTH))
        answers = [client.receive_any() for _ in range(2)]
        texts = [m.texts for m in answers if isinstance(m, TextBatch)]
        errors = [(m.rid, "runs too long" in m.problem) for m in answers if isinstance(m, RequestError)]
        assert texts == [(" fox",)] and errors == [(1, True)]


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_client_over_loopback_tcp(short_dir: Path, host: str) -> None:
    try:
        port = free_port(host.strip("[]"))
    except OSError as error:
        pytest.skip(f"no {host} here: {error}")
    with running(short_dir, listen=f"tcp://{host}:{port}") as cluster:
        cluster.go()
        client = cluster.client(f"tcp://{host}:{port}")
        client.send(request())
        cluster.step((cluster.scheduler.receive(AddRequest).rid, ids_of(" fox"), Finish.LENGTH))
        assert read_all(client)[0] == " fox"


def free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        return int(server.getsockname()[1])


def test_to_end_is_to_answer_every_live_request(cluster: Cluster) -> None:
    client = cluster.client()
    for rid in (1, 2):
        client.send(request(rid))
        cluster.scheduler.receive(AddRequest)
    for process in cluster.processes.values():
        process.send_signal(END)
    errors = [client.receive(RequestError) for _ in range(2)]
    assert {(e.rid, e.code) for e in errors} == {(1, ErrorCode.SHUTTING_DOWN), (2, ErrorCode.SHUTTING_DOWN)}
    assert [p.wait(PATIENCE_MS / 1000) for p in cluster.processes.values()] == [0, 0]


def test_both_end_when_the_launcher_is_gone(cluster: Cluster) -> None:
    cluster.launcher.life.close()
    assert [p.wait(PATIENCE_MS / 1000) for p in cluster.processes.values()] == [70, 70]


def test_a_broken_tokenizer_is_told_to_the_launcher(short_dir: Path) -> None:
    with running(short_dir, tokenizer_text="{}") as cluster:
        messages = [cluster.launcher.next_said()[1] for _ in NAMES]
        for msg in messages:
            assert isinstance(msg, Fatal) and "tokenizer.json" in msg.problem
        assert [p.wait(PATIENCE_MS / 1000) for p in cluster.processes.values()] == [1, 1]


def test_neither_process_loads_torch(cluster: Cluster) -> None:
    for process in cluster.processes.values():
        assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
