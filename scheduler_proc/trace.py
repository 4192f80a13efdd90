"""Workloads from a JSONL trace: one request per line.

    {"arrival_s": 0.5, "prompt_tokens": 900, "output_tokens": 120, "prefix_group": "system-1", "prefix_tokens": 512}

`arrival_s`, `prompt_tokens` and `output_tokens` are required. Requests of one `prefix_group` share their first
`prefix_tokens`. Lines of one `session` are turns in their order: a later one's `prompt_tokens` count the history too,
and it is sent at its arrival time or after the answer before it, whichever is later. `max_tokens` (default: the output
tokens), `priority` and `salt` are as in a request.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from scheduler_proc.workload import Session, Text, Turn, Workload, WorkloadError

REQUIRED = ("arrival_s", "prompt_tokens", "output_tokens")
OPTIONAL = ("max_tokens", "prefix_group", "prefix_tokens", "session", "priority", "salt")
_RANGES: dict[str, tuple[float, float]] = {
    "arrival_s": (0, 1e9),
    "prompt_tokens": (1, 2**22),
    "output_tokens": (1, 2**22),
    "max_tokens": (1, 2**22),
    "prefix_tokens": (0, 2**22),
    "priority": (-1000, 1000),
}


@dataclass(slots=True)
class _Open:
    """A session under construction."""

    salt: str
    priority: int
    turns: list[Turn] = field(default_factory=list)
    history: int = 0


def read_trace(lines: Iterable[str]) -> Workload:
    """Raises WorkloadError naming the line (counted from 1) and the field. Empty lines are skipped."""
    sessions: dict[object, _Open] = {}
    groups: dict[object, int] = {}
    texts = 0
    for at, line in enumerate(lines, 1):
        if not line.strip():
            continue
        row = _parse(at, line)
        key = ("session", row["session"]) if "session" in row else ("line", at)
        session = sessions.setdefault(key, _Open(row.get("salt", ""), row.get("priority", 0)))
        for name, first in (("salt", session.salt), ("priority", session.priority)):
            if row.get(name, first) != first:
                raise _wrong(at, name, f"as in the first line of the session ({first!r})", row)
        own = row["prompt_tokens"] - session.history
        if own < 1:
            raise _wrong(at, "prompt_tokens", f"more than the {session.history} tokens of the session so far", row)
        parts: list[Text] = []
        if "prefix_group" in row:
            if session.turns:
                raise WorkloadError(f"line {at}: prefix_group: only the first line of a session may have one")
            group = groups.setdefault(row["prefix_group"], len(groups))
            if row["prefix_tokens"]:
                parts.append(Text(2 * group, row["prefix_tokens"]))  # even numbers are prefixes, odd ones are not
            own -= row["prefix_tokens"]
            if own < 0:
                raise _wrong(at, "prefix_tokens", f"at most prompt_tokens ({row['prompt_tokens']})", row)
        if own:
            parts.append(Text(2 * texts + 1, own))
        texts += 1
        limit = row.get("max_tokens", row["output_tokens"])
        if limit < row["output_tokens"]:
            raise _wrong(at, "max_tokens", f"at least output_tokens ({row['output_tokens']})", row)
        session.turns.append(Turn(tuple(parts), row["output_tokens"], limit, 0.0, float(row["arrival_s"])))
        session.history = row["prompt_tokens"] + row["output_tokens"]
    if not sessions:
        raise WorkloadError("line 1: the trace is empty")
    return Workload(tuple(Session(tuple(s.turns), s.salt, s.priority) for s in sessions.values()))


def _parse(at: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise WorkloadError(f"line {at}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise WorkloadError(f"line {at}: must be an object")
    for name in REQUIRED:
        if name not in row:
            raise WorkloadError(f"line {at}: {name}: is missing")
    for name, value in row.items():
        if name in _RANGES:
            low, high = _RANGES[name]
            kinds = (int, float) if name == "arrival_s" else (int,)
            if type(value) not in kinds or not low <= value <= high:
                what = "a number" if name == "arrival_s" else "an integer"
                raise _wrong(at, name, f"{what} from {low:g} to {high:g}", row)
        elif name in ("prefix_group", "session", "salt"):
            if type(value) is not str and (type(value) is not int or name == "salt"):
                raise _wrong(at, name, "a string" if name == "salt" else "a string or an integer", row)
        else:
            raise WorkloadError(f"line {at}: {name}: no such field; there are {', '.join(REQUIRED + OPTIONAL)}")
    if ("prefix_group" in row) != ("prefix_tokens" in row):
        raise WorkloadError(f"line {at}: prefix_group: goes together with prefix_tokens")
    return row


def _wrong(at: int, name: str, rule: str, row: dict[str, Any]) -> WorkloadError:
    return WorkloadError(f"line {at}: {name}: must be {rule}, got {row[name]!r}")
