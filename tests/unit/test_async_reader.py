"""Messages reach an asyncio loop from a plain socket: all of them, in order, whatever is sent meanwhile."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import uvloop
import zmq

from common.async_reader import BURST, AsyncReader
from common.sockets import AT_ONCE

PATIENCE_S = 30.0
Socket = zmq.Socket[bytes]
LOOPS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
Run = Callable[[Awaitable[Any]], Any]


@pytest.fixture
def pair() -> Iterator[tuple[Socket, Socket]]:
    """Two DEALERs, connected over a Unix socket of the kernel's own naming."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as here, context.socket(zmq.DEALER) as there:
        here.linger = there.linger = 0
        here.bind("ipc://*")
        there.connect(here.get_string(zmq.LAST_ENDPOINT))
        yield here, there


class Taken:
    """What was taken, and when there is enough of it."""

    def __init__(self, count: int):
        self.messages: list[Any] = []
        self._count = count
        self._enough = asyncio.Event()

    def __call__(self, message: Any) -> None:
        self.messages.append(message)
        if len(self.messages) == self._count:
            self._enough.set()

    async def wait(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self._enough.wait()


@LOOPS
def test_all_messages_come_in_order_also_those_from_before(pair: tuple[Socket, Socket], run: Run) -> None:
    here, there = pair
    there.send(b"0")
    assert here.poll(PATIENCE_S * 1000)

    async def test() -> None:
        taken = Taken(5 * BURST)
        running = asyncio.create_task(AsyncReader(here, taken).run())
        for number in range(1, 5 * BURST):
            there.send(b"%d" % number)
            if number % 50 == 0:
                await asyncio.sleep(0)
        await taken.wait()
        assert taken.messages == [b"%d" % number for number in range(5 * BURST)]
        assert not running.done()
        running.cancel()

    run(test())


@LOOPS
def test_nothing_is_left_lying_when_the_same_socket_sends(pair: tuple[Socket, Socket], run: Run) -> None:
    """A send takes in what the descriptor told of: each of these rounds would hang without a look afterwards."""
    here, there = pair

    async def test() -> None:
        taken = Taken(1)
        reader = AsyncReader(here, lambda message: taken(message))
        running = asyncio.create_task(reader.run())
        there.send(b"connected")
        await taken.wait()
        for number in range(200):
            taken = Taken(1)
            there.send(b"%d" % number)
            while not here.get(zmq.EVENTS) & zmq.POLLIN:  # type: ignore[operator]
                here.send(b"x", AT_ONCE)
                assert there.poll(PATIENCE_S * 1000)
                there.recv()
            reader.look()
            await taken.wait()
            assert taken.messages == [b"%d" % number]
        running.cancel()

    run(test())


@LOOPS
def test_parts(pair: tuple[Socket, Socket], run: Run) -> None:
    here, there = pair

    async def test() -> None:
        taken = Taken(2)
        running = asyncio.create_task(AsyncReader(here, taken, parts=True).run())
        there.send_multipart([b"a", b"b"])
        there.send(b"c")
        await taken.wait()
        assert taken.messages == [[b"a", b"b"], [b"c"]]
        running.cancel()

    run(test())


@LOOPS
def test_others_have_their_turn_in_a_flood(pair: tuple[Socket, Socket], run: Run) -> None:
    here, there = pair
    for _ in range(4 * BURST):
        there.send(b"")
    assert here.poll(PATIENCE_S * 1000)

    async def test() -> None:
        taken = Taken(4 * BURST)
        running = asyncio.create_task(AsyncReader(here, taken).run())
        seen = [0]
        async with asyncio.timeout(PATIENCE_S):
            while seen[-1] < 4 * BURST:
                await asyncio.sleep(0)
                seen.append(len(taken.messages))
        assert max(b - a for a, b in pairwise(seen)) <= BURST
        running.cancel()

    run(test())


@LOOPS
def test_what_taking_raises_ends_it(pair: tuple[Socket, Socket], run: Run) -> None:
    here, there = pair

    async def test() -> None:
        def take(message: bytes) -> None:
            raise ValueError(message)

        reader = AsyncReader(here, take)
        running = asyncio.create_task(reader.run())
        there.send(b"bad")
        there.send(b"more")
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(ValueError, match="bad"):
                await running
        reader.look()  # means nothing any more
        assert here.poll(PATIENCE_S * 1000) and here.recv() == b"more"

    run(test())


@LOOPS
def test_it_can_be_stopped_while_it_takes_and_the_socket_closed(pair: tuple[Socket, Socket], run: Run) -> None:
    here, there = pair

    async def test() -> None:
        taken: list[bytes] = []

        def take(message: bytes) -> None:
            taken.append(message)
            reader.stop()
            here.close(0)

        reader = AsyncReader(here, take)
        running = asyncio.create_task(reader.run())
        there.send(b"first")
        there.send(b"second")
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(asyncio.CancelledError):
                await running
        assert taken == [b"first"]

    run(test())


@LOOPS
def test_a_full_socket_tells_when_it_takes_messages_again(pair: tuple[Socket, Socket], run: Run) -> None:
    here, there = pair

    async def test() -> None:
        room = asyncio.Event()
        running = asyncio.create_task(AsyncReader(here, lambda message: None, writable=room.set).run())
        await asyncio.sleep(0)
        sent = 0
        with pytest.raises(zmq.Again):
            while True:
                here.send(bytes(10_000), AT_ONCE)
                sent += 1
        room.clear()
        reading = asyncio.get_running_loop().run_in_executor(None, lambda: [there.recv() for _ in range(sent)])
        async with asyncio.timeout(PATIENCE_S):
            await room.wait()
            here.send(b"again", AT_ONCE)
            await reading
        running.cancel()

    run(test())


@LOOPS
def test_looks_while_messages_keep_coming_do_not_make_turns_longer(pair: tuple[Socket, Socket], run: Run) -> None:
    """Each look began a reading of its own that went on as long as there was something: a client that asked without
    end, and was answered, froze the loop."""
    here, there = pair
    count = 400 * BURST
    here.rcvhwm = there.sndhwm = 2 * count
    address = here.get_string(zmq.LAST_ENDPOINT)
    here.unbind(address)
    there.disconnect(address)
    here.bind("ipc://*")
    there.connect(here.get_string(zmq.LAST_ENDPOINT))
    for number in range(count):
        there.send(b"%d" % number)

    async def test() -> int:
        taken = Taken(count)
        reader = AsyncReader(here, taken)
        running = asyncio.create_task(reader.run())
        most = before = 0
        while len(taken.messages) < count:
            await asyncio.sleep(0)
            most, before = max(most, len(taken.messages) - before), len(taken.messages)
            reader.look()  # something was sent
        running.cancel()
        return most

    assert run(test()) <= 2 * BURST
