"""A worker's signs of life: a thread beside the computing one tells the launcher how far that one has come.

A step can take minutes and may not be mistaken for a freeze, and a rank that waits for a frozen peer is not frozen
itself. So a pulse has two parts. That it comes at all says that the process runs: a stopped one sends none. Its
`progress` says that the computing thread gets on: it counts steps, collectives, and processor time that is not spent in
collectives or on asking a GPU whether it is done (whoever waits burns time without getting anywhere). The launcher adds
the ranks up: a group is stuck when one is busy and none gets on.
"""

import threading
import time
from types import TracebackType

import zmq

from common.child import Child
from common.codec import encode
from common.messages import Pulse
from worker_proc.parallel import TensorParallel

_WORK_NS = 10**7  # processor time that counts as getting on: far more than waking up once a second costs


class Watch:
    """Use it in a `with` statement, in the computing thread, which sets `busy`, counts `steps`, and sets `device_only`
    while it waits for a GPU."""

    def __init__(self, child: Child, tp: TensorParallel):
        self.busy = False
        self.device_only = False
        self.steps = 0
        self._child = child
        self._tp = tp
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._seen_ns = 0
        self._worked_ns = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="watch")

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end.set()
        self._thread.join(1.0)

    def pulse(self) -> Pulse:
        waiting = self._tp.waiting or self.device_only
        now_ns = time.clock_gettime_ns(self._clock)
        if not waiting:
            self._worked_ns += now_ns - self._seen_ns
        self._seen_ns = now_ns
        progress = self.steps + self._tp.collectives + self._worked_ns // _WORK_NS
        return Pulse(self._child.name, progress, self.busy, self._child.refused.total, self.steps)

    def _run(self) -> None:
        socket = self._child.open_control("watch")
        while not self._end.wait(self._child.until_pulse(time.monotonic())):
            try:
                socket.send(encode(self.pulse()), zmq.NOBLOCK)
            except zmq.Again:
                pass  # the launcher itself is stopped: it will forgive what it did not hear
        socket.close(0)
