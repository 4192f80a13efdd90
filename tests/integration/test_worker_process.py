"""Real worker processes over their sockets; the test takes the places of launcher and scheduler."""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from common.child import END
from common.codec import decode, encode
from common.config import CacheConfig, ClusterConfig, ModelConfig, SchedulerConfig
from common.messages import Fatal, GetStats, Go, Joined, Progress, Pulse, Ready, StepPlan, StepResult, ints
from common.sampling_params import DrawParams
from common.sockets import Endpoints, open_socket
from tests.helpers_launcher import StandInLauncher
from tests.helpers_models import VOCAB_SIZE, greedy, make_checkpoint
from tests.helpers_paged import make_prompts
from tests.helpers_plans import GREEDY, PlanWriter, empty_plan
from tests.helpers_wire import StampedSocket, unstamped

PATIENCE_MS = 60_000
KV_TOKENS = 1000
PROMPTS = make_prompts(VOCAB_SIZE)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama-gqa-untied", tmp_path_factory.mktemp("model"))


class Workers:
    """The ranks of one worker group, started as launch.py starts them."""

    def __init__(self, run_dir: Path, model: ModelConfig, stack: ExitStack) -> None:
        config = ClusterConfig(
            str(run_dir),
            model,
            CacheConfig(page_size=8, kv_tokens=KV_TOKENS),
            SchedulerConfig(max_running=16),
            start_timeout_s=60.0,
        )
        config.save()
        self.context: zmq.Context[zmq.Socket[bytes]] = stack.enter_context(zmq.Context())
        self.endpoints = Endpoints(run_dir)
        self.launcher = StandInLauncher(run_dir, self.context, stack)
        self._stack = stack
        self.logs = [run_dir / f"log{rank}" for rank in range(model.tp)]
        self.processes = []
        for rank, path in enumerate(self.logs):
            with path.open("wb") as log:
                self.processes.append(self.launcher.start("worker_proc.main", "--rank", str(rank), stderr=log))
        self._open(0)
        self.ready: dict[str, Ready] = {}
        self._identities: list[bytes] = []
        self.progress: list[Progress] = []

    def _socket(self, stack: ExitStack, kind: int, **address: str) -> "zmq.Socket[bytes]":
        socket = stack.enter_context(open_socket(self.context, kind, **address))
        socket.linger = 0
        return socket

    def _open(self, epoch: int) -> None:
        """The scheduler's ends."""
        ranks = range(len(self.processes))
        self.results = self._socket(self._stack, zmq.PULL, bind=self.endpoints.results(epoch))
        self.plans = [StampedSocket(self.context, "scheduler", self.endpoints.plan(r, epoch)) for r in ranks]
        for plans in self.plans:
            self._stack.enter_context(plans.socket)

    def fatal(self) -> Fatal:
        """The next Fatal, whatever else comes before it."""
        while True:
            _, msg = self.launcher.next_said()
            if isinstance(msg, Fatal):
                return msg

    def go(self) -> "Workers":
        """Wait until every rank is ready, then let them serve."""
        identities = self._identities
        while len(self.ready) < len(self.processes):
            identity, msg = self.launcher.next_said()
            assert not isinstance(msg, Fatal), msg
            if isinstance(msg, Progress):
                self.progress.append(msg)
            elif isinstance(msg, Ready):
                self.ready[msg.name] = msg
                identities.append(identity)
        self._tell(0)
        return self

    def begin(self, epoch: int) -> None:
        """As after the loss of a scheduler: the ranks join a new epoch."""
        self._open(epoch)
        self._tell(epoch)

    def _tell(self, epoch: int) -> None:
        info = self.ready["worker-0"].info
        limits = (info["num_pages"], info["page_size"], info["context_len"], info["vocab_size"])
        for identity in self._identities:
            self.launcher.tell(identity, Go(*limits, ints(), epoch=epoch))
        self.joined = []
        while len(self.joined) < len(self.processes):
            _, msg = self.launcher.next_said()
            assert isinstance(msg, Joined) and msg.epoch == epoch, msg
            self.joined.append(msg)

    def send(self, plan: StepPlan) -> None:
        for socket in self.plans:
            socket.send(plan)

    def receive(self) -> StepResult:
        assert self.results.poll(PATIENCE_MS), "no result"
        result: StepResult = decode(unstamped(self.results.recv()), {StepResult})
        return result

    def step(self, plan: StepPlan) -> list[int]:
        self.send(plan)
        result = self.receive()
        assert (result.step_id, result.epoch, result.group) == (plan.step_id, plan.epoch, plan.group)
        return result.tokens.tolist()

    def wait_ends(self) -> list[int]:
        return [process.wait(timeout=PATIENCE_MS / 1000) for process in self.processes]


@contextmanager
def start(run_dir: Path, model: ModelConfig) -> Iterator[Workers]:
    with ExitStack() as stack:
        yield Workers(run_dir, model, stack)


def on_cpu(checkpoint: Path, tp: int = 1, context_len: int | None = None) -> ModelConfig:
    return ModelConfig(str(checkpoint), device="cpu", tp=tp, context_len=context_len, threads=1)


def crowd(workers: Workers, draws: dict[int, DrawParams], count: int) -> list[list[int]]:
    """All prompts, slots 0 to 4, two plans ahead of the results: the next decode never waits for a token."""
    pages = PlanWriter(KV_TOKENS // 8, 8)
    chunks = tuple((slot, PROMPTS[slot], True) for slot in draws)
    workers.send(pages.plan(enter=draws, chunks=chunks))
    outputs: list[list[int]] = [[] for _ in draws]
    for _ in range(count):
        workers.send(pages.plan(decode=tuple(draws)))
        result = workers.receive()
        assert list(result.times) == sorted(result.times) and len(result.times) == 3
        for output, token in zip(outputs, result.tokens, strict=True):
            output.append(token)
    workers.receive()
    return outputs


@pytest.mark.parametrize("tp", [1, 2])
def test_serves_plans(short_dir: Path, checkpoint: Path, tp: int) -> None:
    with start(short_dir, on_cpu(checkpoint, tp, context_len=200)) as workers:
        workers.go()
        assert set(workers.ready) == {f"worker-{rank}" for rank in range(tp)}
        assert [p.pid for p in workers.processes] == [workers.ready[f"worker-{r}"].pid for r in range(tp)]
        for ready in workers.ready.values():
            info = dict(ready.info)
            assert info.pop("kv_bytes_per_token") == 2 * 2 * 16 * 2 * 4 // tp  # layers, K and V, width, heads, bytes
            assert info == {"num_pages": 125, "page_size": 8, "context_len": 200, "vocab_size": VOCAB_SIZE, "eos_0": 0}
        for rank in range(tp):
            last = [p for p in workers.progress if p.name == f"worker-{rank}"][-1]
            assert last.done == last.total > 0

        assert crowd(workers, dict.fromkeys(range(5), GREEDY), 12) == greedy(checkpoint, PROMPTS, 12)
        # refused frames are skipped, and the next plan is executed as if they had never come
        for hostile in (b"", b"\xc1", b"\x93\x01\x06", os.urandom(500), encode(GetStats(1)), bytes(10**6)):
            for socket in workers.plans:
                socket.socket.send(hostile)
                socket.socket.send_multipart([hostile, hostile])
        workers.send(empty_plan(13, epoch=7))  # of another epoch: dropped
        last = PlanWriter(KV_TOKENS // 8, 8, step_id=13).plan(enter={9: GREEDY}, chunks=((9, PROMPTS[0], True),))
        assert workers.step(last) == greedy(checkpoint, PROMPTS[:1], 1)[0]
        workers.begin(1)
        assert {joined.steps for joined in workers.joined} == {14}
        restarted = PlanWriter(KV_TOKENS // 8, 8, epoch=1)
        chunk = (3, PROMPTS[3], True)
        assert [workers.step(restarted.plan(enter={3: GREEDY}, chunks=(chunk,)))] == greedy(checkpoint, PROMPTS[3:4], 1)

        for process in workers.processes:
            process.send_signal(END)
        assert workers.wait_ends() == [0] * tp
        while workers.launcher.control.poll(0):
            decode(workers.launcher.control.recv_multipart()[1], {Pulse})  # nothing else was said
        for log in workers.logs:
            assert "refused 19 frames so far" in log.read_text()


def test_ranks_draw_alike(short_dir: Path, checkpoint: Path) -> None:
    """Drawn tokens reach the other rank: after them, both ranks compute what one rank alone computes."""
    draws = {slot: DrawParams(0.8, 40, 0.9, 0.01, seed=slot) for slot in range(5)}
    outputs = []
    for tp in (1, 2):
        run_dir = short_dir / str(tp)
        run_dir.mkdir(mode=0o700)
        with start(run_dir, on_cpu(checkpoint, tp)) as workers:
            outputs.append(crowd(workers.go(), draws, 8))
            workers.launcher.life.close()
            assert workers.wait_ends() == [70] * tp  # the launcher is gone
    assert outputs[0] == outputs[1]


def test_a_wrong_step_id_is_fatal(short_dir: Path, checkpoint: Path) -> None:
    with start(short_dir, on_cpu(checkpoint)) as workers:
        workers.go()
        assert workers.step(empty_plan(5)) == []
        workers.send(empty_plan(7))
        assert workers.fatal() == Fatal("worker-0", "PlanError: step_id: expected 6, got 7")
        assert workers.wait_ends() == [1]


def test_an_idle_worker_uses_no_processor(short_dir: Path, checkpoint: Path) -> None:
    with start(short_dir, on_cpu(checkpoint)) as workers:
        workers.go()
        workers.step(empty_plan())
        process = psutil.Process(workers.processes[0].pid)
        before = sum(process.cpu_times()[:2])
        time.sleep(1.0)  # what is measured is a time in which nothing happens
        assert sum(process.cpu_times()[:2]) - before < 0.2


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"context_len": 300}, "ConfigError: context-len 300 is more than the 256 tokens that the model supports"),
        ({"path": "/nowhere"}, "no such directory"),
    ],
)
def test_what_cannot_be_loaded_is_fatal_with_its_reason(
    short_dir: Path, checkpoint: Path, change: dict[str, Any], problem: str
) -> None:
    with start(short_dir, replace(on_cpu(checkpoint), **change)) as workers:
        fatal = workers.fatal()
        assert fatal.name == "worker-0" and problem in fatal.problem
        assert workers.wait_ends() == [1]
