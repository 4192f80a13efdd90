"""The cluster's side of a client connection, played by the test on a real ROUTER socket in a thread."""

import queue
import threading
from array import array
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import zmq

from common.codec import decode, encode, message_types
from common.messages import Abort, Beat, Finish, Generate, GetInfo, Info, RequestError, TextBatch, ints
from common.run_dir import RunDir
from common.sockets import Endpoints, open_socket

TIMEOUT_S = 30.0
Answer = Callable[[Any], Iterable[Any]]


def rows(
    rid: int, text: str, *token_ids: int, finish: Finish = Finish.NONE, cached: int = 2, choice: int = 0
) -> TextBatch:
    """A TextBatch with one row, as the tokenizer sends it."""
    times = array("q", range(1, 9))
    tokens = ints(*token_ids)
    return TextBatch(
        ints(rid), ints(choice), ints(len(tokens)), tokens, (text,), bytes([finish]), ints(3), ints(cached), times
    )


class FakeFrontend:
    """Answers each message of a client with what `answer(message)` yields: messages, or raw bytes as they are.

    It lives in a run directory, so that clients find it like a real cluster. `received` holds every message, but those
    that ask what it serves if it has an `info` to answer them.
    """

    def __init__(self, path: Path, answer: Answer, *, address: str | None = None, info: Info | None = None):
        self._run_dir = RunDir(path)
        self._answer = answer
        self._info = info
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._router = open_socket(self._context, zmq.ROUTER, bind=address or Endpoints(path).frontend)
        self.address = self._router.get(zmq.LAST_ENDPOINT).decode()
        self._wake_in, wake_out = (self._context.socket(zmq.PAIR) for _ in range(2))
        self._wake_in.bind(f"inproc://{id(self)}")
        wake_out.connect(f"inproc://{id(self)}")
        self.received: queue.Queue[Any] = queue.Queue()
        self._thread = threading.Thread(target=self._serve, args=(wake_out,), daemon=True)
        self._thread.start()

    def announce(self) -> None:
        """Write cluster.json: the cluster is ready."""
        self._run_dir.write_cluster({"version": 1, "addresses": {"frontend": self.address, "listen": None}})

    def next(self, kind: type) -> Any:
        """The next received message, which must be of this type."""
        msg = self.received.get(timeout=TIMEOUT_S)
        assert type(msg) is kind, msg
        return msg

    def close(self) -> None:
        """Go away at once, as a cluster that is killed."""
        if self._thread.is_alive():
            self._wake_in.send(b"")
            self._thread.join(TIMEOUT_S)
            self._context.destroy(linger=200)

    def __enter__(self) -> "FakeFrontend":
        self.announce()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
        self._run_dir.close()

    def _serve(self, wake: "zmq.Socket[bytes]") -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(wake, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._router in ready:
                owner, frame = self._router.recv_multipart()
                msg = decode(frame, message_types())
                if isinstance(msg, GetInfo) and self._info is not None:
                    self._router.send_multipart([owner, encode(replace(self._info, rid=msg.rid))])
                    continue
                self.received.put(msg)
                for answer in self._answer(msg):
                    try:
                        self._router.send_multipart([owner, answer if isinstance(answer, bytes) else encode(answer)])
                    except zmq.ZMQError:
                        break  # that client is gone
            if wake in ready:
                return


def echo(msg: Any) -> Iterable[Any]:
    """Answer a text prompt with itself in two rows, and know no other message but an abort."""
    if isinstance(msg, Generate):
        text = msg.text or ""
        yield rows(msg.rid, text[:1], 11)
        yield Beat()
        yield rows(msg.rid, text[1:], 12, 13, finish=Finish.STOP)
    elif isinstance(msg, Abort):
        yield rows(msg.rid, "", finish=Finish.ABORT)


def choices_backwards(msg: Any) -> Iterable[Any]:
    """Answer each choice with its number, all begun first and the last one ended first."""
    if isinstance(msg, Generate):
        for choice in range(msg.n):
            yield rows(msg.rid, f"choice {choice}", 10 + choice, choice=choice)
        for choice in reversed(range(msg.n)):
            yield rows(msg.rid, "!", 20, choice=choice, finish=Finish.LENGTH, cached=2 * choice)


def silent_after_one_row(msg: Any) -> Iterable[Any]:
    """Begin an answer and never go on; an abort is answered."""
    if isinstance(msg, Generate):
        yield rows(msg.rid, "begun", 11)
    elif isinstance(msg, Abort):
        yield rows(msg.rid, "", finish=Finish.ABORT)


def refuse(error: Callable[[int], RequestError]) -> Answer:
    def answer(msg: Any) -> Iterable[Any]:
        if isinstance(msg, Generate):
            yield error(msg.rid)

    return answer
