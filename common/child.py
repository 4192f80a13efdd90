"""What every child process does alike: watch the launcher, speak to it, end cleanly.

A child is started as `python -m <package>.<module> --run-dir DIR --life-fd N [--rank R]`. The life pipe's writing end
is held by the launcher alone: when the launcher dies, however it dies, the pipe closes and the child ends.
"""

import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import click
import zmq

from common.codec import Message, RefusedFrames, checked, encode
from common.config import ClusterConfig
from common.log import set_up_logging
from common.memory import settle_memory
from common.messages import Fatal, Go, Progress, Pulse, Ready, Resync
from common.sockets import Endpoints, Inbox, open_socket
from common.stamps import Lost

log = logging.getLogger(__name__)
MAX_FILES = 65_536  # open files of a process, where the hard limit allows it
GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # reach all: the launcher decides what follows
END = signal.SIGUSR1  # by which the launcher, and nobody else, ends a child
PULSE_S = 0.5  # how often a process says that it lives, or more often: each wake-up takes a core from the model
PULSES = 6  # within --freeze-timeout


class Child:
    """The child's side of its life. `wake_fd` becomes readable when the child shall stop; `stopping` is then true."""

    def __init__(self, name: str, run_dir: Path, life_fd: int):
        self.name = name
        self.stopping = False
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._wake_in.setblocking(False)
        for number in GROUP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)  # the launcher starts us with these blocked
        signal.signal(END, lambda *_: self.stop())
        # The kernel may give the signal to another thread: then nothing but this byte ends the main thread's poll.
        signal.set_wakeup_fd(self._wake_in.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=_die_with_launcher, args=(life_fd,), daemon=True, name="life").start()
        self.config = ClusterConfig.load(run_dir)
        set_up_logging(name, self.config.log_level)
        self.endpoints = Endpoints(run_dir)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self.refused = RefusedFrames()  # for all of its inboxes
        self.control = self.open_control()
        self._inbox = Inbox(self.control, Go, refused=self.refused)
        self.pulse_s = min(PULSE_S, self.config.supervision.freeze_timeout_s / PULSES)
        self._pulse_due = 0.0

    @property
    def wake_fd(self) -> int:
        return self._wake_out.fileno()

    def stop(self) -> None:
        self.stopping = True
        try:
            self._wake_in.send(b"x")
        except BlockingIOError:
            pass  # enough wake-ups are waiting

    def open_control(self, which: str = "") -> "zmq.Socket[bytes]":
        """A socket to the launcher, which knows by its identity whose it is; `which` of several."""
        identity = control_identity(self.name, os.getpid()) + which.encode()
        return open_socket(self.context, zmq.DEALER, connect=self.endpoints.control, identity=identity)

    def tell(self, msg: Message) -> None:
        """Send the launcher a message; it always reads, so this does not wait."""
        self.control.send(encode(msg), zmq.NOBLOCK)

    def progress(self, done: int, total: int) -> None:
        self.tell(Progress(self.name, done, total))

    def ready(self, labels: dict[str, str] | None = None, **info: int) -> Go | None:
        """Say that this process is ready and wait until all are. None: the child shall stop instead. Raises FieldError
        where the launcher would not take what is said."""
        settle_memory()
        self.tell(checked(Ready(self.name, os.getpid(), info, labels or {})))
        poller = zmq.Poller()
        poller.register(self.control, zmq.POLLIN)
        poller.register(self.wake_fd, zmq.POLLIN)
        deadline = time.monotonic() + self.config.start_timeout_s
        while not self.stopping and time.monotonic() < deadline:
            self.pulse()
            poller.poll(int(self.pulse_s * 1000))
            go = self.news()
            if go is not None:
                return go
        return None

    def news(self) -> Go | None:
        """The newest Go that has arrived on `control` since the last call, or None."""
        newest = None
        for msg in self._inbox.drain():
            assert isinstance(msg, Go)
            newest = msg
        return newest

    def resync(self, lost: Lost) -> None:
        """Ask for a new term, because something has been lost."""
        problem = f"{lost.sender}: {lost.problem}"[:8000]
        log.error("lost what was said by %s", problem)
        self.tell(Resync(self.name, problem))

    def pulse(self) -> float:
        """Tell the launcher that the calling loop lives, when it is time; to be called by the loop itself, each time
        around. Returns how many seconds may pass until the next call."""
        now = time.monotonic()
        if now >= self._pulse_due:
            with suppress(zmq.Again):  # the launcher has been stopped for an hour: it forgives what it did not hear
                self.tell(Pulse(self.name, 0, False, self.refused.total))
            self._pulse_due = now + self.until_pulse(now)
        return self._pulse_due - now

    def until_pulse(self, now: float) -> float:
        """Seconds from `time.monotonic() == now` on. All processes pulse at the same times, so that the launcher wakes
        up once for all of them."""
        return until_next(self.pulse_s, now)

    def close(self) -> None:
        self.context.destroy(linger=500)


def until_next(interval_s: float, now: float) -> float:
    """Seconds from `time.monotonic() == now` to the next multiple of an interval: the same time for all processes."""
    return interval_s - now % interval_s


def control_identity(name: str, pid: int) -> bytes:
    """By what the launcher knows a process on its control socket. Something may follow after a dot."""
    return f"{name}.{pid}.".encode()


def signal_name(number: int) -> str:
    """What killed a process, in words."""
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have none
        return f"signal {number}"


def run_child(name: str, run_dir: Path, life_fd: int, main: Callable[[Child], None]) -> None:
    """Run `main(child)`; tell the launcher the reason when it fails."""
    _allow_many_files()
    child = Child(name, run_dir, life_fd)
    try:
        main(child)
    except Exception as error:
        log.debug("%s failed", name, exc_info=True)
        log.error("%s: %s", type(error).__name__, error)
        problem = f"{type(error).__name__}: {error}"[:8000]
        child.tell(Fatal(name, problem.encode(errors="replace").decode()))  # it may name a file in other bytes
        child.close()
        sys.exit(1)
    child.close()


def _allow_many_files() -> None:
    """Every connection is an open file, and the usual soft limit of 1,024 is for programs that use select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def child_options(function: Callable[..., None]) -> Callable[..., None]:
    """The command line options of every child process."""
    function = click.option("--run-dir", type=click.Path(path_type=Path), required=True)(function)
    return click.option("--life-fd", type=int, required=True)(function)


def _die_with_launcher(life_fd: int) -> None:
    while os.read(life_fd, 1):  # nothing is ever written: this returns when the launcher is gone
        pass
    os._exit(70)
