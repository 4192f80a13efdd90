"""Every process of a real cluster is killed and frozen while 32 streams run, and nothing is lost."""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from common.answer import Answer
from common.connection import Connection, ConnectionLost
from common.messages import ErrorCode, Finish, RequestError, ints
from common.rows import Row
from common.sampling_params import SamplingParams
from common.sockets import Endpoints
from tests.helpers_http import dial, head, post, until, until_closed
from tests.helpers_models import make_checkpoint
from tests.helpers_plans import GREEDY, PlanWriter, empty_plan
from tests.helpers_wire import StampedSocket
from tests.integration.cluster import Cluster, running, wait_until

STREAMS = 32
TOKENS = 200
PATIENCE_S = 90.0
FLAGS = ("--tp", "2", "--dtype", "float32", "--kv-tokens", "8192", "--chunk-tokens", "16")
MANY = ("--restarts", "1000")  # how they are bounded has a test of its own
PROMPTS = [[5, 6, 7, 8] * (i % 5) + [9 + i] for i in range(STREAMS)]  # some share a prefix
VARIANTS: list[dict[str, Any]] = [  # what depends on more than the last tokens, or is told about them
    {},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"logprobs": 2},
    {"prompt_logprobs": 1},
    {"min_tokens": TOKENS // 2, "stop_token_ids": ints(7, 31, 101)},
    {"stop": ("never comes",)},
    {"allowed_token_ids": ints(*range(60, 80)), "bad_words": ("a", "bc", "def", "gg", "hih")},
]
PARAMS = [
    SamplingParams(temperature=i % 2 * 0.9, seed=i, max_tokens=TOKENS, ignore_eos=True, **VARIANTS[i % len(VARIANTS)])
    for i in range(STREAMS)
]
Output = tuple[list[int], str, Finish, list[int], list[int]]  # tokens, text, end; those with log probabilities


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("m") / "llama")


@pytest.fixture(scope="module")
def cluster(checkpoint: Path) -> Iterator[Cluster]:
    with running(checkpoint, *FLAGS, *MANY) as cluster:
        yield cluster
        refused = {name: count for name, count in cluster.check_idle().items() if name.endswith("refused_frames")}
        assert len(refused) == 6 and not any(refused.values()), refused


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

    def begin(self) -> "Streams":
        """Read a quarter of the tokens."""
        self.until(len(self.answers) * TOKENS // 4)
        return self

    def until(self, tokens: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.left and self.tokens < tokens:
            assert time.monotonic() < deadline, f"{len(self.left)} streams stand still"
            self.read()

    def finish(self) -> list[Output]:
        self.until(len(self.answers) * TOKENS + 1)
        assert not self.left and not self.errors, self.errors
        return [output_of(answer) for answer in self.answers.values()]


def output_of(answer: Answer) -> Output:
    scored = [entry.token_id for entry in answer.logprobs or ()]
    prompt = [entry.token_id if entry else -1 for entry in answer.prompt_logprobs or ()]
    return answer.token_ids, "".join(answer.texts), answer.finish, scored, prompt


@contextlib.contextmanager
def in_the_middle(
    cluster: Cluster, begin: Callable[[], Streams], *, running: int = STREAMS, hold: str = "worker-0"
) -> Iterator[Streams]:
    """Streams that have begun and of which none has ended, nor ends before the block does: a rank is held, without
    which no step does. A process of tests that waits for a processor would else come too late to interrupt anything
    (a scheduler with groups for sessions can keep it waiting for a second, which is longer than these answers take)."""
    for _ in range(100):
        streams = begin()
        with cluster.frozen(hold):
            for _ in range(2):  # results that were sent before are counted when the second answer is
                values = cluster.stats()
            if values["scheduler.running"] == running:
                yield streams
                return
        streams.finish()
    pytest.fail("the streams had always ended before they could be interrupted")


def hurt(cluster: Cluster, victim: str, number: signal.Signals) -> None:
    """Kill or freeze a process, and wait until another one has its place."""
    pid = cluster.pid(victim)
    os.kill(pid, number)
    wait_replaced(cluster, {victim: pid})


def wait_replaced(cluster: Cluster, pids: dict[str, int]) -> None:
    def replaced() -> bool:
        now = cluster.info["pids"]
        return all(now.get(name, pid) != pid for name, pid in pids.items())

    wait_until(replaced, PATIENCE_S, lambda: cluster.log)
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
    pid = cluster.pid(victim)
    hold = "worker-1" if victim == "worker-0" else "worker-0"
    with cluster.connect() as connection:
        with in_the_middle(cluster, lambda: Streams(connection).begin(), hold=hold) as streams:
            os.kill(pid, number)
        wait_replaced(cluster, {victim: pid})
        assert streams.finish() == undisturbed
    cluster.check_idle()


@pytest.mark.parametrize("victim", ["worker-1", "scheduler"])
def test_a_process_that_is_frozen_while_it_loads(cluster: Cluster, undisturbed: list[Output], victim: str) -> None:
    """It has never said that it lives; what waits for it goes on long before --start-timeout (300 s)."""
    pid = cluster.pid(victim)
    with cluster.connect() as connection:
        with in_the_middle(cluster, lambda: Streams(connection).begin()) as streams:
            os.kill(pid, signal.SIGKILL)
        wait_replaced(cluster, {victim: pid})
        restarts = cluster.info["restarts"]
        hurt(cluster, victim, signal.SIGSTOP)
        assert streams.finish() == undisturbed
        unit = "workers" if victim.startswith("worker") else victim
        assert cluster.info["restarts"] == restarts | {unit: restarts[unit] + 1}
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
        with in_the_middle(cluster, lambda: Streams(connection).begin()) as streams:
            pids = {name: cluster.pid(name) for name in ("worker-1", "scheduler", "detokenizer")}
            for pid in pids.values():
                os.kill(pid, signal.SIGKILL)
        assert streams.finish() == undisturbed
        wait_replaced(cluster, pids)
    cluster.check_idle()


def test_hang_up_restarts_the_workers(cluster: Cluster, undisturbed: list[Output]) -> None:
    with cluster.connect() as connection:
        restarts = cluster.info["restarts"]
        with in_the_middle(cluster, lambda: Streams(connection).begin()) as streams:
            before = {name: cluster.pid(name) for name in ("worker-0", "worker-1")}
            cluster.process.send_signal(signal.SIGHUP)
        assert streams.finish() == undisturbed
        wait_replaced(cluster, before)
        assert cluster.info["restarts"] == restarts, "it is no failure"
    cluster.check_idle()


def test_where_cluster_json_cannot_be_written_the_cluster_goes_on(cluster: Cluster, undisturbed: list[Output]) -> None:
    """As on a full disk, for as long as that lasts."""
    old = cluster.pid("scheduler")
    obstacle = cluster.run_dir / "cluster.json.tmp"
    obstacle.mkdir()
    try:
        with cluster.connect() as connection:
            with in_the_middle(cluster, lambda: Streams(connection).begin()) as streams:
                os.kill(old, signal.SIGKILL)
            assert streams.finish() == undisturbed
        assert cluster.pid("scheduler") == old and "cluster.json is outdated" in cluster.log
    finally:
        obstacle.rmdir()
    wait_until(lambda: cluster.info["pids"].get("scheduler", old) != old, PATIENCE_S)
    cluster.remember()
    cluster.check_idle()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_without_tokenizer_clients_hear_it_and_it_serves_again(
    cluster: Cluster, undisturbed: list[Output], number: signal.Signals
) -> None:
    restarts = cluster.info["restarts"]["tokenizer"]
    pid = cluster.pid("tokenizer")
    with cluster.connect() as connection:
        with in_the_middle(cluster, lambda: Streams(connection).begin()) as streams:
            os.kill(pid, number)
        wait_replaced(cluster, {"tokenizer": pid})
        with pytest.raises(ConnectionLost, match="broken"):
            streams.finish()
    wait_until(lambda: serves(cluster), PATIENCE_S)
    with cluster.connect() as connection:
        assert Streams(connection).finish() == undisturbed
    assert cluster.info["restarts"]["tokenizer"] == restarts + 1, cluster.log
    cluster.check_idle()


def test_without_gateway_others_go_on_and_it_serves_again_at_its_port(checkpoint: Path) -> None:
    with running(checkpoint, *FLAGS, "--port", "0") as cluster, cluster.connect() as connection:
        expected = Streams(connection, count=4).finish()
        address = cluster.info["addresses"]["http"]
        body = {"prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True, "stream": True}
        pid = cluster.pid("gateway")
        with contextlib.ExitStack() as stack:
            https: list[socket.socket] = []

            def begin() -> Streams:
                https.append(stack.enter_context(dial(address)))
                https[-1].sendall(post("/v1/completions", body))
                until(https[-1], b"data:")
                return Streams(connection, count=4).begin()

            with in_the_middle(cluster, begin, running=5) as streams:
                os.kill(pid, signal.SIGKILL)
            wait_replaced(cluster, {"gateway": pid})
            with contextlib.suppress(ConnectionResetError):
                assert b"[DONE]" not in until_closed(https[-1])
        assert streams.finish() == expected
        wait_until(lambda: cluster.info["addresses"]["http"] == address and healthy(address), PATIENCE_S)
        with dial(address) as http:
            http.sendall(post("/v1/completions", body))
            until(http, b"[DONE]")


def healthy(address: str) -> bool:
    try:
        with dial(address) as http:
            http.sendall(head("/health", None, method="GET", extra="Connection: close\r\n"))
            return b" 200 " in until_closed(http)
    except OSError:
        return False


def test_aborts_and_departures_count_during_a_loss(cluster: Cluster) -> None:
    """While the scheduler is away, some requests are aborted, and another client leaves without a word."""
    pid = cluster.pid("scheduler")
    with cluster.connect() as connection:
        leaving = cluster.connect()

        def begin() -> Streams:
            streams = Streams(connection)
            Streams(leaving)
            return streams.begin()

        with in_the_middle(cluster, begin, running=2 * STREAMS) as streams:
            os.kill(pid, signal.SIGSTOP)
        aborted = list(streams.answers)[::2]
        for rid in aborted:
            connection.abort(rid)
        leaving.close()
        streams.until(STREAMS * TOKENS + 1)
        assert not streams.errors
        for rid, answer in streams.answers.items():
            assert (answer.finish is Finish.ABORT) == (rid in aborted)
        wait_replaced(cluster, {"scheduler": pid})
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
    with Cluster(checkpoint, "--kv-tokens", "1024", "--restarts", "2", "--drain-timeout", "0") as cluster:
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


def test_ranks_that_are_out_of_step_are_replaced(checkpoint: Path) -> None:
    """A plan reaches one rank only, as when its scheduler dies between two sends. The scheduler cannot make sense of
    the result and is replaced; the ranks that then join the new epoch have not done the same."""
    with running(checkpoint, *FLAGS) as cluster, cluster.connect() as connection:
        expected = Streams(connection, count=4).finish()
        steps = cluster.check_idle()["scheduler.steps"]
        with zmq.Context() as context:
            plans = StampedSocket(context, "scheduler", Endpoints(cluster.run_dir).plan(0, 0))
            for _ in range(steps):
                plans.stamper.stamp()
            plans.send(empty_plan(steps))
            wait_until(lambda: "out of step" in cluster.log, PATIENCE_S, lambda: cluster.log)
            plans.socket.close()
        assert "ProtocolError: result of step" in cluster.log
        assert Streams(connection, count=4).finish() == expected
        cluster.remember()


def test_a_rank_that_is_left_in_a_collective_is_not_waited_for(checkpoint: Path) -> None:
    """A plan with something to compute reaches one rank only, and then its scheduler dies."""
    with running(checkpoint, *FLAGS) as cluster, cluster.connect() as connection:
        expected = Streams(connection, count=4).finish()
        steps = cluster.check_idle()["scheduler.steps"]
        with zmq.Context() as context:
            plans = StampedSocket(context, "scheduler", Endpoints(cluster.run_dir).plan(1, 0))
            for _ in range(steps):
                plans.stamper.stamp()
            writer = PlanWriter(8, 16, step_id=steps)
            plans.send(writer.plan(enter={STREAMS: GREEDY}, chunks=((STREAMS, [5, 6, 7], True),)))
            os.kill(cluster.pid("scheduler"), signal.SIGKILL)
            wait_until(lambda: "out of step" in cluster.log, PATIENCE_S, lambda: cluster.log)
            plans.socket.close()
        assert Streams(connection, count=4).finish() == expected
        assert "got nowhere" not in cluster.log, "it was found by what the ranks say, not by a timeout"
        assert cluster.info["restarts"]["workers"] == 0, "it is no failure of theirs"
        cluster.remember()


def test_a_step_may_take_longer_than_a_freeze(tmp_path: Path) -> None:
    """One step of a long prefill, by both ranks, with the shortest timeout: however long it takes, it is no freeze."""
    size = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "max_position_embeddings": 8192}
    path = make_checkpoint("llama", tmp_path / "larger", **size)
    flags = ("--tp", "2", "--dtype", "float32", "--max-batch-tokens", "16384", "--kv-tokens", "32768")
    with running(path, *flags, "--freeze-timeout", "1") as cluster, cluster.connect() as connection:
        prompt = [5 + i % 200 for i in range(6000)]
        connection.submit(prompt, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
        rows = []
        while not rows or rows[-1].finish is Finish.NONE:  # type: ignore[union-attr]
            rows += connection.poll(1)
        assert isinstance(rows[-1], Row) and rows[-1].finish is Finish.LENGTH
        row = rows[0]
        assert isinstance(row, Row)
        print(f"the step took {(row.times[3] - row.times[2]) / 1e9:.1f} s")
        assert not any(cluster.info["restarts"].values()), cluster.log
