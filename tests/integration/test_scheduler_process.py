"""The real scheduler over its sockets; the test takes the places of launcher, tokenizer, detokenizer and worker."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import pytest
import zmq

from common.codec import decode, message_types
from common.config import ClusterConfig, ModelConfig, SchedulerConfig
from common.messages import (
    AddRequest,
    ErrorCode,
    Finish,
    GetStats,
    Go,
    Ready,
    RequestError,
    Resync,
    Stats,
    StepPlan,
    TokenBatch,
    ints,
)
from common.sampling_params import DrawParams, LogitEdits
from common.sockets import Endpoints, open_socket
from tests.helpers_launcher import StandInLauncher
from tests.helpers_wire import StampedSocket, unstamped
from tests.paper_worker import PaperWorker, solo_output

PATIENCE_MS = 30_000
M = TypeVar("M")


class SchedulerProcess:
    """The process, started as launch.py starts it, up to Go."""

    def __init__(self, run_dir: Path, stack: ExitStack):
        config = ClusterConfig(
            str(run_dir), ModelConfig("/none"), scheduler=SchedulerConfig(max_waiting=3, max_running=1)
        )
        config.save()
        context = stack.enter_context(zmq.Context())
        endpoints = Endpoints(run_dir)
        self.launcher = StandInLauncher(run_dir, context, stack)
        self.answers = stack.enter_context(open_socket(context, zmq.PULL, bind=endpoints.detokenizer(0)))
        self.plans = stack.enter_context(open_socket(context, zmq.PULL, bind=endpoints.plan(0, 0)))
        self.process = self.launcher.start("scheduler_proc.event_loop")
        identity, ready = self.launcher.next_said()
        assert isinstance(ready, Ready)
        self.launcher.tell(identity, Go(16, 4, 40, 50, ints()))
        self.tokenizer = StampedSocket(context, "tokenizer", endpoints.scheduler(0))
        self.worker = StampedSocket(context, "worker-0", endpoints.results(0))
        for socket in (self.tokenizer.socket, self.worker.socket):
            stack.enter_context(socket)

    def receive(self, socket: "zmq.Socket[bytes]", kind: type[M]) -> M:
        assert socket.poll(PATIENCE_MS), f"no {kind.__name__} came"
        msg = decode(unstamped(socket.recv()), set(message_types()))
        assert isinstance(msg, kind), msg
        return msg


@pytest.fixture
def scheduler(short_dir: Path) -> Iterator[SchedulerProcess]:
    with ExitStack() as stack:
        yield SchedulerProcess(short_dir, stack)


def add(rid: int, prompt: list[int], **more: object) -> AddRequest:
    fields = {"max_tokens": 4, "stop_token_ids": ints(), "draw": DrawParams()} | more
    return AddRequest(rid, ints(*prompt), **fields)  # type: ignore[arg-type]


def test_it_admits_by_itself(scheduler: SchedulerProcess) -> None:
    """Nobody has checked these requests before."""
    bad = [
        (add(1, []), ErrorCode.INVALID, "prompt"),
        (add(2, [1] * 40), ErrorCode.TOO_LONG, "prompt"),
        (add(3, [1, 50]), ErrorCode.INVALID, "prompt"),
        (add(4, [1], draw=DrawParams(edits=LogitEdits(logit_bias={50: 1.0}))), ErrorCode.INVALID, "logit_bias"),
    ]
    for msg, code, field in bad:
        scheduler.tokenizer.send(msg)
        error = scheduler.receive(scheduler.answers, RequestError)
        assert (error.rid, error.code, error.field) == (msg.rid, code, field)
    scheduler.tokenizer.send(add(9, [1, 2]))
    plan = scheduler.receive(scheduler.plans, StepPlan)  # it runs now, so the next ones wait
    for rid in range(10, 14):
        scheduler.tokenizer.send(add(rid, [rid]))
    error = scheduler.receive(scheduler.answers, RequestError)
    assert (error.rid, error.code) == (13, ErrorCode.OVERLOADED)
    worker, tokens, finish = PaperWorker(4), [], 0
    while not finish:
        scheduler.worker.send(worker.execute(plan))
        batch = scheduler.receive(scheduler.answers, TokenBatch)
        tokens += [t for rid, t in zip(batch.rids, batch.token_ids, strict=True) if rid == 9]
        finish = next((f for rid, f in zip(batch.rids, batch.finish, strict=True) if rid == 9), 0)
        if not finish:
            plan = scheduler.receive(scheduler.plans, StepPlan)
    assert (tokens, finish) == (solo_output([1, 2], 4), Finish.LENGTH)
    scheduler.tokenizer.send(GetStats(1))
    values = scheduler.receive(scheduler.answers, Stats).values
    assert values["scheduler.refused"] == 5 and values["scheduler.refused_frames"] == 0


def test_what_it_cannot_read_of_the_tokenizer_is_answered(scheduler: SchedulerProcess) -> None:
    scheduler.tokenizer.send(add(7, [1, 2], max_tokens=0))
    error = scheduler.receive(scheduler.answers, RequestError)
    assert (error.rid, error.code) == (7, ErrorCode.INTERNAL) and "max_tokens" in error.problem
    _, resync = scheduler.launcher.next_said()
    assert isinstance(resync, Resync) and resync.name == "scheduler"
