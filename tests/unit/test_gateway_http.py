"""Reading bodies, and work that ends when its client leaves."""

import asyncio

import pytest
from starlette.types import Message, Receive

from gateway_proc.errors import ApiError
from gateway_proc.http import ClientGone, read_body, while_connected


def receiving(*parts: bytes) -> Receive:
    """A body in these parts."""
    left = list(parts)

    async def receive() -> Message:
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    return receive


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_may_have_as_many_bytes_as_the_limit_says(declared: bool) -> None:
    for parts in ((b"12345678",), (b"1234", b"", b"5678")):
        headers = {"content-length": "8"} if declared else {}
        assert asyncio.run(read_body(receiving(*parts), headers, 8)) == b"12345678"
        with pytest.raises(ApiError, match="more than 7 bytes") as refused:
            asyncio.run(read_body(receiving(*parts), headers, 7))
        assert refused.value.status == 413


@pytest.mark.parametrize("leaves", [True, False])
def test_nothing_goes_on_behind_work_that_has_ended(leaves: bool) -> None:
    given_back = False

    async def receive() -> Message:
        if not leaves:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def work() -> str:
        nonlocal given_back
        try:
            if leaves:
                await asyncio.Event().wait()
            return "done"
        finally:
            await asyncio.sleep(0)
            given_back = True

    async def run() -> None:
        if leaves:
            with pytest.raises(ClientGone):
                await while_connected(receive, work())
        else:
            assert await while_connected(receive, work()) == "done"
        assert given_back
        await asyncio.sleep(0)  # what was cancelled ends in the next turn
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())
