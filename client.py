"""The thin client: submit prompts to a running cluster and stream the answers.

Everything beyond click is imported inside the commands, so that `--help` answers at once.
"""

import io
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

import click

if TYPE_CHECKING:
    from common.connection import Answer, Connection, Row
    from common.json_request import JsonRequest
    from common.messages import RequestError

POLL_S = 0.1  # how late Ctrl-C may be noticed
ABORT_WAIT_S = 1.0
EXIT_INTERRUPTED = 130  # 128 + SIGINT
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE


class ClientError(click.ClickException):
    """A request was refused or failed."""


class NoClusterError(click.ClickException):
    """There is no cluster to talk to."""

    exit_code = 2


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


def find_address(run_dir: Path | None, address: str | None, wait_s: float) -> str:
    """The address of the frontend, waiting up to `wait_s` for a cluster that is not ready yet."""
    from common.run_dir import RunDirError, find_cluster

    if address is not None:
        return address
    deadline = time.monotonic() + wait_s
    while True:
        try:
            found = find_cluster(run_dir)["addresses"]["frontend"]
            return str(found)
        except RunDirError as error:
            if time.monotonic() >= deadline:
                raise NoClusterError(str(error)) from None
        except (KeyError, TypeError):
            raise NoClusterError("cluster.json is of another version than this client") from None
        time.sleep(0.05)


@contextmanager
def connected(address: str) -> Iterator["Connection"]:
    """A connection whose requests are aborted on the server when the program ends early, for whatever reason."""
    from common.codec import FrameError
    from common.connection import Connection, ConnectionLost, Unreachable
    from common.sockets import PeerStalled

    try:
        with Connection(address) as connection:
            try:
                yield connection
            except (KeyboardInterrupt, BrokenPipeError) as error:
                aborted = connection.live
                abort_and_wait(connection)
                if isinstance(error, BrokenPipeError):
                    quiet_stdout()
                    raise SystemExit(EXIT_BROKEN_PIPE) from None
                click.echo(f"\ninterrupted, requests aborted: {aborted}", err=True)
                raise SystemExit(EXIT_INTERRUPTED) from None
    except Unreachable as error:
        raise NoClusterError(str(error)) from None
    except (ConnectionLost, PeerStalled, FrameError) as error:
        raise ClientError(str(error)) from None


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], None]]:
    """Ctrl-C is raised only where the given function is called, so that it cuts no message in two; a second one is
    raised at once."""
    asked = False

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    def check() -> None:
        if asked:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)


def abort_and_wait(connection: "Connection") -> None:
    """Abort all live requests and give their last rows a moment to come; a second Ctrl-C ends the wait."""
    from common.connection import ConnectionLost

    deadline = time.monotonic() + ABORT_WAIT_S
    try:
        connection.abort_all()
        while connection.live and time.monotonic() < deadline:
            connection.poll(deadline - time.monotonic())
    except (KeyboardInterrupt, ConnectionLost):
        pass


def quiet_stdout() -> None:
    """Point stdout to nowhere, so that the interpreter's last flush does not fail on a closed pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def describe(error: "RequestError") -> str:
    """The server's message with the field and limit it names."""
    text = error.problem
    if error.field and error.field not in text:
        text = f"{error.field}: {text}"
    if error.limit and str(error.limit) not in text:
        text += f" (limit {error.limit})"
    return text


def submit(connection: "Connection", request: "JsonRequest") -> "tuple[int, list[Answer]]":
    """Send a request; returns its id and an empty answer for each of its choices."""
    from common.connection import Answer

    answers = [Answer() for _ in range(request.n)]
    rid = connection.submit(
        request.prompt, request.params, n=request.n, cache_salt=request.cache_salt, priority=request.priority,
        deadline_ms=request.deadline_ms,
    )  # fmt: skip
    return rid, answers


def run_one(
    connection: "Connection", request: "JsonRequest", on_row: "Callable[[Row, Answer], None]", check: Callable[[], None]
) -> "list[Answer]":
    """Submit a request and follow its choices to their ends; raises ClientError when the cluster refuses it.

    `on_row` gets each row and its choice so far.
    """
    from common.connection import Row
    from common.messages import Finish

    _, answers = submit(connection, request)
    while any(answer.finish is Finish.NONE for answer in answers):
        check()
        for row in connection.poll(POLL_S):
            if not isinstance(row, Row):
                raise ClientError(describe(row))
            answer = answers[row.choice]
            answer.add(row)
            on_row(row, answer)
    if any(answer.finish is Finish.ABORT for answer in answers):
        raise ClientError("the cluster aborted the request")
    return answers


def run_many(
    connection: "Connection",
    requests: "list[JsonRequest]",
    concurrency: int,
    on_result: Callable[[dict[str, Any]], None],
    check: Callable[[], None],
) -> int:
    """Run requests, at most `concurrency` at once, hand out results in their order, return how many failed."""
    from common.connection import Row, result_of
    from common.messages import ErrorCode, Finish

    waiting = iter(enumerate(requests))
    live: dict[int, tuple[int, list[Answer]]] = {}
    done: dict[int, dict[str, Any]] = {}
    shown = failed = 0
    while shown < len(requests):
        check()
        while connection.live < concurrency and (following := next(waiting, None)) is not None:
            index, request = following
            rid, answers = submit(connection, request)
            live[rid] = (index, answers)
        for row in connection.poll(POLL_S):
            index, answers = live[row.rid]
            if not isinstance(row, Row):
                code = ErrorCode(row.code).name.lower()
                done[index] = {"index": index, "error": {"code": code, "message": describe(row)}}
                failed += 1
            else:
                answers[row.choice].add(row)
                if any(answer.finish is Finish.NONE for answer in answers):
                    continue
                done[index] = {"index": index, **result_of(answers)}
                failed += any(answer.finish is Finish.ABORT for answer in answers)
            del live[row.rid]
        while shown in done:
            on_result(done.pop(shown))
            shown += 1
    return failed


def _token_list(_context: click.Context, _parameter: click.Parameter, value: str | None) -> list[int] | None:
    if value is None:
        return None
    try:
        return [int(part) for part in value.replace(",", " ").split()]
    except ValueError:
        raise click.BadParameter(f"integers separated by commas expected, got {value!r}") from None


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("prompt", required=False)
@click.option("--chat", is_flag=True, help="Send the prompt as a user message through the chat template.")
@click.option("--system", metavar="TEXT", help="A system message before it (implies --chat).")
@click.option("--token-ids", metavar="IDS", callback=_token_list, help='The prompt as token ids: "1,2,3".')
@click.option("--jsonl", type=click.File(encoding="utf-8"), help="Submit every line of a file: an object with prompt, "
              "token_ids or messages, and the fields that the flags below set.")  # fmt: skip
@click.option("--concurrency", type=click.IntRange(1, 10_000), default=32, help="Requests of --jsonl at once.")
@click.option("--output", type=click.File("w", encoding="utf-8"), help="Where the results of --jsonl go, not stdout.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with text, tokens and timing.")
@click.option("--stats", is_flag=True, help="Print the cluster's counters and gauges.")
@click.option("--max-tokens", type=int, default=256, help="Tokens to generate at most.")
@click.option("--temperature", type=float, default=1.0, help="0 is greedy.")
@click.option("--top-k", type=int, default=0, help="Draw among the k likeliest tokens; 0: among all.")
@click.option("--top-p", type=float, default=1.0, help="Draw among the likeliest tokens of this total probability.")
@click.option("--min-p", type=float, default=0.0, help="Least probability, relative to the likeliest token.")
@click.option("--seed", type=int, help="Equal requests with equal seeds draw equal tokens.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text (repeatable).")
@click.option("--stop-token-id", type=int, multiple=True, help="End at this token (repeatable).")
@click.option("--ignore-eos", is_flag=True, help="Go on after the model's end-of-sequence token.")
@click.option("--n", type=int, default=1, help="Answers to the prompt; their seeds are seed, seed + 1, and so on.")
@click.option("--cache-salt", default="", metavar="TEXT", help="Share cached prefixes only with requests of this salt.")
@click.option("--priority", type=int, default=0, help="Higher goes first.")
@click.option("--deadline-ms", type=int, default=0, help="End with an error what is not finished by then; 0: none.")
@click.option("--keep-special-tokens", is_flag=True, help="Show special tokens in the text.")
@click.option("--run-dir", type=click.Path(path_type=Path), help="The cluster's run directory; else the one that runs.")
@click.option("--address", metavar="URL", help="The cluster's tcp address, such as tcp://127.0.0.1:5555.")
@click.option("--wait", "wait_s", type=click.FloatRange(0), default=0.0, help="Seconds to wait for a ready cluster.")
def main(
    prompt: str | None, chat: bool, system: str | None, token_ids: list[int] | None, jsonl: TextIO | None,
    concurrency: int, output: TextIO | None, as_json: bool, stats: bool, max_tokens: int, temperature: float,
    top_k: int, top_p: float, min_p: float, seed: int | None, stop: tuple[str, ...], stop_token_id: tuple[int, ...],
    ignore_eos: bool, n: int, cache_salt: str, priority: int, deadline_ms: int, keep_special_tokens: bool,
    run_dir: Path | None, address: str | None, wait_s: float,
) -> None:  # fmt: skip
    """Generate text with a running Rhizome cluster.

    PROMPT is read from stdin (without its last newline) when it is not given and stdin is not a terminal.
    Exit codes: 0 done, 1 refused or failed, 2 no cluster or wrong usage, 130 interrupted.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character is no reason to fail
    if run_dir is not None and address is not None:
        raise click.UsageError("--run-dir and --address exclude each other.")
    if sum((prompt is not None, token_ids is not None, jsonl is not None, stats)) > 1:
        raise click.UsageError("Give one of PROMPT, --token-ids, --jsonl and --stats.")
    if output is not None and jsonl is None:
        raise click.UsageError("--output belongs to --jsonl.")
    if (chat or system is not None) and (token_ids is not None or jsonl is not None or stats):
        raise click.UsageError("--chat and --system need a text prompt.")
    options: dict[str, Any] = {
        "max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "seed": seed, "stop": list(stop), "stop_token_ids": list(stop_token_id), "ignore_eos": ignore_eos,
        "skip_special_tokens": not keep_special_tokens, "n": n, "cache_salt": cache_salt, "priority": priority,
        "deadline_ms": deadline_ms,
    }  # fmt: skip
    try:
        if stats:
            print_stats(find_address(run_dir, address, wait_s), as_json)
        elif jsonl is not None:
            requests = read_jsonl(jsonl, options)
            answer_file(find_address(run_dir, address, wait_s), requests, concurrency, output or sys.stdout)
        else:
            request = one_request(prompt, token_ids, chat, system, options)
            answer_prompt(find_address(run_dir, address, wait_s), request, as_json)
    except KeyboardInterrupt:  # before anything was submitted
        raise SystemExit(EXIT_INTERRUPTED) from None


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


def answer_prompt(address: str, request: "JsonRequest", as_json: bool) -> None:
    """Stream the answer to stdout, print each of several when it is complete, or all as one JSON object."""
    from common.connection import result_of
    from common.messages import Finish

    def show(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def on_row(row: "Row", answer: "Answer") -> None:
        if as_json:
            return
        if request.n == 1 and row.text:
            show(row.text)
        elif request.n > 1 and row.finish is not Finish.NONE:
            show(f"--- {row.choice + 1}/{request.n}\n{''.join(answer.texts)}\n")

    with connected(address) as connection, deferred_interrupt() as check:
        answers = run_one(connection, request, on_row, check)
        if as_json:
            show(json.dumps(result_of(answers), ensure_ascii=False) + "\n")
        elif request.n == 1:
            show("\n")


def answer_file(address: str, requests: "list[JsonRequest]", concurrency: int, output: TextIO) -> None:
    """Run the requests of a file and write their results as JSON lines; a progress bar goes to stderr."""
    from tqdm import tqdm

    with (
        connected(address) as connection,
        tqdm(total=len(requests), unit="req", file=sys.stderr) as bar,
        deferred_interrupt() as check,
    ):

        def write(result: dict[str, Any]) -> None:
            output.write(json.dumps(result, ensure_ascii=False) + "\n")
            output.flush()
            bar.update()

        failed = run_many(connection, requests, concurrency, write, check)
    if failed:
        raise ClientError(f"{failed} of {len(requests)} requests failed")


def print_stats(address: str, as_json: bool) -> None:
    with connected(address) as connection:
        values = connection.stats()
        lines = json.dumps(values) if as_json else "\n".join(f"{name} {values[name]}" for name in sorted(values))
        print(lines, flush=True)


if __name__ == "__main__":
    main()
