"""One child process, and the group of those that live and die together."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path

from common.child import GROUP_SIGNALS, control_identity, signal_name
from common.config import KEYS_VARIABLE
from common.messages import Joined, Ready
from launcher.restarts import Restarts
from launcher.table import GATEWAY, ProcessSpec, UnitSpec

ROOT = Path(__file__).resolve().parents[1]


@dataclass(slots=True)
class Proc:
    """A child process and what it has said."""

    name: str
    popen: subprocess.Popen[bytes]
    ready: Ready | None = None
    joined: Joined | None = None
    fatal: str | None = None
    identity: bytes = b""
    progress: tuple[int, int] = (0, 0)
    refused: int = 0  # frames
    computing: int | None = None  # the steps behind it, while it computes the next one

    @property
    def control_identity(self) -> bytes:
        """With what the identities of its control sockets begin."""
        return control_identity(self.name, self.popen.pid)

    @property
    def alive(self) -> bool:
        return self.popen.poll() is None

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped it, as far as the system tells."""
        try:
            stat = Path(f"/proc/{self.popen.pid}/stat").read_text(errors="replace")
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in ("T", "t")

    @property
    def killed(self) -> bool:
        return (self.popen.poll() or 0) < 0

    @property
    def death(self) -> str | None:
        """In words how it ended, or None while it lives."""
        code = self.popen.poll()
        if code is None:
            return None
        return f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"


class Spawner:
    """Starts children that notice the launcher's death: they hold the reading end of a pipe that it alone can write."""

    def __init__(self, run_dir: str):
        self._run_dir = run_dir
        self._life_read, life_write = os.pipe()
        os.set_inheritable(life_write, False)  # held by this process alone, never closed: it ends with us
        # OpenMP threads that wait by spinning stall for whole time slices when another process takes their core: 20 to
        # 120 ms a step instead of 7 were seen on two busy cores. A policy that the user has set stays.
        self._env = (
            {"OMP_WAIT_POLICY": "PASSIVE"}
            | os.environ
            | {
                "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
                "HF_HUB_OFFLINE": "1",  # a model is a local directory: nothing is ever fetched
                "TOKENIZERS_PARALLELISM": "false",
            }
        )

    def start(self, spec: ProcessSpec, *more: str) -> Proc:
        command = [sys.executable, "-P", "-m", spec.module, "--run-dir", self._run_dir]
        command += ["--life-fd", str(self._life_read), *spec.arguments, *more]
        fds = [self._life_read]
        env = {k: v for k, v in self._env.items() if k != KEYS_VARIABLE or spec.name == GATEWAY}
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)  # inherited: until the child ignores them
        try:
            popen = subprocess.Popen(command, env=env, pass_fds=fds, stdin=subprocess.DEVNULL, cwd=self._run_dir)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return Proc(spec.name, popen)


class State(Enum):
    LOADING = auto()
    LOADED = auto()  # every process has said Ready
    ENDING = auto()  # killed; not all of its processes are gone yet
    PAUSING = auto()  # until it may be started again


@dataclass(slots=True)
class Unit:
    """The processes of a UnitSpec. `due` is the deadline of LOADING and the end of PAUSING (seconds)."""

    spec: UnitSpec
    restarts: Restarts
    state: State = State.LOADING
    due: float = 0.0
    procs: dict[str, Proc] = field(default_factory=dict)

    def kill(self) -> None:
        """End all processes now. Collectives that hang in them are not waited for."""
        for proc in self.procs.values():
            if proc.alive:
                proc.popen.kill()
        self.state = State.ENDING

    def first_failure(self) -> Proc | None:
        """The process to blame, if one has died or given up. One that was killed from outside is the cause; its peers'
        complaints about it are consequences."""
        failed = [p for p in self.procs.values() if p.fatal is not None or not p.alive]
        return min(failed, key=lambda p: (not p.killed, p.fatal is None), default=None)
