"""The scheduler process: the thin loop that carries messages between the sockets and the pure scheduler."""

import logging
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import click
import zmq

from common.child import Child, child_options, run_child
from common.codec import Message
from common.messages import Abort, AddRequest, ErrorCode, GetStats, Go, RequestError, Stats, StepResult
from common.sockets import Inbox, Outbox, open_socket
from common.stamps import Lost, Stamper
from scheduler_proc.kv_manager import KVManager
from scheduler_proc.recorder import RecordedScheduler, Recorder
from scheduler_proc.scheduler import ProtocolError, Scheduler

log = logging.getLogger(__name__)
WORKERS = "workers"  # the launcher's name for all ranks together
RETRY_MS = 5  # how soon a backlog is offered to a slow peer again
INTAKE_NS = 5 * 10**6  # spent on new requests before the next plan: those with many tokens take long to read


class EventLoop:
    """Owns the scheduler's sockets. No call blocks but `poll`."""

    def __init__(self, child: Child, go: Go):
        self._child = child
        self._term, self._epoch = go.term, go.epoch
        self._losses = go.restarts.get(WORKERS, 0)  # of the workers, but for those that were asked for
        self._stale = 0
        self._poller = zmq.Poller()
        self._poller.register(child.control, zmq.POLLIN)
        self._poller.register(child.wake_fd, zmq.POLLIN)
        self._open_term()
        self._open_epoch()

    def run(self, scheduler: Scheduler) -> None:
        """Until the child shall stop."""
        while not self._child.stopping:
            ready = dict(self._poller.poll(self._patience_ms(scheduler.next_deadline, self._child.pulse())))
            if self._child.control in ready:
                self._renew(scheduler)
            answers: list[Message] = []
            for msg in self._results.drain() if self._results.socket in ready else ():
                if isinstance(msg, Lost):
                    raise ProtocolError(f"{msg.sender}: {msg.problem}")
                assert isinstance(msg, StepResult)
                if msg.epoch == scheduler.epoch:
                    answers += scheduler.commit(msg, time.monotonic_ns())
                else:
                    self._stale += 1
            until = time.monotonic_ns() + INTAKE_NS
            for msg in self._requests.drain() if self._requests.socket in ready else ():
                if isinstance(msg, Lost):
                    answers += [RequestError(rid, ErrorCode.INTERNAL, msg.words) for rid in msg.rids]
                    self._child.resync(msg)
                    continue
                answers += self._with_own_counters(scheduler.handle(msg, now := time.monotonic_ns()))
                if now > until:
                    break
            answers += scheduler.expire(time.monotonic_ns())
            if scheduler.in_flight:  # workers that have something to do can wait for the next plan, others cannot
                self._answer(answers)
                self._plan(scheduler)
            else:
                self._plan(scheduler)
                self._answer(answers)
            for outbox in (*self._workers, self._detokenizer):
                outbox.flush()

    def _plan(self, scheduler: Scheduler) -> None:
        while (plan := scheduler.plan(time.monotonic_ns())) is not None:
            for worker in self._workers:
                worker.send(plan)

    def _renew(self, scheduler: Scheduler) -> None:
        """Begin what the launcher says: with new workers, or with a tokenizer that hands in all requests again."""
        go = self._child.news()
        if go is None:
            return
        if go.epoch != self._epoch:
            self._epoch = go.epoch
            self._close(self._results)
            for worker in self._workers:
                worker.close()
            self._open_epoch()
            losses, self._losses = self._losses, go.restarts.get(WORKERS, 0)
            self._answer(scheduler.reset(go.epoch, time.monotonic_ns(), crashed=self._losses > losses))
        if go.term != self._term:
            self._term = go.term
            self._close(self._requests)
            self._detokenizer.close()
            self._open_term()
            for rid in list(scheduler.requests):  # nobody waits for their answers
                scheduler.handle(Abort(rid), time.monotonic_ns())

    def _open_term(self) -> None:
        """The sockets of the conversation with tokenizer and detokenizer."""
        child, endpoints, context = self._child, self._child.endpoints, self._child.context
        here, there = endpoints.scheduler(self._term), endpoints.detokenizer(self._term)
        requests = open_socket(context, zmq.PULL, bind=here)
        self._requests = Inbox(
            requests, AddRequest, Abort, GetStats, refused=child.refused, senders=("tokenizer",), address=here
        )
        self._poller.register(requests, zmq.POLLIN)
        answers = open_socket(context, zmq.PUSH, connect=there)
        self._detokenizer = Outbox(answers, "the detokenizer", stamper=Stamper(child.name, there))

    def _open_epoch(self) -> None:
        """The sockets of the conversation with the workers."""
        child, context = self._child, self._child.context
        here = child.endpoints.results(self._epoch)
        results = open_socket(context, zmq.PULL, bind=here)
        self._results = Inbox(results, StepResult, refused=child.refused, senders=("worker-0",), address=here)
        self._poller.register(results, zmq.POLLIN)
        self._workers = []
        for rank in range(child.config.model.tp):
            there = child.endpoints.plan(rank, self._epoch)
            plans = open_socket(context, zmq.PUSH, connect=there)
            self._workers.append(Outbox(plans, f"worker-{rank}", stamper=Stamper(child.name, there)))

    def _close(self, inbox: Inbox) -> None:
        self._poller.unregister(inbox.socket)
        inbox.socket.close(0)

    def _patience_ms(self, deadline: int | None, pulse_s: float) -> int:
        """How long to wait for a message: not past a deadline, nor long when a slow peer has a backlog."""
        patience = int(pulse_s * 1000) + 1
        if self._detokenizer.backlog or any(worker.backlog for worker in self._workers):
            return min(RETRY_MS, patience)
        return patience if deadline is None else min(patience, max(0, (deadline - time.monotonic_ns()) // 10**6 + 1))

    def _answer(self, messages: Iterable[Message]) -> None:
        for msg in messages:
            self._detokenizer.send(msg)

    def _with_own_counters(self, messages: list[Message]) -> list[Message]:
        for msg in messages:
            if isinstance(msg, Stats):
                msg.values["scheduler.refused_frames"] = self._child.refused.total
                msg.values["scheduler.stale_results"] = self._stale
        return messages


def main(child: Child) -> None:
    go = child.ready()
    if go is None:
        return
    loop = EventLoop(child, go)
    cache = child.config.cache
    kv = KVManager(
        go.num_pages,
        go.page_size,
        prefix_cache=cache.prefix_cache,
        host_pages=go.host_pages,
        recurrent=go.recurrent,
        snapshots=go.snapshots,
    )
    config, record = child.config.scheduler, child.config.record
    if go.recurrent:
        config = replace(config, max_running=min(config.max_running, go.slots))
    recorder = None if record is None else new_recorder(Path(record), go.term)
    if recorder is None:
        loop.run(Scheduler(config, kv, go.context_len, epoch=go.epoch, vocab_size=go.vocab_size))
        return
    with recorder:
        loop.run(RecordedScheduler(recorder, config, kv, go.context_len, epoch=go.epoch, vocab_size=go.vocab_size))


def new_recorder(path: Path, term: int) -> Recorder | None:
    """A scheduler that replaces a dead one writes a file of its own beside that one's; where that cannot be, it serves
    without. Raises OSError for the first one, whose user is there to be told."""
    if term == 0:
        return Recorder(path)
    try:
        return Recorder(path.with_name(f"{path.name}.{term}"))
    except OSError as error:
        log.warning("the new scheduler is not recorded: %s", error)
        return None


@click.command()
@child_options
def cli(run_dir: Path, life_fd: int) -> None:
    run_child("scheduler", run_dir, life_fd, main)


if __name__ == "__main__":
    cli()
