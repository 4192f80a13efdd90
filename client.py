"""The thin client: `python client.py "Once upon a time"`, or `python client.py COMMAND ...`.

Commands live in `client_cli`, one module each, and are imported when they are used, so that `--help` answers at once.
"""

import importlib
from typing import Any

import click

from client_cli.errors import exit_codes
from client_cli.options import LATE

DEFAULT = "complete"
COMMANDS = {
    "complete": "Generate text for a prompt or a file of prompts (the default).",
    "chat": "Talk with the model in the terminal.",
    "batch": "Run an OpenAI batch file, resumably.",
    "bench": "Measure latency and throughput under load.",
    "top": "Watch requests, throughput, pages and processes.",
    "status": "Say whether the cluster is healthy.",
    "trace": "Turn a recording of the scheduler into a timeline.",
}


class Commands(click.Group):
    """Subcommands that are imported when they are asked for; a first argument that is none of them is a prompt."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"client_cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0] not in COMMANDS and args not in (["-h"], ["--help"])):
            ctx.meta[LATE] = next((arg for arg in args if arg in COMMANDS), None)
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with exit_codes():
                return super().invoke(ctx)
        except click.UsageError as error:
            late = ctx.meta.get(LATE)
            if late is None:
                raise
            hint = f"a command comes before its options: client.py {late} ..."
            raise click.UsageError(f"{error.format_message()}; {hint}", error.ctx) from None


@click.group(
    cls=Commands, context_settings={"help_option_names": ["-h", "--help"]}, subcommand_metavar="[COMMAND] [ARGS]..."
)
def main(**_: Any) -> None:
    """Use a running Rhizome cluster, or any server that speaks OpenAI's API (--url).

    Without a command the first argument is a prompt: `client.py "Once upon a time"` is short for `client.py complete
    "Once upon a time"`. Every command has its own --help.
    """


if __name__ == "__main__":
    main()
