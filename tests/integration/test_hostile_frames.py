"""Whatever is thrown at the sockets of a running cluster is counted and ignored: its streams are as if alone."""

import os
import random
import socket
from array import array
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import zmq

from common.codec import MAX_FRAME_BYTES, encode
from common.messages import (
    Abort,
    AddRequest,
    Drained,
    Fatal,
    Finish,
    Generate,
    GetStats,
    Joined,
    OpenStream,
    Pulse,
    Ready,
    RequestError,
    Resync,
    StepResult,
    TextBatch,
    TokenBatch,
    ints,
)
from common.sampling_params import DrawParams, SamplingParams
from common.stamps import Stamper
from tests.helpers_http import dial
from tests.helpers_models import make_checkpoint
from tests.helpers_plans import empty_plan
from tests.integration.cluster import Cluster, running, wait_until
from tests.integration.test_recovery import FLAGS, Streams, in_the_middle

SAID = {  # to each kind of socket: by whom, and what might be believed
    "tokenizer": (
        "detokenizer",
        [
            TextBatch(ints(0), ints(0), ints(1), ints(7), ("x",), bytes([Finish.STOP]), ints(1), ints(0), array("q")),
            RequestError(0, 5, "a lie"),
        ],
    ),
    "detokenizer": (
        "scheduler",
        [
            TokenBatch(ints(0), ints(1), ints(7), bytes([Finish.STOP]), ints(0), array("q", range(5))),
            OpenStream(0, ("e",), True),
            RequestError(0, 5, "a lie"),
        ],
    ),
    "scheduler": ("tokenizer", [Abort(0), AddRequest(0, ints(1, 2), 5, ints(), DrawParams()), GetStats(0)]),
    "results": ("worker-0", [StepResult(0, 0, "0", ints(1), array("q"))]),
    "plan0": ("scheduler", [empty_plan(0), empty_plan(1)]),
    "plan1": ("scheduler", [empty_plan(0), empty_plan(1)]),
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(make_checkpoint("llama", tmp_path_factory.mktemp("m") / "llama"), *FLAGS, "--port", "0") as cluster:
        yield cluster
        assert not any(cluster.info["restarts"].values()), cluster.log


def frames(messages: list[object], chance: random.Random) -> Iterator[bytes]:
    """Random, truncated, damaged, of a wrong type or version, too large, and such as could be right."""
    valid = [encode(msg) for msg in messages]  # type: ignore[arg-type]
    wrong = encode(Generate(1, "x" * 99, None, None, SamplingParams()))
    yield from (b"", b"\xc1", b"\x80", b"\x93\xc0\xc0\xc0", b"\x9f" * 5000, wrong)
    for _ in range(40):
        yield chance.randbytes(chance.randrange(300))
    for frame in valid:
        yield frame
        yield frame + b"\x00"
        for end in range(0, len(frame), max(1, len(frame) // 8)):
            yield frame[:end]
        for at in range(len(frame)):
            yield frame[:at] + bytes([frame[at] ^ chance.randrange(1, 256)]) + frame[at + 1 :]
    yield bytes(MAX_FRAME_BYTES + 1)


def throw_at_link(context: "zmq.Context[zmq.Socket[bytes]]", path: Path, chance: random.Random) -> int:
    """At the socket where one of our processes listens to others. Returns how many frames."""
    sender, messages = SAID[path.stem.rpartition("-")[0]]
    old = Stamper(sender, path.name).stamp()  # of its first frame, which was here long ago
    ahead = bytearray(old)
    ahead[8:] = b"\xff" * 8
    other = Stamper(sender, f"{path.stem}9.sock").stamp()  # of another term or epoch
    sent = 0
    with context.socket(zmq.PUSH) as pushing:
        pushing.linger = 60_000
        pushing.connect(f"ipc://{path}")
        for frame in frames(messages, chance):
            for parts in ([frame], [old, frame], [other, frame], [chance.randbytes(16), frame], [frame, frame, frame]):
                if len(frame) <= 10**6 or parts[0] is old:
                    pushing.send(b"".join(parts))
                    pushing.send_multipart(parts)  # each part is taken for a frame
                    sent += 1 + len(parts)
        for frame in (b"", b"\xc1", chance.randbytes(50)):
            pushing.send(bytes(ahead) + frame)
            sent += 1
    return sent


def throw_at_control(context: "zmq.Context[zmq.Socket[bytes]]", path: Path, chance: random.Random, pid: int) -> int:
    lies = [
        Fatal("scheduler", "a lie"), Drained("tokenizer"), Resync("tokenizer", "a lie"), Joined("worker-0", 0, 99),
        Ready("worker-0", pid, {}), Pulse("worker-1", 0, True),
    ]  # fmt: skip
    sent = 0
    for identity in (None, b"worker-0", b"tokenizer.1.", b"\xff" * 9):
        with context.socket(zmq.DEALER) as dealer:
            dealer.linger = 60_000
            if identity is not None:
                dealer.set(zmq.IDENTITY, identity)
            dealer.connect(f"ipc://{path}")
            for frame in frames(list(lies), chance):
                if len(frame) <= 10**6 or identity is None:
                    dealer.send(frame)
                    sent += 1
            dealer.send_multipart([encode(lies[0]), encode(lies[0])])
            sent += 1
    return sent


def throw_bytes(path: Path) -> None:
    """No ZeroMQ at all."""
    for data in (b"", b"\xff" * 10, os.urandom(5000), b"GET / HTTP/1.1\r\n\r\n"):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(str(path))
            raw.settimeout(20)
            try:
                raw.sendall(data)
                raw.shutdown(socket.SHUT_WR)
                while raw.recv(4096):
                    pass
            except OSError:
                pass  # it was cut off


def test_streams_do_not_notice_what_is_thrown_at_every_socket(cluster: Cluster) -> None:
    chance = random.Random(5)
    with cluster.connect() as connection:
        alone = Streams(connection).finish()
        before = connection.stats()
        assert not any(count for name, count in before.items() if name.endswith("refused_frames"))
    sockets = sorted(cluster.run_dir.glob("*.sock"))
    links = [path for path in sockets if path.stem not in ("control", "frontend")]
    assert {path.stem.rpartition("-")[0] for path in links} == set(SAID), "every socket is attacked"
    thrown: dict[str, int] = {}
    with cluster.connect() as connection, zmq.Context() as context:
        streams = Streams(connection)
        streams.until(len(streams.answers))
        for path in sockets:
            throw_bytes(path)
        for path in links:
            thrown[path.stem] = throw_at_link(context, path, chance)
        worker = cluster.pid("worker-0")
        thrown["control"] = throw_at_control(context, cluster.run_dir / "control.sock", chance, worker)
        with context.socket(zmq.DEALER) as client:
            client.linger = 60_000
            client.connect(f"ipc://{cluster.run_dir / 'frontend.sock'}")
            bad = [frame for frame in frames([Abort(1)], chance) if len(frame) < 10**6]
            for frame in bad:
                client.send(frame)
        with dial(cluster.info["addresses"]["http"]) as http:
            http.sendall(os.urandom(3000) + b"\r\n\r\n")
        assert streams.finish() == alone

        def counted(name: str, *stems: str) -> bool:
            return connection.stats()[f"{name}.refused_frames"] >= sum(
                count for stem, count in thrown.items() if stem.rpartition("-")[0] in stems or stem in stems
            )

        for name, stems in {
            "scheduler": ("scheduler", "results"),
            "detokenizer": ("detokenizer",),
            "tokenizer": ("tokenizer",),
            "worker-0": ("plan0",),
            "worker-1": ("plan1",),
            "launcher": ("control",),
        }.items():
            wait_until(partial(counted, name, *stems), 30, lambda: f"{thrown}\n{connection.stats()}")
        again = Streams(connection)
        assert again.finish() == alone
    cluster.check_idle()


def test_a_link_that_has_lost_a_frame_begins_anew_and_streams_go_on(cluster: Cluster) -> None:
    """What our own processes say and cannot be read is not only counted: a forged later number looks like a gap."""
    with cluster.connect() as connection:
        alone = Streams(connection).finish()
        for number, kind in enumerate(("detokenizer", "tokenizer", "scheduler"), 1):
            sender, messages = SAID[kind]
            path = cluster.run_dir / f"{kind}-{number - 1}.sock"
            stamper = Stamper(sender, path.name)
            stamp = bytearray(stamper.stamp())
            stamp[8:] = (10**9).to_bytes(8, "little")
            with zmq.Context() as context, context.socket(zmq.PUSH) as pushing:
                pushing.connect(f"ipc://{path}")
                with in_the_middle(cluster, lambda: Streams(connection).begin()) as streams:
                    pushing.send(bytes(stamp) + encode(messages[-1]))
                assert streams.finish() == alone
            assert f"everybody is there: term {number}, epoch 0" in cluster.log
    assert cluster.log.count("has missed something") == 3
    assert not any(cluster.info["restarts"].values())
    cluster.check_idle()
