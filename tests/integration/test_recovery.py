"""Every process of a real cluster is killed and frozen while 32 streams run, and nothing is lost."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from common.connection import Answer, Connection, ConnectionLost
from common.messages import ErrorCode, Finish, RequestError
from common.sampling_params import SamplingParams
from tests.helpers_models import make_checkpoint
from tests.integration.cluster import Cluster, running, wait_until

STREAMS = 32
TOKENS = 100
PATIENCE_S = 90.0
FLAGS = ("--tp", "2", "--dtype", "float32", "--kv-tokens", "8192", "--chunk-tokens", "16")
MANY = ("--restarts", "1000")  # how they are bounded has a test of its own
# greedy and seeded; some share a prefix; some have stop strings that never come, but hold text back
PROMPTS = [[5, 6, 7, 8] * (i % 5) + [9 + i] for i in range(STREAMS)]
PARAMS = [
    SamplingParams(temperature=0.0 if i % 2 else 0.9, seed=i, max_tokens=TOKENS, ignore_eos=True)
    for i in range(STREAMS)
]
Output = tuple[list[int], str, Finish]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("m") / "llama")


@pytest.fixture(scope="module")
def cluster(checkpoint: Path) -> Iterator[Cluster]:
    with running(checkpoint, *FLAGS, *MANY) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> list[Output]:
    with cluster.connect() as connection:
        return Streams(connection).finish()


class Streams:
    """The 32 requests on one connection."""

    def __init__(self, connection: Connection, *, stream: bool = True, count: int = STREAMS) -> None:
        self.connection = connection
        submitted = zip(PROMPTS[:count], PARAMS, strict=False)
        self.answers = {connection.submit(prompt, params, stream=stream): Answer() for prompt, params in submitted}
        self.left = set(self.answers)
        self.errors: dict[int, RequestError] = {}

    @property
    def tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers.values())

    def read(self) -> None:
        for row in self.connection.poll(1):
            if isinstance(row, RequestError):
                self.errors[row.rid] = row
                self.left.remove(row.rid)
                continue
            self.answers[row.rid].add(row)
            if row.finish is not Finish.NONE:
                self.left.remove(row.rid)

    def until(self, tokens: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.left and self.tokens < tokens:
            assert time.monotonic() < deadline, f"{len(self.left)} streams stand still"
            self.read()

    def finish(self) -> list[Output]:
        self.until(STREAMS * TOKENS + 1)
        assert not self.left and not self.errors, self.errors
        return [(a.token_ids, "".join(a.texts), a.finish) for a in self.answers.values()]


def hurt(cluster: Cluster, victim: str, number: signal.Signals) -> None:
    """Kill or freeze a process, and wait until another one has its place."""
    pid = cluster.pid(victim)
    os.kill(pid, number)
    wait_until(lambda: cluster.info["pids"].get(victim, pid) != pid, PATIENCE_S, lambda: cluster.log)
    cluster.remember()


def serves(cluster: Cluster) -> bool:
    try:
        with cluster.connect() as connection:
            return bool(connection.stats())
    except ConnectionLost:
        return False


TARGETS = ["worker-0", "worker-1", "scheduler", "detokenizer"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
@pytest.mark.parametrize("victim", TARGETS)
def test_streams_go_on_exactly(
    cluster: Cluster, undisturbed: list[Output], victim: str, number: signal.Signals
) -> None:
    with cluster.connect() as connection:
        streams = Streams(connection)
        streams.until(STREAMS * TOKENS // 4)
        hurt(cluster, victim, number)
        assert streams.finish() == undisturbed
    cluster.check_idle()


def test_one_loss_after_the_other(cluster: Cluster, undisturbed: list[Output]) -> None:
    """Also answers that are sent as a whole, and a loss before the first token."""
    with cluster.connect() as connection:
        streams = Streams(connection)
        hurt(cluster, "scheduler", signal.SIGKILL)
        for part, victim in enumerate(["detokenizer", "worker-1", "scheduler"], 1):
            streams.until(part * STREAMS * TOKENS // 5)
            hurt(cluster, victim, signal.SIGKILL)
        assert streams.finish() == undisturbed
        whole = Streams(connection, stream=False)
        for victim in ("detokenizer", "scheduler", "worker-0"):
            hurt(cluster, victim, signal.SIGKILL)
        assert whole.finish() == undisturbed
    cluster.check_idle()


def test_several_at_once(cluster: Cluster, undisturbed: list[Output]) -> None:
    with cluster.connect() as connection:
        streams = Streams(connection)
        streams.until(STREAMS * TOKENS // 4)
        pids = {name: cluster.pid(name) for name in ("worker-1", "scheduler", "detokenizer")}
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
        assert streams.finish() == undisturbed
        assert all(cluster.pid(name) != pid for name, pid in pids.items())
        cluster.remember()
    cluster.check_idle()


def test_hang_up_restarts_the_workers(cluster: Cluster, undisturbed: list[Output]) -> None:
    with cluster.connect() as connection:
        streams = Streams(connection)
        streams.until(STREAMS * TOKENS // 4)
        before = [cluster.pid(name) for name in ("worker-0", "worker-1")]
        restarts = cluster.info["restarts"]
        cluster.process.send_signal(signal.SIGHUP)
        assert streams.finish() == undisturbed
        after = [cluster.pid(name) for name in ("worker-0", "worker-1")]
        assert not set(before) & set(after)
        assert cluster.info["restarts"] == restarts, "it is no failure"
        cluster.remember()
    cluster.check_idle()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_without_tokenizer_clients_hear_it_and_it_serves_again(
    cluster: Cluster, undisturbed: list[Output], number: signal.Signals
) -> None:
    with cluster.connect() as connection:
        streams = Streams(connection)
        streams.until(STREAMS * TOKENS // 4)
        hurt(cluster, "tokenizer", number)
        with pytest.raises(ConnectionLost, match="broken"):
            streams.finish()
    wait_until(lambda: serves(cluster), PATIENCE_S)
    with cluster.connect() as connection:
        assert Streams(connection).finish() == undisturbed
    cluster.check_idle()


def test_aborts_and_departures_count_during_a_loss(cluster: Cluster) -> None:
    """While the scheduler is away, some requests are aborted, and another client leaves without a word."""
    with cluster.connect() as connection:
        streams = Streams(connection)
        leaving = cluster.connect()
        Streams(leaving)
        streams.until(STREAMS * TOKENS // 4)
        pid = cluster.pid("scheduler")
        os.kill(pid, signal.SIGSTOP)
        aborted = list(streams.answers)[::2]
        for rid in aborted:
            connection.abort(rid)
        leaving.close()
        streams.until(STREAMS * TOKENS + 1)
        assert not streams.errors
        for rid, answer in streams.answers.items():
            assert answer.finish is (Finish.ABORT if rid in aborted else Finish.LENGTH)
        assert cluster.pid("scheduler") != pid
        cluster.remember()
    cluster.check_idle()


def test_cluster_json_names_the_living_and_stats_count_restarts(cluster: Cluster) -> None:
    before = cluster.check_idle()
    hurt(cluster, "detokenizer", signal.SIGKILL)
    with cluster.connect() as connection:
        assert len(Streams(connection, count=1).finish()) == 1
    values = cluster.check_idle()
    assert values["launcher.restarts.detokenizer"] == before["launcher.restarts.detokenizer"] + 1
    children = {p.pid for p in psutil.Process(cluster.process.pid).children()}
    assert set(cluster.info["pids"].values()) == children | {cluster.process.pid}


def test_a_process_that_keeps_dying_ends_the_cluster_with_the_cause(checkpoint: Path) -> None:
    cluster = Cluster(checkpoint, "--kv-tokens", "1024", "--restarts", "2", "--drain-timeout", "0")
    try:
        cluster.wait_ready()
        with cluster.connect() as connection:
            streams = Streams(connection, count=4)
            for _ in range(2):
                hurt(cluster, "scheduler", signal.SIGKILL)
            os.kill(cluster.pid("scheduler"), signal.SIGKILL)
            assert cluster.process.wait(20) == 1
            assert "scheduler was killed by SIGKILL; it was replaced 2 times within 60 s" in cluster.log
            while streams.left:
                streams.read()
            assert {e.code for e in streams.errors.values()} <= {ErrorCode.SHUTTING_DOWN}
        cluster.check_gone()
    finally:
        cluster.destroy()
