"""Start a cluster: `python launch.py --tp 2`. The command line; what follows it is in launcher/."""

import logging
import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

import click

from common.config import (
    CacheConfig,
    ClusterConfig,
    ConfigError,
    HttpConfig,
    ModelConfig,
    SchedulerConfig,
    SupervisionConfig,
)
from common.log import set_up_logging
from common.run_dir import RunDir, RunDirError
from common.sockets import Endpoints
from gateway_proc.options import http_options
from launcher import gguf, hub
from launcher.options import DEMO_MODEL, cache_options, model_options, scheduler_options, supervision_options
from launcher.show import VERSION, panel, progress_bar
from launcher.supervisor import ClusterError, Supervisor
from launcher.usage import Launch

log = logging.getLogger(__name__)


@click.command(cls=Launch, context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@model_options
@cache_options
@scheduler_options
@click.option("--record", type=click.Path(path_type=Path), help="Record the scheduler, prompts too, to this new file.")
@click.option("--run-dir", type=click.Path(path_type=Path), default=None, help="Private directory of the sockets.")
@click.option("--listen", default=None, help="Also serve clients at tcp://127.0.0.1:PORT.")
@http_options
@click.option("--log-level", default="warning", help="debug, info, warning or error.")
@click.option(
    "--parent-fd", type=int, hidden=True, help="A pipe that closes when the process that asked for this ends."
)
@click.option("--start-timeout", type=float, default=300.0, help="Seconds until all processes must be ready.")
@supervision_options
@click.version_option(VERSION)
def main(
    model: ModelConfig,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    supervision: SupervisionConfig,
    http: HttpConfig,
    record: Path | None,
    run_dir: Path | None,
    listen: str | None,
    log_level: str,
    parent_fd: int | None,
    start_timeout: float,
) -> None:
    """Start a Rhizome cluster and serve until Ctrl-C, which lets running requests finish; a second one does not.

    SIGTERM does the same, and so does a closed terminal, except under nohup. Without a terminal (a service), SIGHUP
    restarts the workers without losing a request.
    """
    if parent_fd is not None:
        threading.Thread(target=_end_with_parent, args=(parent_fd,), daemon=True, name="parent").start()
    try:
        path, name = _find_model(model.path)
        if name is not None and not http.served_names:
            http = replace(http, served_names=(name,))
        _check_record(record)
        directory = RunDir(run_dir)
        try:
            config = ClusterConfig(
                run_dir=str(directory.path),
                model=replace(model, path=str(path.resolve())),
                cache=cache,
                scheduler=scheduler,
                supervision=supervision,
                http=http,
                listen=listen,
                log_level=log_level,
                start_timeout_s=start_timeout,
                record=None if record is None else str(record.resolve()),
            )
            Endpoints(directory.path)
            _save(config)
        except (ConfigError, RunDirError, ValueError):
            directory.close()
            raise
    except (ConfigError, RunDirError, ClusterError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    set_up_logging("launcher", log_level)
    sys.exit(_run(Supervisor(config, directory)))


def _save(config: ClusterConfig) -> None:
    try:
        config.save()
    except OSError as error:
        raise RunDirError(f"{config.run_dir} cannot be written to: {error.strerror}") from None


def _run(supervisor: Supervisor) -> int:
    try:
        with progress_bar() as show:
            info = supervisor.start(show)
        if info is not None:
            _print(panel(info, supervisor.go))
            supervisor.serve()
        return 0
    except ClusterError as error:
        click.echo(f"Error: {error}", err=True)
        return 1
    finally:
        supervisor.stop()


def _print(text: str) -> None:
    """A reader that went away, or a full disk, is no reason to end."""
    try:
        click.echo(text)
        sys.stdout.flush()
    except OSError as error:
        log.warning("standard output cannot be written to: %s", error.strerror)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _end_with_parent(parent_fd: int) -> None:
    """End at once when the pipe's other end is closed, by whatever end of the process that held it."""
    while os.read(parent_fd, 1):  # nothing is ever written
        pass
    for number in (signal.SIGTERM, signal.SIGINT):  # the second one says not to wait for running requests
        os.kill(os.getpid(), number)


def _find_model(model: str) -> tuple[Path, str | None]:
    """The checkpoint's directory, and its name where that is not the directory's. Raises ClusterError."""
    try:
        if named := hub.split_id(model):
            found = hub.fetch(named)
            return (found if named.which is None else gguf.directory_for(found)), named.name
        if gguf.is_gguf(model) and Path(model).is_file():
            return gguf.directory_for(Path(model)), Path(model).stem
    except (hub.HubError, gguf.GgufError) as error:
        raise ClusterError(f"--model {model}: {error}") from None
    if not (Path(model) / "config.json").is_file():
        if Path(model) == DEMO_MODEL:
            raise ClusterError("--model is needed: the demo model comes with the repository, not with the package")
        reason = "not a directory with a Hugging Face checkpoint (no config.json), and no GGUF file"
        raise ClusterError(f"--model {model}: {reason}")
    return Path(model), None


def _check_record(record: Path | None) -> None:
    if record is None:
        return
    if record.exists():
        raise ClusterError(f"--record {record}: exists already and is not overwritten")
    if not os.access(record.resolve().parent, os.W_OK | os.X_OK):
        raise ClusterError(f"--record {record}: its directory does not exist or cannot be written")


if __name__ == "__main__":
    main()
