"""A test in the place of launch.py: it starts single processes of a cluster and is at the other end of their control
socket."""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import zmq

from common.codec import Message, decode, encode
from common.messages import Drained, Fatal, Go, Joined, Progress, Pulse, Ready, Resync
from common.sockets import Endpoints, open_socket

ROOT = Path(__file__).resolve().parents[1]
SAID = {Ready, Fatal, Progress, Pulse, Joined, Drained, Resync}


class StandInLauncher:
    """`life` is the pipe that tells processes, by closing, that the launcher is gone. All of it ends with `stack`."""

    def __init__(self, run_dir: Path, context: "zmq.Context[zmq.Socket[bytes]]", stack: ExitStack):
        self._run_dir = run_dir
        self._stack = stack
        self.control = stack.enter_context(open_socket(context, zmq.ROUTER, bind=Endpoints(run_dir).control))
        self.control.linger = 0
        self._life_read, life_write = os.pipe()
        stack.callback(os.close, self._life_read)
        self.life = stack.enter_context(os.fdopen(life_write, "wb", buffering=0))
        self.pulses: list[Pulse] = []

    def start(self, module: str, *arguments: str, stderr: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", module, "--run-dir", str(self._run_dir), "--life-fd", str(self._life_read)]
        process = subprocess.Popen([*command, *arguments], cwd=ROOT, pass_fds=[self._life_read], stderr=stderr)
        self._stack.enter_context(process)
        self._stack.callback(process.kill)
        return process

    def tell(self, identity: bytes, go: Go) -> None:
        self.control.send_multipart([identity, encode(go)])

    def next_said(self, patience_ms: int = 60_000) -> tuple[bytes, Message]:
        """Who said what, but for signs of life."""
        while True:
            assert self.control.poll(patience_ms), "the processes are silent"
            identity, frame = self.control.recv_multipart()
            msg: Message = decode(frame, SAID)
            if not isinstance(msg, Pulse):
                return identity, msg
            self.pulses.append(msg)
