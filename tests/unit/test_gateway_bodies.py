"""How much may be in a body: the gateway does nothing else while it parses one, and keeps nothing of it."""

import asyncio
import json
import tracemalloc

from starlette.requests import Request
from starlette.types import Message

from common.story import Story
from gateway_proc.requests import MAX_SHOWN, BodyReader
from gateway_proc.schemas.completions import CompletionRequest


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
