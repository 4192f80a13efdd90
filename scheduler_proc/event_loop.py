"""The scheduler process: the thin loop that carries messages between the sockets and the pure scheduler."""

import logging
import time
from collections.abc import Iterable
from pathlib import Path

import click
import zmq

from common.child import Child, child_options, run_child
from common.codec import Message
from common.messages import Abort, AddRequest, GetStats, Stats, StepResult
from common.sockets import Inbox, Outbox, open_socket
from scheduler_proc.kv_manager import KVManager
from scheduler_proc.recorder import RecordedScheduler, Recorder
from scheduler_proc.scheduler import Scheduler

log = logging.getLogger(__name__)
RETRY_MS = 5  # how soon a backlog is offered to a slow peer again


class EventLoop:
    """Owns the scheduler's sockets. No call blocks but `poll`."""

    def __init__(self, child: Child):
        endpoints, context = child.endpoints, child.context
        self._child = child
        self._requests = Inbox(open_socket(context, zmq.PULL, bind=endpoints.scheduler), AddRequest, Abort, GetStats)
        self._results = Inbox(open_socket(context, zmq.PULL, bind=endpoints.results), StepResult)
        self._workers = [
            Outbox(open_socket(context, zmq.PUSH, connect=endpoints.plan(rank)), f"worker-{rank}")
            for rank in range(child.config.model.tp)
        ]
        self._detokenizer = Outbox(open_socket(context, zmq.PUSH, connect=endpoints.detokenizer), "detokenizer")
        self._poller = zmq.Poller()
        for socket in (self._requests.socket, self._results.socket):
            self._poller.register(socket, zmq.POLLIN)
        self._poller.register(child.wake_fd, zmq.POLLIN)

    def run(self, scheduler: Scheduler) -> None:
        """Until the child shall stop."""
        while not self._child.stopping:
            self._poller.poll(self._patience_ms(scheduler.next_deadline))
            for msg in self._results.drain():
                assert isinstance(msg, StepResult)
                self._answer(scheduler.commit(msg, time.monotonic_ns()))
            for msg in self._requests.drain():
                self._answer(self._with_own_counters(scheduler.handle(msg, time.monotonic_ns())))
            self._answer(scheduler.expire(time.monotonic_ns()))
            while (plan := scheduler.plan(time.monotonic_ns())) is not None:
                for worker in self._workers:
                    worker.send(plan)
            for outbox in (*self._workers, self._detokenizer):
                outbox.flush()

    def _patience_ms(self, deadline: int | None) -> int | None:
        """How long to wait for a message: not past a deadline, nor long when a slow peer has a backlog."""
        if self._detokenizer.backlog or any(worker.backlog for worker in self._workers):
            return RETRY_MS
        return None if deadline is None else max(0, (deadline - time.monotonic_ns()) // 10**6 + 1)

    def _answer(self, messages: Iterable[Message]) -> None:
        for msg in messages:
            self._detokenizer.send(msg)

    def _with_own_counters(self, messages: list[Message]) -> list[Message]:
        refused = self._requests.refused.total + self._results.refused.total
        for msg in messages:
            if isinstance(msg, Stats):
                msg.values["scheduler.refused_frames"] = refused
        return messages


def main(child: Child) -> None:
    loop = EventLoop(child)
    go = child.ready()
    if go is None:
        return
    kv = KVManager(go.num_pages, go.page_size, prefix_cache=child.config.cache.prefix_cache)
    if child.config.record is None:
        loop.run(Scheduler(child.config.scheduler, kv, go.context_len))
        return
    with Recorder(Path(child.config.record)) as recorder:
        loop.run(RecordedScheduler(recorder, child.config.scheduler, kv, go.context_len))


@click.command()
@child_options
def cli(run_dir: Path, life_fd: int) -> None:
    run_child("scheduler", run_dir, life_fd, main)


if __name__ == "__main__":
    cli()
