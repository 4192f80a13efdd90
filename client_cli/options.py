"""Flags that several commands share: what a request may ask for, with the names of the fields on the wire."""

import functools
from collections.abc import Callable
from typing import Any

import click

SAMPLING = [
    click.option("--max-tokens", type=int, default=256, help="Tokens to generate at most."),
    click.option("--temperature", type=float, default=1.0, help="0 is greedy."),
    click.option("--top-k", type=int, default=0, help="Draw among the k likeliest tokens; 0: among all."),
    click.option("--top-p", type=float, default=1.0, help="Draw among the likeliest tokens of this total probability."),
    click.option("--min-p", type=float, default=0.0, help="Least probability, relative to the likeliest token."),
    click.option("--seed", type=int, help="Equal requests with equal seeds draw equal tokens."),
    click.option("--stop", multiple=True, metavar="TEXT", help="End before this text (repeatable)."),
    click.option("--stop-token-id", "stop_token_ids", type=int, multiple=True, help="End at this token (repeatable)."),
    click.option("--ignore-eos", is_flag=True, help="Go on after the model's end-of-sequence token."),
    click.option("--keep-special-tokens", is_flag=True, help="Show special tokens in the text."),
]
REQUEST = [
    click.option("--n", type=int, default=1, help="Answers to the prompt; their seeds are seed, seed + 1, and so on."),
]
QUEUE = [
    click.option("--cache-salt", default="", metavar="TEXT", help="Share cached prefixes only with requests of this "
                 "salt."),
    click.option("--priority", type=int, default=0, help="Higher goes first."),
    click.option("--deadline-ms", type=int, default=0, help="End with an error what is not finished by then; 0: none."),
]  # fmt: skip


def request_options(function: Callable[..., None]) -> Callable[..., None]:
    """All flags of a request, handed to the command as `options`, JSON-like values for `parse_request`."""
    return _packed(function, [*SAMPLING, *REQUEST, *QUEUE])


def chat_options(function: Callable[..., None]) -> Callable[..., None]:
    """The flags of a request that has one answer."""
    return _packed(function, [*SAMPLING, *QUEUE])


def _packed(function: Callable[..., None], decorators: list[Callable[..., Any]]) -> Callable[..., None]:
    names: set[str] = set()

    @functools.wraps(function)
    def with_options(*args: Any, **given: Any) -> None:
        options = {name: given.pop(name) for name in names}
        options["skip_special_tokens"] = not options.pop("keep_special_tokens")
        listed = {name: list(value) for name, value in options.items() if isinstance(value, tuple)}
        function(*args, options={**options, **listed}, **given)

    # click keeps the options of a function on the function: those that are new are ours
    before = {p.name for p in getattr(function, "__click_params__", [])}
    wrapped: Callable[..., None] = with_options
    for decorate in reversed(decorators):
        wrapped = decorate(wrapped)
    names |= {p.name for p in wrapped.__click_params__ if p.name not in before}  # type: ignore[attr-defined]
    return wrapped
