"""The gateway's turnstile: few requests begin in a turn of the loop, all of them in order, and nobody is forgotten."""

import asyncio

from starlette.types import Message, Receive, Scope, Send

from common.story import Story
from gateway_proc.middleware import Observed
from gateway_proc.turnstile import PER_TURN, Turnstile


async def crowd(turnstile: Turnstile, number: int) -> tuple[list[int], list[int]]:
    """Let `number` tasks pass: the order in which they did, and in which turn of the loop each."""
    order: list[int] = []
    turns: list[int] = []
    turn = 0
    ended = False

    def tick() -> None:
        nonlocal turn
        turn += 1
        if not ended:
            asyncio.get_running_loop().call_soon(tick)

    async def one(i: int) -> None:
        await turnstile.enter()
        order.append(i)
        turns.append(turn)

    tick()
    await asyncio.gather(*(one(i) for i in range(number)))
    ended = True
    return order, turns


def test_a_crowd_passes_in_order_and_a_few_in_each_turn() -> None:
    turnstile = Turnstile(3)
    order, turns = asyncio.run(crowd(turnstile, 100))
    assert order == list(range(100))
    assert max(turns.count(turn) for turn in turns) == 3
    assert turns[-1] - turns[0] <= 100 / 3 + 2, "turns are left out"
    assert turnstile.waiting == 0


def test_few_do_not_wait() -> None:
    async def run() -> None:
        turnstile = Turnstile(2)
        for _ in range(5):
            for _ in range(2):
                entering = turnstile.enter()
                try:
                    entering.send(None)
                except StopIteration:
                    continue
                raise AssertionError("it waits")
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    asyncio.run(run())


def test_who_gives_up_leaves_the_place_to_others() -> None:
    async def run() -> None:
        turnstile = Turnstile(1)
        await turnstile.enter()
        waiting = [asyncio.create_task(turnstile.enter()) for _ in range(4)]
        await asyncio.sleep(0)
        for task in waiting[:3]:
            task.cancel()
        async with asyncio.timeout(10):
            await waiting[3]
            await turnstile.enter()
        assert turnstile.waiting == 0

    asyncio.run(run())


def test_requests_wait_there_and_probes_do_not() -> None:
    begun: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(scope["path"])

    async def nothing(*_: Message) -> Message:
        raise AssertionError("nobody asks")

    def told(story: Story, seconds: float) -> None:
        pass

    async def run() -> None:
        observed = Observed(app, lambda: None, told)
        paths = ["/v1/models"] * (PER_TURN + 1) + ["/health/live"]
        scopes = [{"type": "http", "path": path, "method": "GET", "headers": []} for path in paths]
        asked = [asyncio.ensure_future(observed(scope, nothing, nothing)) for scope in scopes]
        await asyncio.sleep(0)
        assert begun == [*["/v1/models"] * PER_TURN, "/health/live"], "one waits for the next turn"
        await asyncio.gather(*asked)
        assert len(begun) == len(paths)

    asyncio.run(run())
