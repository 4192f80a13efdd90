"""What a user sees of a cluster: the progress of loading, the panel, and cluster.json."""

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from common.config import ClusterConfig
from common.messages import Go
from common.sockets import Endpoints
from launcher.process import Proc

VERSION = "0.1.0"


def describe(
    config: ClusterConfig,
    endpoints: Endpoints,
    procs: Iterable[Proc],
    go: Go,
    http_port: int | None,
    restarts: dict[str, int],
    start_up_s: float,
) -> dict[str, object]:
    """What cluster.json says. `pids` are those that live now."""
    http = None if http_port is None else _http_address(config.http.host, http_port)
    pids = {"launcher": os.getpid()} | {proc.name: proc.popen.pid for proc in procs if proc.alive}
    return {
        "version": 1,
        "launcher_pid": os.getpid(),
        "pids": pids,
        "restarts": restarts,
        "addresses": {"frontend": endpoints.frontend, "listen": config.listen, "http": http},
        "model": {
            "path": config.model.path,
            **{name: value for name, value in go.labels.items() if name != "version"},
            "tp": config.model.tp,
            "context_len": go.context_len,
            "kv_tokens": go.num_pages * go.page_size,
            "host_kv_tokens": go.host_pages * go.page_size,
            "page_size": go.page_size,
        },
        "start_up_s": round(start_up_s, 3),
    }


def _beside(go: Go) -> str:
    if go.recurrent:
        return f"; states of {go.slots:,} requests, {go.snapshots:,} snapshots"
    return f", {go.host_pages * go.page_size:,} more on the host" if go.host_pages else ""


def _http_address(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def panel(info: dict[str, object], go: Go) -> str:
    model = info["model"]
    pids = info["pids"]
    addresses = info["addresses"]
    assert isinstance(model, dict) and isinstance(pids, dict) and isinstance(addresses, dict)
    rows = [
        ("model", f"{model['path']} ({model['architecture']}, {model['dtype']}, {model['device']}), tp {model['tp']}"),
        ("context", f"{go.context_len:,} tokens"),
        ("KV cache", f"{model['kv_tokens']:,} tokens ({go.num_pages:,} pages of {go.page_size}){_beside(go)}"),
        ("processes", "  ".join(f"{name} {pid}" for name, pid in pids.items())),
        ("address", "  ".join(a for a in addresses.values() if a)),
        ("start-up", f"{info['start_up_s']} s"),
    ]
    lines = [f"Rhizome {VERSION} is ready", *(f"  {key:<10} {value}" for key, value in rows)]
    width = max(map(len, lines))
    return "\n".join(["─" * width, *lines, "─" * width])


@contextlib.contextmanager
def progress_bar() -> Iterator["Show"]:
    """A bar over the bytes of weights loaded by all workers, on a terminal only."""
    from tqdm import tqdm

    with tqdm(desc="loading weights", unit="B", unit_scale=True, leave=False, disable=not sys.stderr.isatty()) as bar:
        yield Show(bar)


@dataclass(slots=True)
class Show:
    bar: object

    def __call__(self, procs: Iterable[Proc]) -> None:
        procs = list(procs)
        self.bar.total = sum(p.progress[1] for p in procs) or None  # type: ignore[attr-defined]
        self.bar.n = sum(p.progress[0] for p in procs)  # type: ignore[attr-defined]
        self.bar.refresh()  # type: ignore[attr-defined]
