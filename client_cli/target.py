"""Which server a command talks to: a local cluster over ipc (or --address), or any OpenAI-compatible one over HTTP."""

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from client_cli.errors import NoClusterError

if TYPE_CHECKING:
    from client_cli.http_loop import Server
    from client_cli.link import Link


@dataclass(frozen=True, slots=True)
class Target:
    """Where the user wants to go; `url` None means a cluster of this machine."""

    run_dir: Path | None = None
    address: str | None = None
    url: str | None = None
    api_key_env: str | None = None
    model: str | None = None
    wait_s: float = 0.0

    def __post_init__(self) -> None:
        given = {"--run-dir": self.run_dir, "--address": self.address, "--url": self.url}
        names = [name for name, value in given.items() if value is not None]
        if len(names) > 1:
            raise click.UsageError(f"{' and '.join(names)} exclude each other.")
        if self.address is not None and not _names_a_socket(self.address):
            other = "; HTTP is --url" if self.address.startswith(("http://", "https://")) else ""
            raise click.UsageError(f"--address must be tcp://HOST:PORT or ipc://PATH, got {self.address!r}{other}")
        if self.url is None:
            for name, value in (("--api-key-env", self.api_key_env), ("--model", self.model)):
                if value is not None:
                    raise click.UsageError(f"{name} belongs to --url.")
        elif not self.url.startswith(("http://", "https://")):
            raise click.UsageError(f"--url must begin with http:// or https://, got {self.url!r}")
        elif not _names_a_server(self.url):
            raise click.UsageError(f"--url must name a host, and a port from 1 to 65535 if any, got {self.url!r}")
        if self.api_key_env is not None and not os.environ.get(self.api_key_env):
            raise click.UsageError(f"--api-key-env: the environment variable {self.api_key_env} is not set")

    def cluster(self) -> dict[str, Any]:
        """cluster.json of the local cluster, waiting up to `wait_s` for one that is not ready yet."""
        from common.run_dir import RunDirError, find_cluster

        deadline = time.monotonic() + self.wait_s
        while True:
            try:
                return find_cluster(self.run_dir)
            except RunDirError as error:
                if time.monotonic() >= deadline:
                    raise NoClusterError(str(error)) from None
            time.sleep(0.05)

    def frontend(self) -> str:
        """The address that clients of a local cluster connect to, where somebody answers if `wait_s` says to wait."""
        if self.address is not None:
            _await_answer(self.address, self.wait_s)
            return self.address
        from common.connection import frontend_in
        from common.run_dir import RunDirError

        try:
            return frontend_in(self.cluster())
        except RunDirError as error:
            raise NoClusterError(str(error)) from None

    def server(self) -> "Server":
        """The HTTP server of `url`, with the key from the environment."""
        from client_cli.http_loop import Server

        assert self.url is not None
        key = os.environ[self.api_key_env] if self.api_key_env is not None else None
        return Server(self.url, key)

    def open(self) -> "Link":
        """A connection of either kind; raises Unreachable or NoClusterError. Close it."""
        if self.url is None:
            from client_cli.local_link import LocalLink

            return LocalLink(self.frontend())
        from client_cli.http_link import HttpLink

        return HttpLink(self.server(), self.model, self.wait_s)

    def need_local(self, command: str, why: str) -> None:
        """Refuse --url for a command that cannot work over HTTP."""
        if self.url is not None:
            raise click.UsageError(f"{command} does not work over HTTP: {why}")


def _names_a_server(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0 and not any(c.isspace() for c in url)
    except ValueError:
        return False


def _names_a_socket(address: str) -> bool:
    scheme, _, rest = address.partition("://")
    try:
        return bool(rest) if scheme == "ipc" else scheme == "tcp" and bool(urlsplit(address).port)
    except ValueError:
        return False


def _await_answer(address: str, wait_s: float) -> None:
    """Ask who is at an address until somebody answers, or the time is over: who connects then says what is wrong."""
    from common.connection import Connection, ConnectionLost

    deadline = time.monotonic() + wait_s
    while (left := deadline - time.monotonic()) > 0:
        try:
            with Connection(address) as connection:
                connection.info(left)
            return
        except ConnectionLost:
            time.sleep(min(0.2, left))


def target_options(function: Callable[..., None]) -> Callable[..., None]:
    """The options that say where to go, handed to the command as `target`."""

    @functools.wraps(function)
    def with_target(
        *args: Any, run_dir: Path | None, address: str | None, url: str | None, api_key_env: str | None,
        model: str | None, wait_s: float, **options: Any,
    ) -> None:  # fmt: skip
        function(*args, target=Target(run_dir, address, url, api_key_env, model, wait_s), **options)

    add = [
        click.option("--run-dir", type=click.Path(path_type=Path), help="The cluster's run directory; else the one "
                     "that runs."),
        click.option("--address", metavar="URL", help="The cluster's tcp address, such as tcp://127.0.0.1:5555."),
        click.option("--url", metavar="URL", help="Over HTTP: an OpenAI-compatible server, such as "
                     "http://127.0.0.1:8000."),
        click.option("--api-key-env", metavar="NAME", help="The environment variable with the key for --url."),
        click.option("--model", metavar="NAME", help="The model at --url; else the first one that it lists."),
        click.option("--wait", "wait_s", type=click.FloatRange(0), default=0.0, help="Seconds to wait for a ready "
                     "cluster."),
    ]  # fmt: skip
    wrapped: Callable[..., None] = with_target
    for option in reversed(add):
        wrapped = option(wrapped)
    return wrapped
