"""How much may be in a body: the gateway does nothing else while it parses one, and keeps nothing of it."""

import asyncio
import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Message

from common.story import Story
from gateway_proc.app import ROUTES
from gateway_proc.errors import ApiError
from gateway_proc.requests import MAX_PARTS, MAX_SHOWN, MAX_VALUES, BodyReader
from gateway_proc.schemas.base import ApiModel
from gateway_proc.schemas.chat import ChatRequest
from gateway_proc.schemas.completions import CompletionRequest

READER = BodyReader(2**24)
BODIES = [route.body for route in ROUTES if route.body is not None]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b'{"prompt":[%b]}' % b",".join([b"1"] * (MAX_VALUES + 2)), f"{MAX_VALUES + 1} values"),
        (b'{"prompt":"a","x":[%b]}' % b",".join([b"[]"] * MAX_PARTS), "lists, objects and fields"),
        (b'{"prompt":"a","x":[%b]}' % b",".join([b'{"a":1}'] * (MAX_PARTS // 2)), "lists, objects and fields"),
        (b'{"prompt":"a",%b}' % b",".join(b'"%d":1' % i for i in range(MAX_PARTS)), "lists, objects and fields"),
        (b'{"x":"\\\\","prompt":[%b]}' % b",".join([b'"\\""'] * (MAX_VALUES + 2)), "values"),
    ],
)
def test_a_body_has_a_bounded_number_of_values(body: bytes, problem: str) -> None:
    with pytest.raises(ApiError) as refused:
        READER.parse(body, CompletionRequest)
    assert refused.value.status == 413 and problem in refused.value.message


def test_a_byte_order_mark_is_passed_over() -> None:
    """As FastAPI does in vLLM and SGLang: files that some editors write begin with one."""
    assert READER.parse('\ufeff{"prompt": "\ufeffa"}'.encode(), CompletionRequest).prompt == "\ufeffa"
    for wrong in ('\ufeff\ufeff{"prompt": "a"}', ' \ufeff{"prompt": "a"}', "\ufeff"):
        with pytest.raises(ApiError, match="not valid JSON"):
            READER.parse(wrong.encode(), CompletionRequest)


def test_texts_hold_as_much_punctuation_as_they_like() -> None:
    text = ',[{:"\\' * 400_000 + '\\"'
    assert READER.parse(json.dumps({"prompt": text}).encode(), CompletionRequest).prompt == text
    tokens = [0] * MAX_VALUES
    assert READER.parse(json.dumps({"prompt": tokens}).encode(), CompletionRequest).prompt == tokens


def lists_of(schema: Any) -> Iterator[dict[str, Any]]:
    """The lists in a schema of pydantic-core, but for those that may hold anything."""
    if isinstance(schema, dict):
        if schema.get("type") == "list" and schema.get("items_schema", {"type": "any"})["type"] != "any":
            yield schema
        for inner in schema.values():
            yield from lists_of(inner)
    elif isinstance(schema, list | tuple):
        for inner in schema:
            yield from lists_of(inner)


@pytest.mark.parametrize("kind", BODIES)
def test_one_wrong_item_of_a_list_is_enough(kind: type[ApiModel]) -> None:
    """The problems of 300,000 took longer than a process may be silent."""
    lists = list(lists_of(kind.__pydantic_core_schema__))
    assert lists and all(found.get("fail_fast") for found in lists)


def test_a_wrong_item_is_still_named() -> None:
    body = {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": 3}, {"type": 4}]}]}
    with pytest.raises(ApiError) as refused:
        READER.parse(json.dumps(body).encode(), ChatRequest)
    assert refused.value.param == "messages[1].content[0].type"


def test_of_unknown_fields_little_is_kept() -> None:
    """They are remembered, so that the log names them once."""
    reader = BodyReader(2**24)

    async def read(number: int) -> list[str]:
        names = (f"{number} {i} {'x' * 100}" for i in range(20_000))
        body = json.dumps({"prompt": "a"} | dict.fromkeys(names, 0)).encode()
        story = Story("id")

        async def receive() -> Message:
            return {"type": "http.request", "body": body}

        await reader.read(Request({"type": "http", "headers": [], "story": story}, receive), CompletionRequest)
        return story.ignored

    asyncio.run(read(0))
    tracemalloc.start()
    try:
        begin, _ = tracemalloc.get_traced_memory()
        assert len(asyncio.run(read(1))) == MAX_SHOWN
        end, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert end - begin < 200_000
