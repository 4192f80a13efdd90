"""`batch`: run a file of requests in OpenAI's batch format; run again, it does what is missing."""

import fcntl
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

import click

from client_cli.errors import ClientError
from client_cli.runs import POLL_S, deferred_interrupt
from client_cli.target import Target, target_options

if TYPE_CHECKING:
    from client_cli.batch_file import Line, Outcome


@click.command("batch", context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("source", metavar="INPUT", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("output", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--concurrency", type=click.IntRange(1, 10_000), default=64, help="Requests at once.")
@click.option("--retry-failed", is_flag=True, help="Run the requests again whose line in OUTPUT is an error.")
@target_options
def command(source: Path, output: Path, concurrency: int, retry_failed: bool, target: Target) -> None:
    """Run the requests of INPUT, OpenAI batch JSONL, and append a line for each to OUTPUT, in the order of their ends.

    Requests whose custom_id is in OUTPUT already are skipped: an interrupted batch goes on where it was. Over --url
    bodies are sent as they are; a local cluster takes the fields that `complete --jsonl` knows.
    Exit codes: 0 all done, 1 some failed, 2 no cluster or wrong usage, 130 interrupted.
    """
    from client_cli.batch_file import BatchError, read_earlier, read_lines, without

    try:
        with source.open(encoding="utf-8-sig") as lines:
            wanted = read_lines(lines, source.name)
        with ExitStack() as held:
            file = held.enter_context(_output(output))
            file.seek(0)
            data = file.read()
            earlier = read_earlier(data, output.name)
            again = earlier.failed & {line.custom_id for line in wanted} if retry_failed else frozenset()
            file.truncate(earlier.whole)
            if again:
                _replace(output, without(data[: earlier.whole], again))
                file = held.enter_context(_output(output))
            there = (earlier.done | earlier.failed) - again
            missing = [line for line in wanted if line.custom_id not in there]
            failed = sum(line.custom_id in earlier.failed - again for line in wanted)
            if len(missing) < len(wanted):
                click.echo(f"{len(wanted) - len(missing)} of {len(wanted)} requests are in {output} already", err=True)
            try:
                failed += _run(missing, file, concurrency, target) if missing else 0
            except OSError as error:
                more = "the same command goes on with what is missing"
                raise ClientError(f"{output} cannot be written: {error.strerror}; {more}") from None
    except (BatchError, OSError) as error:
        raise click.UsageError(str(error)) from None
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{source}: not UTF-8: {error}") from None
    if failed:
        raise ClientError(f"{failed} of {len(wanted)} requests failed; see their lines in {output}, or --retry-failed")


@contextmanager
def _output(path: Path) -> Iterator[IO[bytes]]:
    """The output file, held by this process alone. Unbuffered: what a full disk did not take is not tried again."""
    with path.open("a+b", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise click.UsageError(f"another batch writes to {path}") from None
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise click.UsageError(f"{path} is not a file: what an earlier run wrote must be there to be read")
        yield file


def _replace(path: Path, data: bytes) -> None:
    """New content in one step, so that a crash leaves the old or the new file. A link stays one, and the mode as it
    was."""
    path = path.resolve()
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    temporary.touch(mode=0o600)
    temporary.write_bytes(data)
    shutil.copymode(path, temporary)
    temporary.replace(path)


class Runner(Protocol):
    """Runs lines, however."""

    @property
    def live(self) -> int: ...

    def start(self, line: "Line") -> None: ...

    def poll(self, timeout_s: float) -> "list[Outcome]": ...

    def stop(self) -> None: ...

    def close(self) -> None: ...


def _run(lines: "list[Line]", file: IO[bytes], concurrency: int, target: Target) -> int:
    """Run lines and write what comes of them; returns how many failed."""
    runner = _runner(target)
    try:
        with _progress(len(lines)) as show, deferred_interrupt() as check:
            return drive(runner, lines, concurrency, file, show, check)
    except KeyboardInterrupt:
        runner.stop()
        raise KeyboardInterrupt("interrupted; the same command goes on with what is missing") from None
    finally:
        runner.close()


def drive(
    runner: Runner,
    lines: "list[Line]",
    concurrency: int,
    file: IO[bytes],
    show: "Callable[[Outcome], None]",
    check: Callable[[], None],
) -> int:
    """At most `concurrency` lines at once, each written whole when it ends."""
    waiting = iter(lines)
    written = failed = 0
    while written < len(lines):
        check()
        while runner.live < concurrency and (line := next(waiting, None)) is not None:
            runner.start(line)
        for outcome in runner.poll(POLL_S):
            _append(file, outcome.as_line().encode())
            written += 1
            failed += outcome.failed
            show(outcome)
    return failed


def _append(file: IO[bytes], line: bytes) -> None:
    """Raises OSError. An unbuffered write may take a part of what it is given."""
    while line:
        line = line[file.write(line) :]


def _runner(target: Target) -> Runner:
    if target.url is not None:
        from client_cli.batch_http import HttpRunner

        return HttpRunner(target.server(), target.model, target.wait_s)
    from client_cli.batch_local import LocalRunner

    models: set[str] = set()
    served = "model"
    if target.address is None:
        model = target.cluster().get("model", {})
        names = (model.get("served_name"), Path(model.get("path", "")).name, model.get("path"))
        models = {str(name) for name in names if name}
        served = next((str(name) for name in names if name), served)
    return LocalRunner(target.open(), frozenset(models), served)


@contextmanager
def _progress(total: int) -> "Iterator[Callable[[Outcome], None]]":
    """A bar with tokens per second and the time that is left."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]} tok/s"), TextColumn("eta"),
        TimeRemainingColumn(), TextColumn("{task.fields[failed]} failed"),
    )  # fmt: skip
    started = time.monotonic()
    tokens = failed = 0
    with Progress(*columns, console=Console(file=sys.stderr), refresh_per_second=4) as progress:
        task = progress.add_task("batch", total=total, rate="-", failed=0)

        def show(outcome: "Outcome") -> None:
            nonlocal tokens, failed
            tokens += outcome.tokens[1]
            failed += outcome.failed
            rate = f"{tokens / (time.monotonic() - started):,.0f}"
            progress.update(task, advance=1, rate=rate, failed=failed)

        yield show
