"""How the client's commands end."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

EXIT_FAILED = 1
EXIT_NO_CLUSTER = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE


class ClientError(click.ClickException):
    """A request was refused or failed."""


class NoClusterError(click.ClickException):
    """There is no cluster to talk to."""

    exit_code = EXIT_NO_CLUSTER


@contextmanager
def named_failures() -> Iterator[None]:
    """What a connection raises, as the errors that commands end with."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        from common.codec import FrameError  # here, as commands that end well may need no connection
        from common.connection import ConnectionLost, Unreachable
        from common.sockets import PeerStalled

        if isinstance(error, Unreachable):
            raise NoClusterError(str(error)) from None
        if isinstance(error, ConnectionLost | PeerStalled | FrameError):
            raise ClientError(str(error)) from None
        raise


@contextmanager
def exit_codes() -> Iterator[None]:
    """How every command ends early: a failed connection, Ctrl-C (the text of KeyboardInterrupt is shown), a reader of
    the output that went away, a disk that is full."""
    _open_closed_streams()
    try:
        with named_failures():
            yield
    except KeyboardInterrupt as error:
        click.echo(f"\n{str(error) or 'interrupted'}", err=True)
        raise SystemExit(EXIT_INTERRUPTED) from None
    except BrokenPipeError:
        _quiet_stdout()
        raise SystemExit(EXIT_BROKEN_PIPE) from None
    except OSError as error:
        if error.strerror is None:
            raise
        _quiet_stdout()
        raise ClientError(": ".join(filter(None, (error.filename, error.strerror)))) from None


def _open_closed_streams() -> None:
    """A shell's `<&-` and `>&-` leave None behind."""
    if sys.stdin is None:
        sys.stdin = Path(os.devnull).open()  # noqa: SIM115 (as long as the program)
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115


def _quiet_stdout() -> None:
    """Point stdout to nowhere, so that the interpreter's last flush does not fail on a closed pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
