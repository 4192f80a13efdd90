"""The cluster behind an LLM: `launch.py` as a child that ends with this process, however that ends."""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path
from typing import IO, Any

from common.child import signal_name
from common.run_dir import RunDirError, find_cluster
from rhizome.errors import ClusterError

LAUNCH = Path(__file__).resolve().parents[1] / "launch.py"  # by its place: a program may be called launch.py as well
STOP_S = 30.0  # launch.py itself takes two seconds at most
WHY_S = 3.0
POLL_S = 0.02
LOG_BYTES = 2**20
SWITCHES = ("prefix_cache", "cuda_graphs")  # options of launch.py that are on unless --no-... says otherwise
_pipes: "weakref.WeakSet[ChildCluster]" = weakref.WeakSet()


class ChildCluster:
    """A cluster of our own in a private run directory, without HTTP unless `port` or `host` ask for it.

    Its launcher watches a pipe of which only this process holds the writing end, and ends when that closes: nothing is
    left behind even after SIGKILL. It has a session of its own, so that Ctrl-C in a terminal reaches the program, which
    may go on using the cluster. Raises ClusterError with the launcher's words when it does not start.
    """

    def __init__(self, model: str | os.PathLike[str], options: dict[str, Any]):
        self.run_dir = Path(tempfile.gettempdir()) / f"rhizome-{secrets.token_hex(8)}"
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the cluster)
        self._log_lock = threading.Lock()
        self._closed = False
        life_out, self._life = os.pipe()
        try:
            self._process = subprocess.Popen(
                _command(model, options, self.run_dir, life_out), stdin=subprocess.DEVNULL, stdout=self._log,
                stderr=subprocess.STDOUT, pass_fds=[life_out], start_new_session=True,
            )  # fmt: skip
        except BaseException:
            os.close(self._life)
            raise
        finally:
            os.close(life_out)
        self._owner = os.getpid()
        _pipes.add(self)
        self._finalizer = weakref.finalize(self, _stop, self._process, self._life, self.run_dir, self._owner)
        try:
            self.info = self._wait()
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        return str(self.info["addresses"]["frontend"])

    @property
    def log(self) -> str:
        """What the cluster printed last, nothing once it is closed."""
        with self._log_lock:
            if self._log.closed:
                return ""
            size = os.fstat(self._log.fileno()).st_size
            return os.pread(self._log.fileno(), LOG_BYTES, max(0, size - LOG_BYTES)).decode(errors="replace")

    def _wait(self) -> dict[str, Any]:
        """cluster.json once the cluster is ready; launch.py itself gives up after --start-timeout."""
        while True:
            try:
                return find_cluster(self.run_dir)
            except RunDirError:
                pass
            if self._process.poll() is not None:
                raise ClusterError(f"the cluster did not start: {_reason(self.log, self._process.returncode)}")
            time.sleep(POLL_S)

    def ends(self) -> bool:
        """Whether it is gone, or about to go: a broken connection is seen before the launcher has cleaned up."""
        try:
            self._process.wait(WHY_S)
        except subprocess.TimeoutExpired:
            return False
        return True

    @property
    def end(self) -> str:
        """Why it is gone, once it `ends`."""
        if self._closed:
            return "this LLM was closed during the call"
        return f"the cluster has ended: {_reason(self.log, self._process.returncode)}"

    def close(self) -> None:
        """End the cluster and wait for it. Closing twice does nothing."""
        self._closed = True
        self._finalizer()
        with self._log_lock:  # calls of other threads ask for what it said
            self._log.close()

    def forget_in_fork(self) -> None:
        """A forked child must not hold the pipe open, and does not own the cluster."""
        self._finalizer.detach()
        os.close(self._life)


def _forked() -> None:
    for cluster in list(_pipes):
        if cluster._finalizer.alive:
            cluster.forget_in_fork()


os.register_at_fork(after_in_child=_forked)


def _command(model: str | os.PathLike[str], options: dict[str, Any], run_dir: Path, life_fd: int) -> list[str]:
    """How launch.py is started. Options are its flags: `tp=2`, `kv_tokens=65536`, `prefix_cache=False`; None leaves one
    out."""
    flags = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if flag in ("--run-dir", "--parent-fd"):
            raise ValueError(f"{name}: is set by LLM itself")
        if value is None or (value is False and name not in SWITCHES):
            continue
        if name in SWITCHES and not isinstance(value, bool):
            raise ValueError(f"{name}: must be True or False, got {value!r}")
        if value is False:
            flag = "--no-" + flag.removeprefix("--")
        flags += [flag] if isinstance(value, bool) else [flag, str(value)]
    own = ["--model", os.fspath(model), "--run-dir", str(run_dir), "--parent-fd", str(life_fd)]
    if all(options.get(name) is None for name in ("port", "host", "no_http")):
        own.append("--no-http")  # nobody but this process asks, and several LLMs would fight for one port
    return [sys.executable, str(LAUNCH), *own, *flags]


def _reason(log: str, code: int) -> str:
    """The launcher's last words if they are an error, else how it ended: `code` is as in Popen.returncode."""
    lines = [line for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix("Error: ") for line in lines if line.startswith("Error: ")]
    if errors:
        return errors[-1]
    if code < 0:
        return f"launch.py was ended by {signal_name(-code)}"
    return "\n".join([f"launch.py ended with exit code {code}", *(lines[-5:] if code else ())])


def _stop(process: "subprocess.Popen[bytes]", life: int, run_dir: Path, owner: int) -> None:
    if os.getpid() != owner:
        return
    os.close(life)
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    shutil.rmtree(run_dir, ignore_errors=True)  # a launcher that was killed could not
