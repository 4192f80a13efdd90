"""What the comparison asks of a system: start it, run a case on it, let it rest, end it."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Case:
    """Greedy requests of exact lengths in a closed loop."""

    name: str
    requests: int
    prefix: int  # tokens that all prompts begin with
    input: int  # tokens of a prompt after them
    output: int
    concurrency: int

    @property
    def rate(self) -> str:
        """The rate that is compared: output tokens, or all tokens where prompts are most of the work."""
        return "output_tokens_per_s" if self.output >= self.prefix + self.input else "total_tokens_per_s"


class BenchError(RuntimeError):
    """A system did not start, or did not do what a case asks for."""


class System(Protocol):
    name: str
    start_s: float

    def start(self) -> None: ...
    def run(self, case: Case) -> dict[str, float]: ...
    def rest(self) -> None:
        """Use no CPU until `wake`."""
        ...

    def wake(self) -> None: ...
    def stop(self) -> None: ...
    def memory(self) -> int:
        """Bytes resident in all of its processes, shared pages counted once (PSS)."""
        ...


class _Process:
    """A process group, the sum of its memory, and its rest."""

    def __init__(self, command: Sequence[str], env: dict[str, str], log: Path, **pipes: Any):
        with log.open("wb") as output:
            pipes.setdefault("stdout", output)
            self.popen = subprocess.Popen(command, env=os.environ | env, stderr=output, start_new_session=True, **pipes)
        self.log = log

    def signal(self, number: int) -> None:
        if self.popen.poll() is None:
            os.killpg(self.popen.pid, number)

    def stop(self, patience_s: float = 30.0) -> None:
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        try:
            self.popen.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self.popen.wait()

    def memory(self) -> int:
        root = psutil.Process(self.popen.pid)
        return sum(p.memory_full_info().pss for p in [root, *root.children(recursive=True)])


class _Hosted:
    """What every system does with its process, which `start` makes."""

    def __init__(self, name: str):
        self.name = name
        self.start_s = 0.0
        self._directory = tempfile.TemporaryDirectory(prefix="rhz-compare-", ignore_cleanup_errors=True)  # goes with it
        self._home = Path(self._directory.name)
        self._process: _Process | None = None

    @property
    def _running(self) -> _Process:
        assert self._process is not None
        return self._process

    def rest(self) -> None:
        self._running.signal(signal.SIGSTOP)

    def wake(self) -> None:
        self._running.signal(signal.SIGCONT)

    def memory(self) -> int:
        return self._running.memory()

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()


class HttpSystem(_Hosted):
    """A server with OpenAI's API, measured by `client.py bench`. It is ready when `ready` is answered by 200."""

    def __init__(
        self, name: str, command: Sequence[str], port: int, vocabulary: int, env: dict[str, str] | None = None,
        ready: str = "/v1/models",
    ):  # fmt: skip
        super().__init__(name)
        self._ready = ready
        self._command = list(command)
        self._env = env or {}
        self._url = f"http://127.0.0.1:{port}"
        self._vocabulary = vocabulary

    def start(self, deadline_s: float = 400.0) -> None:
        started = time.monotonic()
        self._process = _Process(self._command, self._env, self._home / "log")
        while not self._answers():
            if self._process.popen.poll() is not None or time.monotonic() > started + deadline_s:
                raise BenchError(f"{self.name} does not start:\n{self._process.log.read_text()[-3000:]}")
            time.sleep(0.1)
        self.start_s = time.monotonic() - started

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}{self._ready}", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def run(self, case: Case) -> dict[str, float]:
        file = self._home / "result.json"
        shared = ["--dataset", "shared-prefix", "--prefixes", "1", "--prefix-len", str(case.prefix)]
        command = [
            sys.executable, str(ROOT / "client.py"), "bench", "--url", self._url, "--requests", str(case.requests),
            "--input-len", str(case.input), "--output-len", str(case.output), "--concurrency", str(case.concurrency),
            "--prompts", "ids", "--vocab-size", str(self._vocabulary), "--warm-up", "0", "--json", str(file),
            *(shared if case.prefix else []),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
        if done.returncode:
            raise BenchError(f"{self.name}, {case.name}: {done.stderr[-2000:] or done.stdout[-2000:]}")
        summary = json.loads(file.read_text())["summary"]
        if summary["completed"] != case.requests or summary["short_answers"]:
            raise BenchError(f"{self.name}, {case.name}: not every request got its {case.output} tokens: {summary}")
        return {
            "output_tokens_per_s": summary["output_tokens_per_s"],
            "total_tokens_per_s": summary["total_tokens_per_s"],
            "ttft_ms": summary["ttft_ms"]["p50"],
            "itl_p99_ms": summary["itl_ms"]["p99"],
            "itl_max_ms": summary["itl_ms"]["max"],
        }


class Rhizome(HttpSystem):
    """This project. Its supervisor would take a rest for a freeze, so it is ended and started again instead."""

    def rest(self) -> None:
        self.stop()

    def wake(self) -> None:
        self.start()


class InProcess(_Hosted):
    """A library in a process of its own, without any server or client; `driver` is its script in this folder, which
    reads cases as JSON lines and answers each with a line."""

    def __init__(self, name: str, python: Path, driver: str, *arguments: str):
        super().__init__(f"{name} (in process)")
        self._command = [str(python), str(ROOT / "bench" / "peers" / driver), *arguments]
        self._log = self._home / "log"

    def start(self) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        started = time.monotonic()
        self._process = _Process(self._command, {}, self._log, **pipes)
        self._answer()
        self.start_s = time.monotonic() - started

    def _answer(self) -> dict[str, float]:
        popen = self._running.popen
        assert popen.stdout is not None
        line = popen.stdout.readline()
        if not line:
            raise BenchError(f"{self.name} ended:\n{self._log.read_text()[-3000:]}")
        answer: dict[str, float] = json.loads(line)
        return answer

    def run(self, case: Case) -> dict[str, float]:
        popen = self._running.popen
        assert popen.stdin is not None
        popen.stdin.write(json.dumps(asdict(case)).encode() + b"\n")
        popen.stdin.flush()
        answer = self._answer()
        if answer["output_tokens"] != case.requests * case.output:
            raise BenchError(f"{self.name}, {case.name}: not every request got its {case.output} tokens")
        return answer


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
