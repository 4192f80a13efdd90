"""The detokenizer process: a thin loop around `Streams`.

    tokenizer ── OpenStream ──┐
                              ├─► PULL endpoints.detokenizer ── Streams ── PUSH ──► tokenizer
    scheduler ── TokenBatch ──┘

RequestError and Stats take the scheduler's way.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click
import zmq

from common.child import Child, child_options, run_child
from common.codec import Message
from common.messages import ErrorCode, Go, OpenStream, RequestError, Stats, TextBatch, TokenBatch
from common.sockets import Inbox, Outbox, open_socket
from common.stamps import Lost, Stamper
from tokenizer_proc.streams import Streams
from tokenizer_proc.text_decoder import TextDecoders
from tokenizer_proc.token_bytes import TokenBytes
from tokenizer_proc.tokenizer_files import load_tokenizer


class Detokenizer:
    """The loop. All of its state belongs to one term (see Go in common/messages)."""

    def __init__(self, child: Child, new_streams: Callable[[], Streams], go: Go):
        self._child = child
        self._new_streams = new_streams
        self._poller = zmq.Poller()
        self._poller.register(child.control, zmq.POLLIN)
        self._poller.register(child.wake_fd, zmq.POLLIN)
        self._begin(go.term)

    def _begin(self, term: int) -> None:
        """Forget everything: the tokenizer opens its live streams again."""
        endpoints, context = self._child.endpoints, self._child.context
        self._term = term
        self._streams = self._new_streams()
        here, there = endpoints.detokenizer(term), endpoints.tokenizer(term)
        pull = open_socket(context, zmq.PULL, bind=here)
        self._inbox = Inbox(
            pull, OpenStream, TokenBatch, RequestError, Stats, refused=self._child.refused,
            senders=("tokenizer", "scheduler"), address=here,
        )  # fmt: skip
        push = open_socket(context, zmq.PUSH, connect=there)
        self._outbox = Outbox(push, "the tokenizer", stamper=Stamper(self._child.name, there))
        self._poller.register(pull, zmq.POLLIN)

    def _end(self) -> None:
        self._poller.unregister(self._inbox.socket)
        self._inbox.socket.close(0)
        self._poller.register(self._outbox.socket, 0)
        self._outbox.close()

    def run(self) -> None:
        """Until the child shall stop."""
        while not self._child.stopping:
            # Registering with no flags removes the socket: writable is of interest only while something waits.
            self._poller.register(self._outbox.socket, zmq.POLLOUT if self._outbox.backlog else 0)
            ready = dict(self._poller.poll(int(self._child.pulse() * 1000) + 1))
            go = self._child.news() if self._child.control in ready else None
            if go is not None and go.term != self._term:
                self._end()
                self._begin(go.term)
            self._outbox.flush()
            for msg in self._inbox.drain() if self._inbox.socket in ready else ():
                if isinstance(msg, Lost):
                    for rid in msg.rids:
                        self._outbox.send(RequestError(rid, ErrorCode.INTERNAL, msg.words))
                    self._child.resync(msg)
                    continue
                answer = self._answer(msg)
                if isinstance(answer, TextBatch):
                    answer.times.append(time.monotonic_ns())
                if answer is not None:
                    self._outbox.send(answer)
                self._child.pulse()

    def _answer(self, msg: Message) -> Message | None:
        match msg:
            case TokenBatch():
                return self._streams.push(msg, time.monotonic_ns())
            case OpenStream():
                return self._streams.open(msg, self._child.pulse)
            case RequestError():
                return self._streams.fail(msg)
            case Stats():
                own = {
                    "detokenizer.streams": len(self._streams),
                    "detokenizer.early": self._streams.early,
                    "detokenizer.refused_frames": self._child.refused.total,
                }
                return replace(msg, values={**msg.values, **own})
            case _:
                raise AssertionError(f"the inbox let {type(msg).__name__} pass")


def main(child: Child) -> None:
    """Load, say ready, serve until told to stop."""
    tokenizer = load_tokenizer(Path(child.config.model.path))
    decoders = TextDecoders(tokenizer)
    bytes_of = TokenBytes(tokenizer, decoders).of
    go = child.ready()
    if go is not None:
        Detokenizer(child, lambda: Streams(decoders, bytes_of), go).run()


@click.command()
@child_options
def cli(run_dir: Path, life_fd: int) -> None:
    """Run the detokenizer process (started by launch.py)."""
    run_child("detokenizer", run_dir, life_fd, main)


if __name__ == "__main__":
    cli()
