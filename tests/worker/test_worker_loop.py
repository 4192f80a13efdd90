"""The worker's loop with a device that computes after `launch` returns, as GPUs do: real sockets, a played runner."""

import queue
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from common.codec import RefusedFrames, decode
from common.messages import Joined, StepPlan, StepResult
from common.sockets import Endpoints, open_socket
from tests.helpers_wire import StampedSocket, unstamped
from worker_proc.main import WorkerLoop
from worker_proc.model_runner import StepOutput

PATIENCE_MS = 30_000


class Device:
    """Launches at once, is done when told."""

    def __init__(self) -> None:
        self.launched = threading.Semaphore(0)
        self.done = [threading.Event() for _ in range(4)]

    def launch(self, plan: StepPlan) -> Any:
        self.launched.release()
        step, done = plan.step_id, self.done[plan.step_id]

        class Step:
            @property
            def ready(self) -> bool:
                return done.is_set()

            def finish(self) -> StepOutput:
                assert done.is_set(), "finished before it was done"
                return StepOutput([40 + step], 1, 2)

        return Step()


class Rig:
    def __init__(self, home: Path, context: "zmq.Context[zmq.Socket[bytes]]"):
        self.endpoints = Endpoints(home)
        self.control = context.socket(zmq.PAIR)
        self.control.bind("inproc://control")
        self.wake = context.socket(zmq.PAIR)
        self.wake.bind("inproc://wake")
        self.results = open_socket(context, zmq.PULL, bind=self.endpoints.results(0))
        self.watch = SimpleNamespace(busy=False, device_only=False, steps=0)
        self.device = Device()
        self.told: queue.Queue[Joined] = queue.Queue()
        self.child: Any = SimpleNamespace(
            name="worker-0", context=context, endpoints=self.endpoints, control=self.control, wake_fd=self.wake,
            refused=RefusedFrames(), stopping=False, tell=self.told.put, news=self.news,
        )  # fmt: skip
        self.loop = WorkerLoop(self.child, 0, self.watch)  # type: ignore[arg-type]
        self.loop.join(0)
        assert self.joined() == (0, 0)
        self.plans = StampedSocket(context, "scheduler", self.endpoints.plan(0, 0))
        self.launcher = context.socket(zmq.PAIR)
        self.launcher.connect("inproc://control")
        self.waker = context.socket(zmq.PAIR)
        self.waker.connect("inproc://wake")
        self.thread = threading.Thread(target=self.loop.run, args=(self.device,))
        self.thread.start()

    def news(self) -> Any:
        return SimpleNamespace(epoch=int(self.control.recv()))

    def joined(self) -> tuple[int, int]:
        """The epoch that was joined, after how many steps."""
        message = self.told.get(timeout=PATIENCE_MS / 1e3)
        return message.epoch, message.steps

    def send(self, step: int) -> None:
        self.plans.send(StepPlan(step, 0, "0", decode=b"\x01"))

    def result(self) -> StepResult:
        assert self.results.poll(PATIENCE_MS), "no result"
        result: StepResult = decode(unstamped(self.results.recv()), {StepResult})
        return result

    def end_loop(self) -> None:
        self.child.stopping = True
        self.waker.send(b"")
        self.thread.join(PATIENCE_MS / 1e3)
        assert not self.thread.is_alive()


@pytest.fixture
def rig(short_dir: Path) -> Iterator[Rig]:
    with zmq.Context() as context:
        rig = Rig(short_dir, context)
        try:
            yield rig
        finally:
            rig.end_loop()
            context.destroy(0)


def test_the_next_step_is_launched_before_the_last_one_is_done(rig: Rig) -> None:
    rig.send(0)
    rig.send(1)
    for _ in range(2):
        assert rig.device.launched.acquire(timeout=PATIENCE_MS / 1e3), "step 1 waited for step 0"
    assert rig.watch.busy
    assert not rig.results.poll(0)
    rig.device.done[1].set()  # done early, but results come in order
    rig.device.done[0].set()
    assert [(r.step_id, r.tokens) for r in (rig.result(), rig.result())] == [
        (0, array("i", [40])),
        (1, array("i", [41])),
    ]
    rig.device.done[2].set()
    rig.send(2)
    assert rig.result().step_id == 2
    assert rig.watch.steps >= 2


def test_steps_of_an_old_epoch_are_not_answered(rig: Rig) -> None:
    rig.send(0)
    assert rig.device.launched.acquire(timeout=PATIENCE_MS / 1e3)
    rig.end_loop()
    rig.loop.join(1)
    rig.device.done[0].set()
    rig.loop._answer()
    assert not rig.watch.busy
    assert not rig.results.poll(0)


def test_steps_that_are_still_computed_count_when_an_epoch_is_joined(rig: Rig) -> None:
    """Rank 0 waits for its device, others count a step as soon as it is launched: all must name the same number."""
    rig.device.done[0].set()
    rig.send(0)
    assert rig.result().step_id == 0
    rig.send(1)
    for _ in range(2):
        assert rig.device.launched.acquire(timeout=PATIENCE_MS / 1e3)
    rig.launcher.send(b"1")
    assert rig.joined() == (1, 2)
    rig.end_loop()
    assert not rig.watch.busy and not rig.watch.device_only, "an idle worker would be taken for a frozen one"
