"""The worker process: takes StepPlans, executes them in order, and answers on rank 0."""

import gc
import logging
import time
from array import array
from pathlib import Path
from typing import TYPE_CHECKING

import click
import zmq

from common.child import Child, child_options, run_child
from common.messages import StepPlan, StepResult
from common.sockets import Inbox, Outbox, open_socket

if TYPE_CHECKING:
    from worker_proc.model_runner import ModelRunner

log = logging.getLogger(__name__)

GROUP = "0"  # the one worker group of a cluster
_REFUSED_LOG_PERIOD_S = 10.0
_PROGRESS_PERIOD_S = 0.1


class WorkerLoop:
    """The process loop of one rank: sockets and clock around a ModelRunner."""

    def __init__(self, child: Child, rank: int) -> None:
        """Bind the plan socket; plans that come before `run` wait in it."""
        self._child = child
        self._inbox = Inbox(open_socket(child.context, zmq.PULL, bind=child.endpoints.plan(rank)), StepPlan)
        self._outbox: Outbox | None = None
        if rank == 0:
            socket = open_socket(child.context, zmq.PUSH, connect=child.endpoints.results)
            self._outbox = Outbox(socket, "the scheduler")
        self._refused_logged = 0
        self._refused_log_due = 0.0

    def run(self, runner: "ModelRunner") -> None:
        """Execute plans until the child shall stop. Blocks in poll when there is nothing to do."""
        poller = zmq.Poller()
        poller.register(self._inbox.socket, zmq.POLLIN)
        poller.register(self._child.wake_fd, zmq.POLLIN)
        while not self._child.stopping:
            if self._outbox is not None:
                self._outbox.flush()
                waiting = zmq.POLLOUT if self._outbox.backlog else 0
                poller.register(self._outbox.socket, waiting)  # an interest of 0 removes it
            poller.poll()
            received = time.monotonic_ns()
            for plan in self._inbox.drain(limit=1):
                assert isinstance(plan, StepPlan)
                self._execute(runner, plan, received)
            if time.monotonic() >= self._refused_log_due:
                self._log_refused()
        self._log_refused()

    def _execute(self, runner: "ModelRunner", plan: StepPlan, received: int) -> None:
        try:
            output = runner.execute(plan)
        except Exception as error:
            if self._child.stopping:  # another rank has stopped already: there is nobody to compute with
                log.debug("step %d ended by the shutdown: %s", plan.step_id, error)
                return
            raise
        if self._outbox is not None:
            times = array("q", (received, output.forward_started, output.tokens_ready))
            self._outbox.send(
                StepResult(
                    plan.step_id,
                    plan.epoch,
                    plan.group,
                    array("i", output.tokens),
                    times,
                    output.logprobs,
                    output.prompt_logprobs,
                )
            )

    def _log_refused(self) -> None:
        refused = self._inbox.refused
        if refused.total > self._refused_logged:
            log.warning("refused %d frames so far: %s", refused.total, dict(refused.by_cause))
            self._refused_logged = refused.total
            self._refused_log_due = time.monotonic() + _REFUSED_LOG_PERIOD_S


class _Stopped(Exception):
    """The child shall stop while it is still loading."""


def serve(child: Child, rank: int) -> None:
    """Load the model, say so, and execute plans until the child shall stop."""
    from worker_proc.startup import load_worker  # imports torch: only now, when the launcher's death is watched for

    loop = WorkerLoop(child, rank)
    report_due = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal report_due
        if child.stopping:
            raise _Stopped
        if time.monotonic() >= report_due or done == total:
            child.progress(done, total)
            report_due = time.monotonic() + _PROGRESS_PERIOD_S

    try:
        worker = load_worker(child.config, rank, GROUP, progress)
    except _Stopped:
        return
    gc.collect()
    gc.freeze()  # what torch and the model brought along stays: no collection looks at it again
    if child.ready(worker.labels, **worker.info) is not None:
        loop.run(worker.runner)


@click.command()
@child_options
@click.option("--rank", type=click.IntRange(min=0), required=True)
def main(run_dir: Path, life_fd: int, rank: int) -> None:
    """One tensor-parallel rank of a cluster; started by launch.py."""
    run_child(f"worker-{rank}", run_dir, life_fd, lambda child: serve(child, rank))


if __name__ == "__main__":
    main()
