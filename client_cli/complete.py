"""`complete`: the answer to one prompt, streamed, or the answers to a file of prompts."""

import io
import json
import sys
from typing import TYPE_CHECKING, Any, TextIO

import click

from client_cli.display import Display, json_line
from client_cli.errors import ClientError
from client_cli.options import LATE, request_options
from client_cli.runs import connected, deferred_interrupt, run_many, run_one
from client_cli.target import Target, target_options

if TYPE_CHECKING:
    from common.answer import Answer
    from common.json_request import JsonRequest
    from common.rows import Row


def _token_list(_context: click.Context, _parameter: click.Parameter, value: str | None) -> list[int] | None:
    if value is None:
        return None
    try:
        return [int(part) for part in value.replace(",", " ").split()]
    except ValueError:
        raise click.BadParameter(f"integers separated by commas expected, got {value!r}") from None


@click.command("complete", context_settings={"help_option_names": ["-h", "--help"], "show_default": True,
               "allow_extra_args": True})  # fmt: skip
@click.argument("prompt", required=False)
@click.option("--chat", is_flag=True, help="Send the prompt as a user message through the chat template.")
@click.option("--system", metavar="TEXT", help="A system message before it (implies --chat).")
@click.option("--token-ids", metavar="IDS", callback=_token_list, help='The prompt as token ids: "1,2,3".')
@click.option("--jsonl", type=click.File(encoding="utf-8-sig"), help="Submit every line of a file: an object with "
              "prompt, token_ids or messages, and the fields that the flags below set.")  # fmt: skip
@click.option("--concurrency", type=click.IntRange(1, 10_000), default=32, help="Requests of --jsonl at once.")
@click.option("--output", type=click.File("w", encoding="utf-8"), help="Where the results of --jsonl go, not stdout.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with text, tokens and timing.")
@click.option("--stats", is_flag=True, help="Print the cluster's counters and gauges.")
@request_options
@target_options
def command(
    prompt: str | None, chat: bool, system: str | None, token_ids: list[int] | None, jsonl: TextIO | None,
    concurrency: int, output: TextIO | None, as_json: bool, stats: bool, options: dict[str, Any], target: Target,
) -> None:  # fmt: skip
    """Generate text with a running Rhizome cluster.

    PROMPT is read from stdin (without its last newline) when it is not given and stdin is not a terminal.
    Exit codes: 0 done, 1 refused or failed, 2 no cluster or wrong usage, 130 interrupted.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character is no reason to fail
    if more := click.get_current_context().args:
        raise click.UsageError(f"Unexpected arguments ({' '.join(more)}); a prompt of several words stands in quotes")
    if prompt is not None and prompt == click.get_current_context().meta.get(LATE):
        raise click.UsageError(f"{prompt!r} is a command; `client.py complete ...` takes it for a prompt")
    if sum((prompt is not None, token_ids is not None, jsonl is not None, stats)) > 1:
        raise click.UsageError("Give one of PROMPT, --token-ids, --jsonl and --stats.")
    if output is not None and jsonl is None:
        raise click.UsageError("--output belongs to --jsonl.")
    if (chat or system is not None) and (token_ids is not None or jsonl is not None or stats):
        raise click.UsageError("--chat and --system need a text prompt.")
    if options["tools"] is not None and jsonl is None and not chat and system is None:
        raise click.UsageError("--tools needs --chat.")
    if options["tools"] is not None:
        target.need_local("--tools", "servers take the calls out of the answer")
    asks = options["logprobs"] is not None or options["prompt_logprobs"] is not None
    if asks and not as_json and jsonl is None:
        raise click.UsageError("--logprobs and --prompt-logprobs are shown by --json and --jsonl.")
    if stats:
        target.need_local("--stats", "`top --once --url ...` shows the server's metrics")
        print_stats(target, as_json)
    elif jsonl is not None:
        requests = read_jsonl(jsonl, options)
        _open_now(output)
        answer_file(target, requests, concurrency, output or sys.stdout)
    else:
        answer_prompt(target, one_request(prompt, token_ids, chat, system, options), as_json)


def _open_now(output: TextIO | None) -> None:
    """click opens a file when it is first written, which is after all the work."""
    try:
        if output is not None:
            output.write("")
    except click.FileError as error:
        raise click.UsageError(f"--output: {error.format_message()}") from None


def one_request(
    prompt: str | None, token_ids: list[int] | None, chat: bool, system: str | None, options: dict[str, Any]
) -> "JsonRequest":
    """The request of the command line, with the prompt from stdin when none is given."""
    from common.fields import FieldError
    from common.json_request import parse_request

    if prompt is None and token_ids is None:
        if sys.stdin.isatty():
            raise click.UsageError("Missing PROMPT.")
        try:
            prompt = sys.stdin.read().removesuffix("\n")
        except UnicodeDecodeError as error:
            raise click.UsageError(f"stdin is not UTF-8: {error}") from None
    values: dict[str, Any] = {"prompt": prompt, "token_ids": token_ids}
    if chat or system is not None:
        system_part = [{"role": "system", "content": system}] if system is not None else []
        values = {"messages": [*system_part, {"role": "user", "content": prompt}]}
    try:
        return parse_request({**values, **options})
    except FieldError as error:
        raise click.UsageError(f"{error.field.replace('_', '-')}: {error.problem}") from None


def read_jsonl(source: TextIO, defaults: dict[str, Any]) -> "list[JsonRequest]":
    """The requests of a JSON-lines file; `defaults` holds when a line says nothing. Errors name line and field."""
    from common.fields import FieldError
    from common.json_request import parse_request

    requests = []
    try:
        lines = source.readlines()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{source.name}: not UTF-8: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise click.UsageError(f"{source.name}, line {number}: not JSON: {error}") from None
        if type(values) is not dict:
            raise click.UsageError(f"{source.name}, line {number}: must be a JSON object")
        try:
            requests.append(parse_request({**defaults, **values}))
        except FieldError as error:
            raise click.UsageError(f"{source.name}, line {number}: {error}") from None
    return requests


def answer_prompt(target: Target, request: "JsonRequest", as_json: bool) -> None:
    """Stream the answer to stdout, print each of several when it is complete, or all as one JSON object."""
    from common.answer import result_of
    from common.messages import Finish

    def show(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    only = Display(sys.stdout)

    def on_row(row: "Row", answer: "Answer") -> None:
        if as_json:
            return
        if request.n == 1:
            only.add(row)
        elif row.finish is not Finish.NONE:
            show(f"--- {row.choice + 1}/{request.n}\n")
            Display(sys.stdout).write("".join(answer.thoughts), "".join(answer.texts) + "\n")

    with connected(target) as link, deferred_interrupt() as check:
        try:
            answers = run_one(link, request, on_row, check)
        except (ClientError, RuntimeError):
            if only.begun:  # the error begins a line of its own
                show("\n")
            raise
        if as_json:
            show(json_line(result_of(answers)))
        elif request.n == 1:
            show("\n")


def answer_file(target: Target, requests: "list[JsonRequest]", concurrency: int, output: TextIO) -> None:
    """Run the requests of a file and write their results as JSON lines; a progress bar goes to stderr."""
    from tqdm import tqdm

    with (
        connected(target) as link,
        tqdm(total=len(requests), unit="req", file=sys.stderr) as bar,
        deferred_interrupt() as check,
    ):

        def write(result: dict[str, Any]) -> None:
            output.write(json_line(result))
            output.flush()
            bar.update()

        failed = run_many(link, requests, concurrency, write, check)
    if failed:
        raise ClientError(f"{failed} of {len(requests)} requests failed")


def print_stats(target: Target, as_json: bool) -> None:
    from common.connection import Connection

    with Connection(target.frontend()) as connection:
        values = connection.stats()
        lines = (
            json.dumps(values)
            if as_json
            else "\n".join(
                f"{name} {values[name]}"
                for name in sorted(values)
                if "/" not in name  # buckets of histograms are for programs
            )
        )
        print(lines, flush=True)
