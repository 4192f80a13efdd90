"""What every child process does alike: watch the launcher, speak to it, end cleanly.

A child is started as `python -m <package>.<module> --run-dir DIR --life-fd N [--rank R]`. The life pipe's writing end
is held by the launcher alone: when the launcher dies, however it dies, the pipe closes and the child ends.
"""

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import click
import zmq

from common.codec import Message, encode
from common.config import ClusterConfig
from common.log import set_up_logging
from common.messages import Fatal, Go, Progress, Ready
from common.sockets import Endpoints, Inbox, open_socket

log = logging.getLogger(__name__)


class Child:
    """The child's side of its life. `wake_fd` becomes readable when the child shall stop; `stopping` is then true."""

    def __init__(self, name: str, run_dir: Path, life_fd: int):
        self.name = name
        self.stopping = False
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._wake_in.setblocking(False)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the launcher decides
        signal.signal(signal.SIGTERM, lambda *_: self.stop())
        # The kernel may give the signal to another thread: then nothing but this byte ends the main thread's poll.
        signal.set_wakeup_fd(self._wake_in.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=_die_with_launcher, args=(life_fd,), daemon=True, name="life").start()
        self.config = ClusterConfig.load(run_dir)
        set_up_logging(name, self.config.log_level)
        self.endpoints = Endpoints(run_dir)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._control = open_socket(self.context, zmq.DEALER, connect=self.endpoints.control)

    @property
    def wake_fd(self) -> int:
        return self._wake_out.fileno()

    def stop(self) -> None:
        self.stopping = True
        try:
            self._wake_in.send(b"x")
        except BlockingIOError:
            pass  # enough wake-ups are waiting

    def tell(self, msg: Message) -> None:
        """Send the launcher a message; it always reads, so this does not wait."""
        self._control.send(encode(msg), zmq.NOBLOCK)

    def progress(self, done: int, total: int) -> None:
        self.tell(Progress(self.name, done, total))

    def ready(self, labels: dict[str, str] | None = None, **info: int) -> Go | None:
        """Say that this process is ready and wait until all are. None: the child shall stop instead."""
        self.tell(Ready(self.name, os.getpid(), info, labels or {}))
        inbox = Inbox(self._control, Go)
        poller = zmq.Poller()
        poller.register(self._control, zmq.POLLIN)
        poller.register(self.wake_fd, zmq.POLLIN)
        deadline = time.monotonic() + self.config.start_timeout_s
        while not self.stopping and time.monotonic() < deadline:
            poller.poll(1000)
            for msg in inbox.drain():
                if isinstance(msg, Go):
                    return msg
        return None

    def close(self) -> None:
        self.context.destroy(linger=500)


def run_child(name: str, run_dir: Path, life_fd: int, main: Callable[[Child], None]) -> None:
    """Run `main(child)`; tell the launcher the reason when it fails."""
    child = Child(name, run_dir, life_fd)
    try:
        main(child)
    except Exception as error:
        log.debug("%s failed", name, exc_info=True)
        log.error("%s: %s", type(error).__name__, error)
        child.tell(Fatal(name, f"{type(error).__name__}: {error}"[:8000]))
        child.close()
        sys.exit(1)
    child.close()


def child_options(function: Callable[..., None]) -> Callable[..., None]:
    """The command line options of every child process."""
    function = click.option("--run-dir", type=click.Path(path_type=Path), required=True)(function)
    return click.option("--life-fd", type=int, required=True)(function)


def _die_with_launcher(life_fd: int) -> None:
    while os.read(life_fd, 1):  # nothing is ever written: this returns when the launcher is gone
        pass
    os._exit(70)
