"""The detokenizer process: a thin loop around `Streams`.

    tokenizer ── OpenStream ──┐
                              ├─► PULL endpoints.detokenizer ── Streams ── PUSH ──► tokenizer
    scheduler ── TokenBatch ──┘

RequestError and Stats take the scheduler's way.
"""

import time
from dataclasses import replace
from pathlib import Path

import click
import zmq

from common.child import Child, child_options, run_child
from common.codec import Message
from common.messages import OpenStream, RequestError, Stats, TextBatch, TokenBatch
from common.sockets import Inbox, Outbox, open_socket
from tokenizer_proc.streams import Streams
from tokenizer_proc.text_decoder import TextDecoders
from tokenizer_proc.token_bytes import TokenBytes
from tokenizer_proc.tokenizer_files import load_tokenizer


def main(child: Child) -> None:
    """Load, say ready, serve until told to stop."""
    tokenizer = load_tokenizer(Path(child.config.model.path))
    decoders = TextDecoders(tokenizer)
    streams = Streams(decoders, TokenBytes(tokenizer, decoders).of)
    pull = open_socket(child.context, zmq.PULL, bind=child.endpoints.detokenizer)
    push = open_socket(child.context, zmq.PUSH, connect=child.endpoints.tokenizer)
    inbox = Inbox(pull, OpenStream, TokenBatch, RequestError, Stats)
    outbox = Outbox(push, "the tokenizer")
    if child.ready() is None:
        return
    poller = zmq.Poller()
    poller.register(pull, zmq.POLLIN)
    poller.register(child.wake_fd, zmq.POLLIN)
    while not child.stopping:
        # Registering with no flags removes the socket: writable is of interest only while something waits.
        poller.register(push, zmq.POLLOUT if outbox.backlog else 0)
        poller.poll()
        outbox.flush()
        for msg in inbox.drain():
            answer = _answer(streams, inbox, msg)
            if isinstance(answer, TextBatch):
                answer.times.append(time.monotonic_ns())
            if answer is not None:
                outbox.send(answer)


def _answer(streams: Streams, inbox: Inbox, msg: Message) -> Message | None:
    match msg:
        case TokenBatch():
            return streams.push(msg, time.monotonic_ns())
        case OpenStream():
            return streams.open(msg)
        case RequestError():
            return streams.fail(msg)
        case Stats():
            own = {
                "detokenizer.streams": len(streams),
                "detokenizer.refused_frames": inbox.refused.total,
            }
            return replace(msg, values={**msg.values, **own})
        case _:
            raise AssertionError(f"the inbox let {type(msg).__name__} pass")


@click.command()
@child_options
def cli(run_dir: Path, life_fd: int) -> None:
    """Run the detokenizer process (started by launch.py)."""
    run_child("detokenizer", run_dir, life_fd, main)


if __name__ == "__main__":
    cli()
