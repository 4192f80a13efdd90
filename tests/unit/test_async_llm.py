"""AsyncLLM against a played cluster."""

import asyncio
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from common.messages import Generate
from rhizome import AsyncLLM, ClusterError, GenerationError, SamplingParams
from tests.unit.fake_frontend import TIMEOUT_S, FakeFrontend, rows, silent_after_one_row
from tests.unit.frontend_world import INFO
from tests.unit.test_python_api import answers, texts


def test_async(short_dir: Path) -> None:
    async def use() -> None:
        async with AsyncLLM.connect(short_dir) as llm:
            both = await asyncio.gather(llm.generate(["a", "b"], SamplingParams(n=2)), llm.generate("c"))
            assert [texts(found) for found in both] == [[["a 0!", "a 1!"], ["b 0!", "b 1!"]], [["c 0!"]]]
            assert texts(await llm.chat([{"role": "user", "content": "hi"}])) == [["hi 0!"]]
            assert [piece.text async for piece in llm.stream("x")] == ["x 0", "!"]
            with pytest.raises(GenerationError, match="prompt 1"):
                await llm.generate(["slow", "bad"])
            assert await llm.stats() == {"a": 1}
            cancelled = asyncio.create_task(llm.generate("slow"))
            await asyncio.sleep(0)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
        with pytest.raises(ClusterError, match="async with"):
            await llm.generate("x")
        with pytest.raises(ClusterError, match="no cluster is running"):
            async with AsyncLLM.connect(short_dir / "nowhere"):
                pass

    with FakeFrontend(short_dir, answers, info=INFO):
        asyncio.run(use())


def test_a_second_block_and_another_loop_are_refused(short_dir: Path) -> None:
    refused: list[str] = []

    def elsewhere(llm: AsyncLLM) -> None:
        for call in (llm.generate("x"), llm.stats(), anext(llm.stream("x"))):
            with pytest.raises(ClusterError) as caught:
                asyncio.run(asyncio.wait_for(call, TIMEOUT_S))
            refused.append(str(caught.value))

    async def use() -> None:
        async with AsyncLLM.connect(short_dir) as llm:
            with pytest.raises(ClusterError, match="in use"):
                async with llm:
                    pass
            await asyncio.get_running_loop().run_in_executor(None, elsewhere, llm)
            assert texts(await llm.generate("x")) == [["x 0!"]]
        async with llm:  # again, one after the other
            assert texts(await llm.generate("x")) == [["x 0!"]]

    with FakeFrontend(short_dir, answers, info=INFO):
        asyncio.run(use())
    assert len(refused) == 3 and all("of another event loop" in problem for problem in refused)


def test_a_cancelled_end_of_a_block_ends_the_cluster_too(short_dir: Path) -> None:
    closed = threading.Event()

    class Own:
        close = staticmethod(closed.set)

    async def leave(entered: asyncio.Event) -> None:
        async with AsyncLLM.connect(short_dir) as llm:
            llm._own = Own()  # type: ignore[assignment]
            entered.set()
            await asyncio.get_running_loop().create_future()

    async def use() -> None:
        entered = asyncio.Event()
        leaving = asyncio.create_task(leave(entered))
        await entered.wait()
        leaving.cancel()
        await asyncio.sleep(0)  # the block is being left
        leaving.cancel()
        await asyncio.wait({leaving})

    with FakeFrontend(short_dir, answers, info=INFO):
        asyncio.run(use())
    assert closed.is_set()


def test_a_stream_whose_reader_lags_ends_by_name(short_dir: Path) -> None:
    def flood(msg: Any) -> Iterable[Any]:
        if isinstance(msg, Generate):
            yield from (rows(msg.rid, "x", 5) for _ in range(20))

    async def use() -> None:
        async with AsyncLLM.connect(short_dir) as llm:
            llm._open._max_unread = 10
            with pytest.raises(GenerationError, match="rows unread") as caught:
                async for _ in llm.stream("x"):
                    while any(stream.unread for stream in llm._open._streams.values()) or llm._open.live:
                        await asyncio.sleep(0.01)
            assert caught.value.code == "aborted"

    with FakeFrontend(short_dir, flood):
        asyncio.run(use())


def test_async_when_the_cluster_dies(short_dir: Path) -> None:
    async def use(cluster: FakeFrontend) -> None:
        async with AsyncLLM.connect(short_dir) as llm:
            with pytest.raises(ClusterError, match="its other end is gone"):
                async for _ in llm.stream("x"):
                    cluster.close()

    with FakeFrontend(short_dir, silent_after_one_row) as cluster:
        asyncio.run(use(cluster))


def test_calls_that_fail_together_ask_once_whether_the_cluster_ends(short_dir: Path) -> None:
    asked: list[None] = []

    class Own:
        def ends(self) -> bool:
            asked.append(None)
            return False

        def close(self) -> None:
            pass

    async def use(cluster: FakeFrontend) -> None:
        async with AsyncLLM.connect(short_dir) as llm:
            llm._own = Own()  # type: ignore[assignment]
            calls = [asyncio.create_task(llm.generate("x")) for _ in range(20)]
            for _ in calls:
                await asyncio.to_thread(cluster.next, Generate)
            cluster.close()
            for failed in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(failed, ClusterError) and "its other end is gone" in str(failed)

    with FakeFrontend(short_dir, silent_after_one_row) as cluster:
        asyncio.run(use(cluster))
    assert len(asked) == 1
