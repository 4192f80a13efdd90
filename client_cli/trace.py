"""`trace`: a recording of the scheduler as a timeline, through the tools of docs/tracing.md."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import click

from client_cli.errors import ClientError
from client_cli.options import check_output


@click.command("trace", context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("recording", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("output", type=click.Path(path_type=Path, dir_okay=False), required=False)
@click.option("--from", "first", type=click.IntRange(0), help="First step.")
@click.option("--to", "last", type=click.IntRange(0), help="Last step.")
@click.option("--steps", is_flag=True, help="Print a line per event too.")
@click.option("--tree", is_flag=True, help="Print the radix tree at the end, or at --to.")
def command(recording: Path, output: Path | None, first: int | None, last: int | None, steps: bool, tree: bool) -> None:
    """Turn RECORDING, made by `launch.py --record FILE`, into a timeline, and check that it replays exactly.

    OUTPUT .json is a trace for https://ui.perfetto.dev (the default: RECORDING.json), .png, .svg or .pdf a picture
    (matplotlib). Needs no cluster. Exit codes: 0 done, 1 the recording cannot be read or replays differently, 2 wrong
    usage.
    """
    output = recording.with_name(recording.name + ".json") if output is None else output
    partial = output.with_name(f".{output.stem}.part{output.suffix}")
    window = [
        *(["--from", str(first)] if first is not None else []),
        *(["--to", str(last)] if last is not None else []),
    ]
    match output.suffix:
        case ".json":
            check_output(output, "OUTPUT")
            flags = ["--chrome", str(partial), *(["--step"] if steps else []), *(["--tree"] if tree else [])]
            _tool("scheduler_proc.replay", [str(recording), *flags, *window], partial, output)
            click.echo(f"drop {output} on https://ui.perfetto.dev")
        case ".png" | ".svg" | ".pdf":
            if steps or tree:
                raise click.UsageError("--steps and --tree belong to a .json OUTPUT.")
            if importlib.util.find_spec("bench") is None or importlib.util.find_spec("matplotlib") is None:
                raise click.UsageError("pictures need matplotlib and the repository's bench folder; write .json")
            check_output(output, "OUTPUT")
            _tool("bench.timeline", [str(recording), "--out", str(partial), *window], partial, output)
        case other:
            raise click.UsageError(f"OUTPUT must end in .json, .png, .svg or .pdf, got {other!r}")


def _tool(module: str, arguments: list[str], partial: Path, output: Path) -> None:
    """Run a tool as a process of its own: the client imports no part of the cluster. `output` is replaced when all of
    it is there."""
    root = Path(__file__).resolve().parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))}
    command = [sys.executable, "-P", "-m", module, *arguments]
    try:
        # Ctrl-C and a closed pipe are for this process, which ends the tool: it would speak of them as well.
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, process_group=0) as tool:
            assert tool.stdout is not None
            try:
                for line in tool.stdout:
                    click.echo(line.replace(str(partial), str(output)), nl=False)
            except BaseException:
                tool.kill()
                raise
        if tool.returncode:
            raise ClientError(f"{module} failed")
        partial.replace(output)
    finally:
        partial.unlink(missing_ok=True)
