"""Traces for the serving benchmark: JSON lines, in the simulator's format (docs/simulator.md) or Mooncake's.

    {"arrival_s": 0.5, "prompt_tokens": 900, "output_tokens": 120, "prefix_group": "system-1", "prefix_tokens": 512}
    {"timestamp": 500, "input_length": 900, "output_length": 120, "hash_ids": [46, 47]}

In Mooncake's published traces `timestamp` is in ms and each hash id stands for a block of 512 tokens: equal ids, equal
tokens. Tokens themselves are drawn, and the same for equal prefixes.
"""

import json
import random
from collections.abc import Iterable
from typing import Any

from client_cli.bench_load import Conversation, LoadError, Tokens, Turn

BLOCK = 512  # tokens of a hash id
_OURS = {"arrival_s", "prompt_tokens", "output_tokens"}
_OUR_OPTIONS = {"prefix_group", "prefix_tokens", "session", "max_tokens", "priority", "salt"}
_MOONCAKE = {"timestamp", "input_length", "output_length"}
_UNUSED = {"max_tokens", "priority", "salt"}  # of a simulated request; a benchmark generates output_tokens exactly


def read_trace(lines: Iterable[str], tokens: Tokens) -> list[Conversation]:
    """The conversations of a trace. Raises LoadError naming the line and the field."""
    sessions: dict[Any, list[Turn]] = {}
    said: dict[Any, int] = {}
    seed = tokens.rng.getrandbits(64)
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        row = _parse(number, text)
        if "timestamp" in row:
            at, length, output = row["timestamp"] / 1000, row["input_length"], row["output_length"]
            key: Any = ("line", number)
            prompt = _blocks(row.get("hash_ids") or [], length, tokens, seed)
        else:
            unused = sorted(_UNUSED & set(row))
            if unused:
                raise LoadError(f"line {number}: {unused[0]}: a benchmark cannot follow it; remove the field")
            at, output = row["arrival_s"], row["output_tokens"]
            key = ("session", row["session"]) if "session" in row else ("line", number)
            length = row["prompt_tokens"] - said.get(key, 0)
            if length < 1:
                raise LoadError(f"line {number}: prompt_tokens: must be more than the {said[key]} tokens said before")
            if "prefix_group" in row and key in said:
                raise LoadError(f"line {number}: prefix_group: only the first line of a session may have one")
            prompt = _prefixed(number, row, length, tokens, seed)
            said[key] = row["prompt_tokens"] + output
        sessions.setdefault(key, []).append(Turn(prompt, output, float(at)))
    if not sessions:
        raise LoadError("the trace is empty")
    return sorted((Conversation(tuple(turns)) for turns in sessions.values()), key=lambda c: c.start_s)


def _blocks(hash_ids: list[int], length: int, tokens: Tokens, seed: int) -> tuple[int, ...]:
    prompt: tuple[int, ...] = ()
    for hash_id in hash_ids[: -(-length // BLOCK)]:
        prompt += _known(tokens, seed, f"block {hash_id}", BLOCK)
    return (prompt + tokens.draw(max(0, length - len(prompt))))[:length]


def _prefixed(number: int, row: dict[str, Any], length: int, tokens: Tokens, seed: int) -> tuple[int, ...]:
    shared = row.get("prefix_tokens", 0)
    if shared > length:
        raise LoadError(f"line {number}: prefix_tokens: must be at most prompt_tokens ({length})")
    prefix = _known(tokens, seed, f"group {row.get('prefix_group')}", shared)
    return prefix + tokens.draw(length - shared)


def _known(tokens: Tokens, seed: int, name: str, count: int) -> tuple[int, ...]:
    """The first tokens of a text of this name: always the same."""
    return Tokens(tokens.vocab_size, random.Random(f"{seed} {name}")).draw(count)


def _parse(number: int, text: str) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LoadError(f"line {number}: not JSON: {error}") from None
    if type(row) is not dict:
        raise LoadError(f"line {number}: must be an object")
    required, known = (_MOONCAKE, _MOONCAKE | {"hash_ids"}) if "timestamp" in row else (_OURS, _OURS | _OUR_OPTIONS)
    for name in sorted(required - set(row)):
        raise LoadError(f"line {number}: {name}: is missing")
    for name in sorted(set(row) - known):
        raise LoadError(f"line {number}: {name}: is not known; known are {', '.join(sorted(known))}")
    if ("prefix_group" in row) != ("prefix_tokens" in row):
        raise LoadError(f"line {number}: prefix_group: goes together with prefix_tokens")
    for name in ("arrival_s", "timestamp"):
        if name in row and (type(row[name]) not in (int, float) or not 0 <= row[name] <= 1e12):
            raise LoadError(f"line {number}: {name}: must be a number of at least 0")
    least = {"prompt_tokens": 1, "input_length": 1, "output_tokens": 1, "output_length": 1, "prefix_tokens": 0}
    for name, low in least.items():
        if name in row and (type(row[name]) is not int or not low <= row[name] <= 2**22):
            raise LoadError(f"line {number}: {name}: must be an integer from {low} to {2**22}")
    for name in ("prefix_group", "session"):
        if name in row and type(row[name]) not in (str, int):
            raise LoadError(f"line {number}: {name}: must be a string or an integer")
    ids = row.get("hash_ids", [])
    if type(ids) is not list or not all(type(i) is int for i in ids):
        raise LoadError(f"line {number}: hash_ids: must be a list of integers")
    return row
