"""The worker process: takes StepPlans, executes them in order, and answers on rank 0."""

import gc
import logging
import os
import sys
import time
from array import array
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import zmq

from common.child import Child, child_options, run_child
from common.messages import Joined, StepPlan, StepResult
from common.sockets import Inbox, Outbox, open_socket
from common.stamps import Lost, Stamper

if TYPE_CHECKING:
    from worker_proc.model_runner import LaunchedStep, ModelRunner
    from worker_proc.watch import Watch

log = logging.getLogger(__name__)

GROUP = "0"  # the one worker group of a cluster
_REFUSED_LOG_PERIOD_S = 10.0
_PROGRESS_PERIOD_S = 0.1


class LostPlan(RuntimeError):
    """A plan has not arrived: this rank can no longer be in step with the others."""


class WorkerLoop:
    """The process loop of one rank: sockets and clock around a ModelRunner."""

    def __init__(self, child: Child, rank: int, watch: "Watch") -> None:
        self._child = child
        self._rank = rank
        self._watch = watch
        self._epoch = -1
        self._inbox: Inbox | None = None
        self._outbox: Outbox | None = None
        self._poller = zmq.Poller()
        self._poller.register(child.control, zmq.POLLIN)
        self._poller.register(child.wake_fd, zmq.POLLIN)
        self._refused = child.refused
        self._refused_logged = 0
        self._refused_log_due = 0.0
        self._launched: deque[tuple[StepPlan, int, LaunchedStep]] = deque()  # with the time at which the plan came

    def join(self, epoch: int) -> None:
        """Take plans of this epoch from now on, and of no other."""
        child = self._child
        if self._inbox is not None:
            self._poller.unregister(self._inbox.socket)
            self._inbox.socket.close(0)
        if self._outbox is not None:
            self._poller.register(self._outbox.socket, 0)
            self._outbox.close()
        self._epoch = epoch
        self._watch.steps += len(self._launched)  # ranks are compared by the steps that they have taken
        self._launched.clear()  # nobody asks any more
        self._watch.busy = self._watch.device_only = False
        address = child.endpoints.plan(self._rank, epoch)
        plans = open_socket(child.context, zmq.PULL, bind=address)
        self._inbox = Inbox(plans, StepPlan, refused=self._refused, senders=("scheduler",), address=address)
        self._poller.register(plans, zmq.POLLIN)
        if self._rank == 0:
            address = child.endpoints.results(epoch)
            results = open_socket(child.context, zmq.PUSH, connect=address)
            self._outbox = Outbox(results, "the scheduler", stamper=Stamper(child.name, address))
        child.tell(Joined(child.name, epoch, self._watch.steps))

    def run(self, runner: "ModelRunner") -> None:
        """Execute plans until the child shall stop. Blocks in poll when there is nothing to do."""
        assert self._inbox is not None, "join comes first"
        while not self._child.stopping:
            if self._outbox is not None:
                self._outbox.flush()
                waiting = zmq.POLLOUT if self._outbox.backlog else 0
                self._poller.register(self._outbox.socket, waiting)  # an interest of 0 removes it
            ready: dict[Any, int] = {}
            if not self._inbox.ready:  # polling takes as long as decoding a plan
                # what the device computes is asked for by looking again
                ready = dict(self._poller.poll(0 if self._launched else None))
            received = time.monotonic_ns()
            for plan in self._inbox.drain(limit=1):
                if isinstance(plan, Lost):
                    raise LostPlan(f"{plan.sender}: {plan.problem}")
                assert isinstance(plan, StepPlan)
                if plan.epoch == self._epoch:
                    self._watch.device_only = False
                    self._launch(runner, plan, received)
                else:
                    self._refused.by_cause["stale"] += 1
            self._answer()
            # Plans come first: a rank that left one out would lose its peers.
            if self._child.control in ready and not self._inbox.ready:
                go = self._child.news()
                if go is not None and go.epoch != self._epoch:
                    self.join(go.epoch)
            if time.monotonic() >= self._refused_log_due:
                self._log_refused()
        self._log_refused()

    def _launch(self, runner: "ModelRunner", plan: StepPlan, received: int) -> None:
        self._watch.busy = True
        try:
            self._launched.append((plan, received, runner.launch(plan)))
        except Exception as error:
            if not self._child.stopping:  # else another rank has stopped already: there is nobody to compute with
                raise
            log.debug("step %d ended by the shutdown: %s", plan.step_id, error)

    def _answer(self) -> None:
        """Send the results of the steps that are done, in order."""
        while self._launched and self._launched[0][2].ready:
            plan, received, step = self._launched.popleft()
            output = step.finish()
            self._watch.steps += 1
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
                        array("i", [failure.row for failure in output.failures]),
                        tuple(failure.problem for failure in output.failures),
                        array("i", output.accepted),
                    )
                )
        self._watch.busy = bool(self._launched)
        self._watch.device_only = bool(self._launched)

    def _log_refused(self) -> None:
        refused = self._refused
        if refused.total > self._refused_logged:
            log.warning("refused %d frames so far: %s", refused.total, dict(refused.by_cause))
            self._refused_logged = refused.total
            self._refused_log_due = time.monotonic() + _REFUSED_LOG_PERIOD_S


class _Stopped(Exception):
    """The child shall stop while it is still loading."""


def serve(child: Child, rank: int, store: str, settled: tuple[int, int, int] | None) -> None:
    """Load the model, say so, and execute plans until the child shall stop."""
    gc.disable()  # imports make no garbage, and looking for it takes up to an eighth of their time
    from worker_proc.memory import CacheSize
    from worker_proc.startup import load_worker  # imports torch: only now, when the launcher's death is watched for
    from worker_proc.watch import Watch

    gc.freeze()
    gc.enable()
    report_due = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal report_due
        if child.stopping:
            raise _Stopped
        if time.monotonic() >= report_due or done == total:
            child.progress(done, total)
            report_due = time.monotonic() + _PROGRESS_PERIOD_S

    config = child.config
    try:
        size = CacheSize(*settled) if settled is not None else None
        worker = load_worker(config, rank, GROUP, Path(config.run_dir) / store, size, progress)
    except _Stopped:
        return
    with Watch(child, worker.tp) as watch:
        go = child.ready(worker.labels, **worker.info)
        if go is not None:
            loop = WorkerLoop(child, rank, watch)
            loop.join(go.epoch)
            loop.run(worker.runner)


@click.command()
@child_options
@click.option("--rank", type=click.IntRange(min=0), required=True)
@click.option("--store", default="store-0", help="File in the run directory where the ranks of this group meet.")
@click.option("--settled", type=(int, int, int), help="Pages, slots and snapshots, where an earlier group had these.")
def main(run_dir: Path, life_fd: int, rank: int, store: str, settled: tuple[int, int, int] | None) -> None:
    """One tensor-parallel rank of a cluster; started by the launcher."""
    run_child(f"worker-{rank}", run_dir, life_fd, lambda child: serve(child, rank, store, settled))
    _leave()


def _leave() -> None:
    """End this process, but not by taking torch apart: that is a quarter of a second of a core. CUDA ends in order."""
    torch = sys.modules.get("torch")
    if torch is not None and not torch.cuda.is_initialized():
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
