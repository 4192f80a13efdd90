"""Hypothesis strategies for wire messages, derived from the schema, so that a new message is covered by itself.

A message whose fields depend on each other (it has a `__post_init__`) needs an entry in `COLUMNS` or `OWN`.
"""

from array import array
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from hypothesis import strategies as st

from common.codec import Struct, schema_of
from common.fields import Bool, Bytes, Checker, Float, Floats, Int, IntMap, Ints, ListOf, MapOf, Maybe, OneOf, Str
from common.logprobs import LogprobRows, Logprobs
from common.messages import AddRequest, Finish, Generate, StepPlan, StepResult, TextBatch, TokenBatch, Tokenize

FEW = 6


@dataclass(frozen=True)
class Rules:
    """Column groups of equal length, columns whose length is the sum of another, and columns of pairs or triples."""

    groups: tuple[tuple[str, ...], ...]
    sums: dict[str, str]
    tuples: dict[str, int] = field(default_factory=dict)


COLUMNS = {
    StepPlan: Rules(
        groups=(
            ("enter_slots", "enter_lens", "enter_draw"),
            ("page_slots", "page_counts"),
            ("chunk_slots", "chunk_lens", "chunk_samples"),
        ),
        sums={"pages": "page_counts", "chunk_tokens": "chunk_lens"},
        tuples={"copies": 2, "state_loads": 2, "state_saves": 3},
    ),
    Logprobs: Rules(
        groups=(("token_ids", "logprobs", "ranks", "top_counts"),),
        sums={"top_ids": "top_counts", "top_logprobs": "top_counts"},
    ),
    StepResult: Rules(groups=(("failed", "problems"),), sums={}),
    TokenBatch: Rules(groups=(("rids", "counts", "finish", "cached"),), sums={"token_ids": "counts"}),
    TextBatch: Rules(
        groups=(("rids", "choices", "counts", "texts", "finish", "prompt_tokens", "cached"),),
        sums={"token_ids": "counts"},
    ),
}


@cache  # a strategy that is made again for each drawing is checked again as well
def values_of(checker: Checker, size: int | None = None) -> st.SearchStrategy[Any]:
    """Values that a checker allows; `size` fixes the length of a column."""
    least, most = (0, FEW) if size is None else (size, size)
    match checker:
        case Int(lo, hi):
            return st.integers(lo, hi)
        case Float(lo, hi, open_low):
            return st.floats(lo, hi, exclude_min=open_low, allow_nan=False)
        case Bool():
            return st.booleans()
        case Str():
            return st.text(min_size=checker.least, max_size=min(checker.most, 40))
        case Bytes():
            return st.binary(min_size=least, max_size=min(checker.most, max(most, 0)))
        case Ints():
            items = st.integers(checker.lo, checker.hi)
            columns = st.lists(items, min_size=max(least, checker.least), max_size=min(checker.most, most))
            return columns.map(lambda values: array(checker.typecode, values))
        case Floats():
            items = st.floats(width=32, allow_nan=False, allow_infinity=False)
            return st.lists(items, min_size=least, max_size=min(checker.most, most)).map(lambda v: array("f", v))
        case IntMap(key, value):
            keys = st.integers(key.lo, key.hi)
            return st.dictionaries(keys, values_of(value), min_size=least, max_size=min(key.most, most))
        case OneOf(names):
            return st.sampled_from(names)
        case ListOf():
            items = st.lists(
                values_of(checker.item), min_size=max(least, checker.least), max_size=min(checker.most, most)
            )
            return items.map(tuple)
        case MapOf():
            return st.dictionaries(values_of(checker.key), values_of(checker.value), max_size=min(checker.most, FEW))
        case OneOf(names):
            return st.sampled_from(names)
        case Maybe(inner):
            return st.none() | values_of(inner)
        case Struct(cls):
            return messages_of(cls)
    raise NotImplementedError(f"{type(checker).__name__} needs a strategy in wire_strategies.values_of")


@cache
def messages_of(cls: type) -> st.SearchStrategy[Any]:
    """Every message of a type that its schema and its own check allow."""
    if cls in OWN:
        return OWN[cls]()
    if cls in COLUMNS:
        return _with_columns(cls, COLUMNS[cls])
    if hasattr(cls, "__post_init__"):
        raise NotImplementedError(f"{cls.__name__} checks across fields: it needs a strategy in wire_strategies")
    return st.builds(cls, **{name: values_of(checker) for name, checker in schema_of(cls)})


@st.composite
def _with_columns(draw: st.DrawFn, cls: type, rules: Rules) -> Any:
    checkers = dict(schema_of(cls))
    fields: dict[str, Any] = {}
    for group in rules.groups:
        size = draw(st.integers(0, FEW))
        for name in group:
            if name in rules.sums.values():
                least = checkers[name].lo  # type: ignore[attr-defined]
                counts = st.lists(st.integers(least, 3), min_size=size, max_size=size)
                fields[name] = array("i", draw(counts))
            elif name == "finish":
                fields[name] = bytes(draw(st.lists(st.sampled_from(Finish), min_size=size, max_size=size)))
            else:
                fields[name] = draw(values_of(checkers[name], size))
    for name, counts_name in rules.sums.items():
        fields[name] = draw(values_of(checkers[name], sum(fields[counts_name])))
    for name, size in rules.tuples.items():
        fields[name] = draw(values_of(checkers[name], size * draw(st.integers(0, FEW))))
    for name, checker in checkers.items():
        if name not in fields:
            fields[name] = draw(values_of(checker)) if name != "chunk_drafts" else draw(_drafts(fields))
    return cls(**fields)


@st.composite
def _drafts(draw: st.DrawFn, fields: dict[str, Any]) -> Any:
    """Fewer than a sampling chunk has tokens, none in others; or an empty column."""
    columns = zip(fields["chunk_lens"], fields["chunk_samples"], strict=True)
    drafts = [draw(st.integers(0, (length - 1) * samples)) for length, samples in columns]
    return array("i", drafts if draw(st.booleans()) else [])


@st.composite
def _generates(draw: st.DrawFn) -> Generate:
    checkers = dict(schema_of(Generate))
    chosen = draw(st.sampled_from(("text", "token_ids", "chat")))
    prompt: dict[str, Any] = dict.fromkeys(("text", "token_ids", "chat"))
    maybe = checkers[chosen]
    assert isinstance(maybe, Maybe)
    prompt[chosen] = draw(values_of(maybe.inner))
    rest = {name: draw(values_of(checker)) for name, checker in checkers.items() if name not in prompt}
    return Generate(**_chat_fields(prompt | rest))


def _chat_fields(values: dict[str, Any]) -> dict[str, Any]:
    if values["chat"] is None:
        return values | {"tools": "", "template_args": "", "continue_final_message": False}
    return values | {"add_generation_prompt": values["add_generation_prompt"] and not values["continue_final_message"]}


@st.composite
def _tokenizes(draw: st.DrawFn) -> Tokenize:
    values = {name: draw(values_of(checker)) for name, checker in schema_of(Tokenize)}
    prompt = draw(st.sampled_from(("text", "chat")))
    maybe = dict(schema_of(Tokenize))[prompt]
    assert isinstance(maybe, Maybe)
    return Tokenize(**_chat_fields(values | {"text": None, "chat": None, prompt: draw(values_of(maybe.inner))}))


@st.composite
def _logprob_rows(draw: st.DrawFn) -> LogprobRows:
    rows = draw(st.lists(st.integers(0, 2**14 - 1), max_size=3, unique=True))
    parts = [draw(messages_of(Logprobs)) for _ in rows]
    return LogprobRows.of(dict(zip(rows, parts, strict=True))) or LogprobRows(array("i"), array("i"), Logprobs.empty())


@st.composite
def _add_requests(draw: st.DrawFn) -> AddRequest:
    fields = {name: draw(values_of(checker)) for name, checker in schema_of(AddRequest)}
    fields["generated"] = draw(st.integers(0, max(0, min(len(fields["prompt"]), fields["max_tokens"]) - 1)))
    return AddRequest(**fields)


OWN = {Generate: _generates, AddRequest: _add_requests, Tokenize: _tokenizes, LogprobRows: _logprob_rows}
