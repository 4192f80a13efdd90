"""Flags that several commands share: what a request may ask for, with the names of the fields on the wire."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import click


def _logit_bias(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, float]:
    try:
        return {str(int(token)): float(bias) for token, _, bias in (value.partition(":") for value in values)}
    except ValueError:
        raise click.BadParameter("TOKEN_ID:VALUE expected, such as 42:-100") from None


LATE = "client.late"  # of click's meta: a command behind an option, where it is taken for a prompt


def check_output(path: Path, name: str) -> None:
    """Refuse a file that cannot be written before any work is done for it."""
    try:
        existed = path.exists()
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except (OSError, ValueError) as error:
        raise click.UsageError(f"{name}: {path} cannot be written: {getattr(error, 'strerror', error)}") from None


SAMPLING = [
    click.option("--max-tokens", type=int, default=256, help="Tokens to generate at most."),
    click.option("--temperature", type=float, default=1.0, help="0 is greedy."),
    click.option("--top-k", type=int, default=0, help="Draw among the k likeliest tokens; 0: among all."),
    click.option("--top-p", type=float, default=1.0, help="Draw among the likeliest tokens of this total probability."),
    click.option("--min-p", type=float, default=0.0, help="Least probability, relative to the likeliest token."),
    click.option("--seed", type=int, help="Equal requests with equal seeds draw equal tokens."),
    click.option("--stop", multiple=True, metavar="TEXT", help="End before this text (repeatable)."),
    click.option("--stop-token-id", "stop_token_ids", type=int, multiple=True, help="End at this token (repeatable)."),
    click.option(
        "--include-stop",
        "include_stop_str_in_output",
        is_flag=True,
        help="Show the text or token that ended the answer.",
    ),
    click.option("--ignore-eos", is_flag=True, help="Go on after the model's end-of-sequence token."),
    click.option("--min-tokens", type=int, default=0, help="No end before so many tokens."),
    click.option(
        "--repetition-penalty",
        type=float,
        default=1.0,
        help="More than 1 makes tokens of prompt and answer less likely.",
    ),
    click.option(
        "--presence-penalty", type=float, default=0.0, help="Subtracted from the logits of the answer's tokens."
    ),
    click.option("--frequency-penalty", type=float, default=0.0, help="The same for each time that they occur."),
    click.option(
        "--logit-bias",
        multiple=True,
        metavar="ID:VALUE",
        callback=_logit_bias,
        help="Added to a token's logit, from -100 to 100 (repeatable).",
    ),
    click.option("--bad-word", "bad_words", multiple=True, metavar="TEXT", help="Does not come (repeatable)."),
    click.option(
        "--allowed-token-id", "allowed_token_ids", type=int, multiple=True, help="Draw only such tokens (repeatable)."
    ),
    click.option("--keep-special-tokens", is_flag=True, help="Show special tokens in the text."),
]
GRAMMAR = [
    click.option("--json-object", is_flag=True, help="The answer is a JSON object."),
    click.option("--json-schema", type=click.File(encoding="utf-8-sig"), help="The answer is JSON of the schema in "
                 "this file."),
    click.option("--regex", metavar="TEXT", help="The whole answer matches a regular expression (Rust's syntax)."),
    click.option("--choice", "choices", multiple=True, metavar="TEXT", help="The answer is one of these (repeatable)."),
    click.option("--lark", type=click.File(encoding="utf-8-sig"), help="The answer is in the grammar of this file "
                 "(llguidance's Lark)."),
    click.option("--ebnf", type=click.File(encoding="utf-8-sig"), help="The answer is in the grammar of this file "
                 "(EBNF with a rule root, as llama.cpp has it)."),
]  # fmt: skip
REQUEST = [
    click.option("--logprobs", type=int, metavar="K", help="With --json: log probabilities of the answer's tokens and "
                 "of the K likeliest."),
    click.option("--prompt-logprobs", type=int, metavar="K", help="The same of the prompt's tokens."),
    click.option("--prompt-logprobs-start", type=int, default=0, metavar="N",
                 help="Those of the prompt's tokens from the Nth on, counted from 0; not over HTTP."),
    click.option("--beam-search", "use_beam_search", is_flag=True, help="Find the likeliest answers with --n beams."),
    click.option("--length-penalty", type=float, default=1.0, help="Of beam search: the power of the length that "
                 "scores are divided by."),
    click.option("--early-stopping", is_flag=True, help="Of beam search: end as soon as --n answers have ended."),
    click.option("--truncate-prompt-tokens", type=int, metavar="N", help="Keep the last N tokens of the prompt; -1: as "
                 "many as fit."),
    click.option("--n", type=int, default=1, help="Answers to the prompt; their seeds are seed, seed + 1, and so on."),
]  # fmt: skip
TOOLS = [
    click.option("--tools", type=click.File(encoding="utf-8-sig"), help="Tools that the model may call, a JSON list in "
                 "OpenAI's form in this file; its calls are shown as it wrote them."),
]  # fmt: skip
QUEUE = [
    click.option("--cache-salt", default="", metavar="TEXT", help="Share cached prefixes only with requests of this "
                 "salt."),
    click.option("--priority", type=int, default=0, help="Higher goes first."),
    click.option("--deadline-ms", type=int, default=0, help="End with an error what is not finished by then; 0: none."),
]  # fmt: skip


def request_options(function: Callable[..., None]) -> Callable[..., None]:
    """All flags of a request, handed to the command as `options`, JSON-like values for `parse_request`."""
    return _packed(function, [*SAMPLING, *REQUEST, *GRAMMAR, *TOOLS, *QUEUE])


def chat_options(function: Callable[..., None]) -> Callable[..., None]:
    """The flags of a request that has one answer."""
    return _packed(function, [*SAMPLING, *GRAMMAR, *TOOLS, *QUEUE])


GRAMMAR_FLAGS = ("json_object", "json_schema", "regex", "choices", "lark", "ebnf")


def _grammar(
    json_object: bool,
    json_schema: TextIO | None,
    regex: str | None,
    choices: tuple[str, ...],
    lark: TextIO | None,
    ebnf: TextIO | None,
) -> dict[str, str] | None:
    """What the flags of GRAMMAR say, as `common.sampling_params.Grammar`."""
    given = [
        {"kind": kind, "text": text}
        for kind, text in (
            ("json_object", "" if json_object else None),
            ("json_schema", _read("--json-schema", json_schema)),
            ("regex", regex),
            ("choice", json.dumps(list(choices), ensure_ascii=False) if choices else None),
            ("lark", _read("--lark", lark)),
            ("ebnf", _read("--ebnf", ebnf)),
        )
        if text is not None
    ]
    if len(given) > 1:
        raise click.UsageError("Give one of --json-object, --json-schema, --regex, --choice, --lark and --ebnf.")
    if given and given[0]["kind"] == "json_schema":
        _json("--json-schema", given[0]["text"])
    return given[0] if given else None


def _json(name: str, text: str | None) -> Any:
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"{name}: not JSON: {error}") from None


def _read(name: str, file: TextIO | None) -> str | None:
    try:
        return None if file is None else file.read()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{name}: {file.name if file else ''} is not UTF-8: {error}") from None


def _packed(function: Callable[..., None], decorators: list[Callable[..., Any]]) -> Callable[..., None]:
    names: set[str] = set()

    @functools.wraps(function)
    def with_options(*args: Any, **given: Any) -> None:
        options = {name: given.pop(name) for name in names}
        options["skip_special_tokens"] = not options.pop("keep_special_tokens")
        options["tools"] = _json("--tools", _read("--tools", options["tools"]))
        options["grammar"] = _grammar(**{name: options.pop(name) for name in GRAMMAR_FLAGS})
        options["allowed_token_ids"] = options["allowed_token_ids"] or None
        listed = {name: list(value) for name, value in options.items() if isinstance(value, tuple)}
        function(*args, options={**options, **listed}, **given)

    # click keeps the options of a function on the function: those that are new are ours
    before = {p.name for p in getattr(function, "__click_params__", [])}
    wrapped: Callable[..., None] = with_options
    for decorate in reversed(decorators):
        wrapped = decorate(wrapped)
    names |= {p.name for p in wrapped.__click_params__ if p.name not in before}  # type: ignore[attr-defined]
    return wrapped
