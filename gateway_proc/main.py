"""The gateway process (started by launch.py): HTTP on one side, the tokenizer's socket on the other."""

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import uvicorn
import uvloop
from starlette.types import ASGIApp

from common.child import Child, child_options, run_child
from common.config import CacheConfig, ConfigError, HttpConfig
from common.messages import Info, Joined
from common.run_dir import CLUSTER_FILE
from common.tracing import to_collector
from gateway_proc.address import find_address
from gateway_proc.app import build
from gateway_proc.auth import Keys
from gateway_proc.backend import Backend
from gateway_proc.errors import ApiError
from gateway_proc.key_file import read_keys
from gateway_proc.metrics import Metrics, Scrape
from gateway_proc.params import Defaults
from gateway_proc.protocol import Protocol
from gateway_proc.requests import BodyReader
from gateway_proc.service import Service

log = logging.getLogger(__name__)

BACKLOG = 2048
DATE_S = 1.0  # how often answers' date changes
KEEP_ALIVE_S = 65  # longer than the clients' own, so that they close first


class Server(uvicorn.Server):
    """uvicorn's, without its handling of signals: the launcher decides. While nobody asks for anything it wakes up once
    a second, for the date, rather than ten times: each wake-up takes a core from the model."""

    def __init__(self, config: uvicorn.Config):
        super().__init__(config)
        self._leaving = asyncio.Event()

    def leave(self) -> None:
        """End `serve`."""
        self.should_exit = True
        self._leaving.set()

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DATE_S):
                    await self._leaving.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def main(child: Child, port: int | None = None) -> None:
    """Listen at once, say ready, serve until told to stop. Until the cluster is there, requests are told so."""
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    http = child.config.http if port is None else replace(child.config.http, port=port)
    key_file = None if http.api_key_file is None else Path(http.api_key_file)
    keys = Keys(read_keys(key_file, os.environ), http.key_concurrency)
    with listen(http, with_keys=keys.required) as listener:
        uvloop.run(_serve(child, keys, listener))


def listen(http: HttpConfig, *, with_keys: bool = False) -> socket.socket:
    """The listening socket. Raises ConfigError in words that name the option."""
    family, kind, protocol, address = find_address(http, with_keys=with_keys)
    with contextlib.ExitStack() as undo:
        try:
            listener = undo.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError as error:
            problem = f"cannot listen on {http.host} port {http.port}: {error.strerror}"
            raise ConfigError(f"{problem}; choose another --port (0 takes a free one) or --no-http") from None
        undo.pop_all()
    listener.setblocking(False)
    return listener


def server_config(app: ASGIApp) -> uvicorn.Config:
    """uvicorn as it is used here."""
    return uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
    )


async def _serve(child: Child, keys: Keys, listener: socket.socket) -> None:
    http, loop = child.config.http, asyncio.get_running_loop()
    backend = Backend(child.endpoints.frontend)
    service = Service(backend, BodyReader(http.max_body_bytes, http.strict_fields), http)
    metrics = Metrics()

    async def scrape() -> Scrape:
        stats = None
        with contextlib.suppress(ApiError):
            stats = await backend.stats()
        info = backend.info
        pids = await loop.run_in_executor(None, _pids, Path(child.config.run_dir))
        cache = (
            {} if info is None else _cache(child.config.cache, info, (stats or {}).get("scheduler.host_total_pages", 0))
        )
        return Scrape(stats, info.names[0] if info else "", pids, cache)

    def on_info(info: Info) -> None:
        child.tell(Joined(child.name, 0, 0))
        if http.generation_config == "auto":
            service.defaults = Defaults.of_model(Path(info.model))
        if service.defaults.given():
            log.warning("requests that say nothing use the model's generation_config: %s", service.defaults.given())

    traces = None
    if http.otlp_endpoint is not None:
        traces = to_collector(http.otlp_endpoint)

    def alive() -> None:
        if go.done():  # until then, another thread speaks with the launcher
            child.pulse()

    server = Server(server_config(build(service, metrics, keys, http, scrape, traces, alive)))

    def stop() -> None:
        loop.remove_reader(child.wake_fd)
        backend.stop()
        server.leave()

    loop.add_reader(child.wake_fd, stop)
    port = listener.getsockname()[1]
    go = loop.run_in_executor(None, lambda: child.ready(http_port=port) is not None)
    connecting = asyncio.create_task(backend.run(go, on_info))
    pulsing = asyncio.create_task(_pulse(child, go, backend))
    try:
        await server.serve([listener])
    finally:
        connecting.cancel()
        pulsing.cancel()
        await asyncio.gather(connecting, pulsing, return_exceptions=True)
        if traces is not None:
            await loop.run_in_executor(None, traces.close)


async def _pulse(child: Child, go: "asyncio.Future[bool]", backend: Backend) -> None:
    """Show the launcher that this loop lives, and hear from it that the cluster drains."""
    await go  # until then, another thread speaks with the launcher
    while True:
        news = child.news()
        if news is not None:
            backend.draining = news.draining
        await asyncio.sleep(child.pulse())


def _cache(config: CacheConfig, info: Info, host_pages: int) -> dict[str, str]:
    """The KV cache's settings under the names of vLLM's cache_config_info, as far as they mean something here."""
    return {
        "block_size": str(info.page_size),
        "cache_dtype": config.kv_dtype,
        "enable_prefix_caching": str(config.prefix_cache),
        "kv_cache_max_concurrency": f"{info.kv_tokens / info.context_len:g}",
        "kv_cache_size_tokens": str(info.kv_tokens),
        "num_cpu_blocks": str(host_pages or None),
        "num_gpu_blocks": str(info.kv_tokens // info.page_size),
    }


def _pids(run_dir: Path) -> dict[str, int]:
    """The processes of the cluster by name."""
    try:
        pids: Any = json.loads((run_dir / CLUSTER_FILE).read_text())["pids"]
        return {str(name): int(pid) for name, pid in pids.items()}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


@click.command()
@child_options
@click.option("--port", type=int, default=None, help="Instead of the configured one: where a gateway before listened.")
def cli(run_dir: Path, life_fd: int, port: int | None) -> None:
    """Run the gateway process (started by launch.py)."""
    run_child("gateway", run_dir, life_fd, lambda child: main(child, port))
    os._exit(0)  # a thread may still wait for the launcher


if __name__ == "__main__":
    cli()
