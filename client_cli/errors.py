"""How the client's commands end."""

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
