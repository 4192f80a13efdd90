"""Start a cluster: `python launch.py --tp 2`. This process owns the process tree and nothing else."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import click
import zmq

from common.codec import FrameError, decode, encode
from common.config import (
    ADMISSIONS,
    POLICIES,
    CacheConfig,
    ClusterConfig,
    ConfigError,
    HttpConfig,
    ModelConfig,
    SchedulerConfig,
)
from common.messages import Fatal, Go, Progress, Ready, ints
from common.run_dir import RunDir, RunDirError
from common.sockets import Endpoints, open_socket
from gateway_proc.key_file import KEYS_VARIABLE
from gateway_proc.options import http_options

ROOT = Path(__file__).resolve().parent
VERSION = "0.1.0"
STOP_GRACE_S = 1.5  # from SIGTERM to SIGKILL for a child
BLAME_S = 0.3  # after a first failure, wait this long for its cause to show


class StartError(RuntimeError):
    """The cluster cannot start or go on; the text is for the user."""


@dataclass(slots=True)
class Proc:
    """A child process and what it has said."""

    name: str
    popen: subprocess.Popen[bytes]
    ready: Ready | None = None
    fatal: str | None = None
    identity: bytes = b""
    progress: tuple[int, int] = (0, 0)

    @property
    def death(self) -> str | None:
        """In words how it ended, or None while it lives."""
        code = self.popen.poll()
        if code is None:
            return None
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


@dataclass(slots=True)
class Cluster:
    """The children of one cluster, the life pipe that they watch, and the control socket."""

    config: ClusterConfig
    run_dir: RunDir
    procs: dict[str, Proc] = field(default_factory=dict)
    signals: int = 0
    _started: float = field(default_factory=time.monotonic)
    _context: "zmq.Context[zmq.Socket[bytes]]" = field(default_factory=lambda: zmq.Context(io_threads=1))
    _control: "zmq.Socket[bytes]" = field(init=False)
    _wake: socket.socket = field(init=False)
    _poller: zmq.Poller = field(default_factory=zmq.Poller)

    def __post_init__(self) -> None:
        self._control = open_socket(self._context, zmq.ROUTER, bind=Endpoints(self.run_dir.path).control)
        self._wake, wake_in = socket.socketpair()
        self._wake.setblocking(False)
        wake_in.setblocking(False)
        signal.set_wakeup_fd(wake_in.detach())  # any signal, SIGCHLD too, wakes the poll below
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._poller.register(self._control, zmq.POLLIN)
        self._poller.register(self._wake, zmq.POLLIN)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signals += 1

    # ---- starting -------------------------------------------------------------------------------------------------

    def spawn(self) -> None:
        """Start every child. All load at the same time."""
        life_read, self_life = os.pipe()
        os.set_inheritable(self_life, False)  # held by this process alone, never closed: it ends with us
        # OpenMP threads that wait by spinning stall for whole time slices when another process takes their core: 20 to
        # 120 ms a step instead of 7 were seen on two busy cores. A policy that the user has set stays.
        env = (
            {"OMP_WAIT_POLICY": "PASSIVE"}
            | os.environ
            | {
                "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
                "HF_HUB_OFFLINE": "1",  # a model is a local directory: nothing is ever fetched
                "TOKENIZERS_PARALLELISM": "false",
            }
        )
        for name, module, arguments in _process_table(self.config):
            command = [
                sys.executable,
                "-P",
                "-m",
                module,
                "--run-dir",
                self.config.run_dir,
                "--life-fd",
                str(life_read),
            ]
            own = env if name == "gateway" else {key: value for key, value in env.items() if key != KEYS_VARIABLE}
            popen = subprocess.Popen(
                [*command, *arguments], env=own, pass_fds=[life_read], stdin=subprocess.DEVNULL, cwd=self.config.run_dir
            )
            self.procs[name] = Proc(name, popen)
        os.close(life_read)

    def wait_ready(self) -> Go | None:
        """Until every child is ready and told to go; None when a signal came first. Raises StartError."""
        deadline = time.monotonic() + self.config.start_timeout_s
        with _progress_bar() as show:
            while any(p.ready is None for p in self.procs.values()):
                self._poll(0.1)
                if self.signals:
                    return None
                self._check_failures("while starting")
                show(self.procs)
                if time.monotonic() > deadline:
                    late = ", ".join(p.name for p in self.procs.values() if p.ready is None)
                    raise StartError(f"not ready after {self.config.start_timeout_s:g} s (--start-timeout): {late}")
        go = _limits([p.ready for name, p in self.procs.items() if name.startswith("worker-") and p.ready])
        for proc in self.procs.values():
            self._control.send_multipart([proc.identity, encode(go)])
        return go

    # ---- running --------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Until a signal comes. Raises StartError with the reason when a child ends."""
        while not self.signals:
            self._poll(None)
            if not self.signals:
                self._check_failures("and took the cluster down")

    def _poll(self, timeout_s: float | None) -> None:
        self._poller.poll(None if timeout_s is None else int(timeout_s * 1000))
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(4096)
        while True:
            try:
                parts = self._control.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(parts)

    def _take(self, parts: list[bytes]) -> None:
        try:
            msg = decode(parts[-1], {Ready, Fatal, Progress})
        except FrameError:
            return  # not one of ours
        proc = self.procs.get(msg.name)
        if proc is None:
            return
        match msg:
            case Ready():
                proc.ready, proc.identity = msg, parts[0]
            case Fatal(problem=problem):
                proc.fatal = proc.fatal or problem
            case Progress(done=done, total=total):
                proc.progress = (done, total)

    def _check_failures(self, when: str) -> None:
        if not self._failed():
            return
        end = time.monotonic() + BLAME_S
        while time.monotonic() < end and not any(_killed(p) for p in self.procs.values()):
            self._poll(0.05)
        failed = self._failed()
        # a process killed from outside is the cause; its peers' complaints about it are consequences
        first = next((p for p in failed if _killed(p)), failed[0])
        raise StartError(f"{first.name} {first.death or 'failed'} {when}" + (f": {first.fatal}" if first.fatal else ""))

    def _failed(self) -> list[Proc]:
        failed = [p for p in self.procs.values() if p.fatal is not None or p.death is not None]
        return sorted(failed, key=lambda p: p.fatal is None)

    # ---- stopping -------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End every child, at most STOP_GRACE_S politely, and remove what the cluster made."""
        for proc in self.procs.values():
            if proc.popen.poll() is None:
                proc.popen.terminate()
        deadline = time.monotonic() + STOP_GRACE_S
        while time.monotonic() < deadline and any(p.popen.poll() is None for p in self.procs.values()):
            self._poll(0.02)
        for proc in self.procs.values():
            if proc.popen.poll() is None:
                proc.popen.kill()
            proc.popen.wait()
        self._control.close(0)
        self._context.destroy(linger=0)
        self.run_dir.close()

    def _http_address(self) -> str | None:
        gateway = self.procs.get("gateway")
        if gateway is None or gateway.ready is None:
            return None
        host = self.config.http.host
        return f"http://{f'[{host}]' if ':' in host else host}:{gateway.ready.info['http_port']}"

    def describe(self, go: Go) -> dict[str, object]:
        """What cluster.json says."""
        pids = {"launcher": os.getpid()} | {name: proc.popen.pid for name, proc in self.procs.items()}
        return {
            "version": 1,
            "launcher_pid": os.getpid(),
            "pids": pids,
            "addresses": {
                "frontend": Endpoints(self.run_dir.path).frontend,
                "listen": self.config.listen,
                "http": self._http_address(),
            },
            "model": {
                "path": self.config.model.path,
                **next(p.ready.labels for p in self.procs.values() if p.ready and p.ready.labels),
                "tp": self.config.model.tp,
                "context_len": go.context_len,
                "kv_tokens": go.num_pages * go.page_size,
                "page_size": go.page_size,
            },
            "start_up_s": round(time.monotonic() - self._started, 3),
        }


def _process_table(config: ClusterConfig) -> list[tuple[str, str, list[str]]]:
    """(name, module, arguments) of every child, the slowest to load first."""
    workers = [(f"worker-{r}", "worker_proc.main", ["--rank", str(r)]) for r in range(config.model.tp)]
    return [
        *workers,
        *([("gateway", "gateway_proc.main", [])] if config.http.enabled else []),
        ("tokenizer", "tokenizer_proc.tokenizer", []),
        ("detokenizer", "tokenizer_proc.detokenizer", []),
        ("scheduler", "scheduler_proc.event_loop", []),
    ]


def _limits(workers: list[Ready]) -> Go:
    """The limits that hold for all ranks; end-of-sequence ids come as eos_0, eos_1, ..."""
    info = workers[0].info
    eos = sorted(value for key, value in info.items() if key.startswith("eos_"))
    return Go(
        num_pages=min(w.info["num_pages"] for w in workers),
        page_size=info["page_size"],
        context_len=info["context_len"],
        vocab_size=info["vocab_size"],
        eos_token_ids=ints(*eos),
        labels=workers[0].labels | {"version": VERSION},
    )


def _killed(proc: Proc) -> bool:
    return (proc.popen.poll() or 0) < 0


@contextlib.contextmanager
def _progress_bar() -> Iterator["_Show"]:
    """A bar over the bytes of weights loaded by all workers, on a terminal only."""
    from tqdm import tqdm

    with tqdm(desc="loading weights", unit="B", unit_scale=True, leave=False, disable=not sys.stderr.isatty()) as bar:
        yield _Show(bar)


@dataclass(slots=True)
class _Show:
    bar: object

    def __call__(self, procs: dict[str, Proc]) -> None:
        self.bar.total = sum(p.progress[1] for p in procs.values()) or None  # type: ignore[attr-defined]
        self.bar.n = sum(p.progress[0] for p in procs.values())  # type: ignore[attr-defined]
        self.bar.refresh()  # type: ignore[attr-defined]


def _panel(info: dict[str, object], go: Go) -> str:
    model = info["model"]
    pids = info["pids"]
    addresses = info["addresses"]
    assert isinstance(model, dict) and isinstance(pids, dict) and isinstance(addresses, dict)
    rows = [
        ("model", f"{model['path']} ({model['architecture']}, {model['dtype']}, {model['device']}), tp {model['tp']}"),
        ("context", f"{go.context_len:,} tokens"),
        ("KV cache", f"{model['kv_tokens']:,} tokens ({go.num_pages:,} pages of {go.page_size})"),
        ("processes", "  ".join(f"{name} {pid}" for name, pid in pids.items())),
        ("address", "  ".join(a for a in addresses.values() if a)),
        ("start-up", f"{info['start_up_s']} s"),
    ]
    lines = [f"Rhizome {VERSION} is ready", *(f"  {key:<10} {value}" for key, value in rows)]
    width = max(map(len, lines))
    return "\n".join(["─" * width, *lines, "─" * width])


UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


class Size(click.ParamType[int]):
    """Bytes, such as 512MiB, 2G or 1000000."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        text = str(value).strip().lower().removesuffix("b").removesuffix("i")
        number, unit = (text[:-1], text[-1]) if text and text[-1].isalpha() else (text, "")
        try:
            return int(float(number) * UNITS[unit])
        except (ValueError, KeyError, OverflowError):
            self.fail(f"{value!r} is not a size such as 512MiB or 2G", param, ctx)


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option(
    "--model",
    default=str(ROOT / "demo_model"),
    show_default="the demo model",
    help="Directory of a Hugging Face checkpoint.",
)
@click.option("--dtype", default="auto", help="auto, float32, bfloat16 or float16.")
@click.option("--device", default="auto", help="auto, cpu or cuda.")
@click.option("--tp", type=int, default=1, help="Tensor parallel worker ranks.")
@click.option("--threads", type=int, default=None, help="CPU threads per rank.  [default: cores / tp]")
@click.option("--cpu-kernels", default="auto", help="auto, amx, avx512, generic or torch (no native code).")
@click.option("--context-len", type=int, default=None, help="Tokens of prompt and answer.  [default: the model's]")
@click.option("--page-size", type=int, default=16, help="Tokens per page of the KV cache.")
@click.option("--kv-tokens", type=int, default=None, help="Size of the KV cache in tokens.")
@click.option("--kv-memory", type=Size(), default=None, help="Size of the KV cache per rank, e.g. 2GiB.")
@click.option("--prefix-cache/--no-prefix-cache", default=True, help="Share the KV of common prefixes.")
@click.option("--max-running", type=int, default=256, help="Requests that run at once.")
@click.option("--max-waiting", type=int, default=10_000, help="Requests that may wait.")
@click.option("--max-batch-tokens", type=int, default=2048, help="Tokens per step.")
@click.option("--chunk-tokens", type=int, default=256, help="Prefill tokens per step beside running decodes.")
@click.option("--itl-target-ms", type=float, default=0.0, help="Size chunks for this inter-token latency; 0 is off.")
@click.option("--policy", type=click.Choice(POLICIES), default="fcfs", help="Order of waiting requests.")
@click.option("--admission", type=click.Choice(ADMISSIONS), default="ratio", help="Room kept for tokens to come.")
@click.option("--ageing", type=float, default=10.0, help="Seconds for which a policy may favour others.")
@click.option("--steps-in-flight", type=int, default=2, help="Steps planned ahead of their results: 1 or 2.")
@click.option("--record", type=click.Path(path_type=Path), help="Record the scheduler, prompts too, to this new file.")
@click.option("--run-dir", type=click.Path(path_type=Path), default=None, help="Private directory of the sockets.")
@click.option("--listen", default=None, help="Also serve clients at tcp://127.0.0.1:PORT.")
@http_options
@click.option("--log-level", default="warning", help="debug, info, warning or error.")
@click.option(
    "--parent-fd", type=int, hidden=True, help="A pipe that closes when the process that asked for this ends."
)
@click.option("--start-timeout", type=float, default=300.0, help="Seconds until all processes must be ready.")
@click.version_option(VERSION)
def main(
    model: str, dtype: str, device: str, tp: int, threads: int | None, cpu_kernels: str, context_len: int | None,
    page_size: int, kv_tokens: int | None, kv_memory: int | None, prefix_cache: bool, max_running: int,
    max_waiting: int, max_batch_tokens: int, chunk_tokens: int, itl_target_ms: float, policy: str, admission: str,
    ageing: float, steps_in_flight: int, record: Path | None, run_dir: Path | None, listen: str | None,
    log_level: str, parent_fd: int | None, start_timeout: float, http: HttpConfig,
) -> None:  # fmt: skip
    """Start a Rhizome cluster and serve until Ctrl-C."""
    if parent_fd is not None:
        threading.Thread(target=_end_with_parent, args=(parent_fd,), daemon=True, name="parent").start()
    try:
        _check_model(model)
        _check_record(record)
        directory = RunDir(run_dir)
        try:
            config = ClusterConfig(
                run_dir=str(directory.path),
                model=ModelConfig(str(Path(model).resolve()), dtype, device, context_len, tp, threads, cpu_kernels),
                cache=CacheConfig(page_size, kv_tokens, kv_memory, prefix_cache),
                scheduler=SchedulerConfig(
                    max_running=max_running,
                    max_batch_tokens=max_batch_tokens,
                    chunk_tokens=chunk_tokens,
                    max_waiting=max_waiting,
                    steps_in_flight=steps_in_flight,
                    policy=policy,
                    admission=admission,
                    ageing_s=ageing,
                    itl_target_ms=itl_target_ms,
                ),
                http=http,
                listen=listen,
                log_level=log_level,
                start_timeout_s=start_timeout,
                record=None if record is None else str(record.resolve()),
            )
            Endpoints(directory.path)
        except (ConfigError, ValueError):
            directory.close()
            raise
    except (ConfigError, RunDirError, StartError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    config.save()
    sys.exit(_run(Cluster(config, directory)))


def _run(cluster: Cluster) -> int:
    try:
        cluster.spawn()
        go = cluster.wait_ready()
        if go is not None:
            info = cluster.describe(go)
            cluster.run_dir.write_cluster(info)
            click.echo(_panel(info, go))
            sys.stdout.flush()
            cluster.serve()
        return 0
    except StartError as error:
        click.echo(f"Error: {error}", err=True)
        return 1
    finally:
        cluster.stop()


def _end_with_parent(parent_fd: int) -> None:
    """End like after a SIGTERM once the pipe's other end is closed, by whatever end of the process that held it."""
    while os.read(parent_fd, 1):  # nothing is ever written
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _check_model(model: str) -> None:
    if not (Path(model) / "config.json").is_file():
        raise StartError(f"--model {model}: not a directory with a Hugging Face checkpoint (no config.json)")


def _check_record(record: Path | None) -> None:
    if record is None:
        return
    if record.exists():
        raise StartError(f"--record {record}: exists already and is not overwritten")
    if not os.access(record.resolve().parent, os.W_OK | os.X_OK):
        raise StartError(f"--record {record}: its directory does not exist or cannot be written")


if __name__ == "__main__":
    main()
