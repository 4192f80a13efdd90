"""`AsyncLLM`: the same from asyncio code."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Unpack

from common.async_connection import AsyncConnection
from common.codec import FrameError
from common.connection import ConnectionLost
from common.json_request import JsonRequest
from common.messages import Info
from common.sockets import PeerStalled
from common.stream import RequestFailed, Stream, UnreadRows
from rhizome.cluster import ChildCluster
from rhizome.errors import SHUTTING_DOWN, ClusterError, GenerationError, check_process
from rhizome.llm import MAX_LIVE, frontend_of
from rhizome.outputs import RequestOutput, StreamOutput
from rhizome.requests import (
    ChatOptions,
    Message,
    Options,
    Params,
    Progress,
    Prompt,
    conversations_of,
    make_request,
    make_requests,
    needs_format,
    numbered,
    prompts_of,
    stream_output,
)
from rhizome.sampling_params import SamplingParams


class AsyncLLM:
    """A model for one event loop: `async with AsyncLLM("path/to/model") as llm: ...`. Arguments are those of LLM.

    The cluster starts when the block is entered and has ended when it is left. Any number of tasks may share it.
    """

    def __init__(self, model: str | os.PathLike[str], **options: Any):
        self._model: str | os.PathLike[str] | None = model
        self._options = options
        self._run_dir: str | os.PathLike[str] | None = None
        self._own: ChildCluster | None = None
        self._connection: AsyncConnection | None = None
        self._known_info: Info | None = None
        self._owner = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None  # of the block that is open
        self._asked: asyncio.Future[bool] | None = None

    @classmethod
    def connect(cls, run_dir: str | os.PathLike[str] | None = None) -> "AsyncLLM":
        """An AsyncLLM over a cluster that runs already and goes on running."""
        llm = cls("")
        llm._model, llm._run_dir = None, run_dir
        return llm

    async def __aenter__(self) -> "AsyncLLM":
        """Raises ClusterError, also when a block of the same object is open."""
        if self._loop is not None:
            raise ClusterError("this AsyncLLM is in use: a second `async with` block needs one of its own")
        self._owner, self._loop = os.getpid(), asyncio.get_running_loop()
        try:
            self._address = await self._start()
            self._connection = await AsyncConnection(self._address).__aenter__()
        except BaseException:
            self._loop = None
            raise
        return self

    async def _start(self) -> str:
        """The address of the cluster, which is there then."""
        if self._model is None:
            return frontend_of(self._run_dir)
        starting = asyncio.get_running_loop().run_in_executor(None, ChildCluster, self._model, self._options)
        try:
            self._own = await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_close_started)
            raise
        return self._own.address

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        connection, self._connection = self._connection, None
        try:
            if connection is not None:
                await connection.aclose()
        finally:  # a second cancellation must not leave the cluster running
            if self._own is not None:
                await asyncio.get_running_loop().run_in_executor(None, self._own.close)
            self._loop = None

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        **options: Unpack[Options],
    ) -> list[RequestOutput]:
        """As LLM.generate, without a progress bar. A cancelled call aborts its requests on the cluster."""
        return await self._run(make_requests("prompt", prompts_of(prompts), sampling_params, options))

    async def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """As LLM.chat, without a progress bar."""
        return await self._run(make_requests("messages", conversations_of(messages), sampling_params, options))

    async def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncIterator[StreamOutput]:
        """As LLM.stream: `async for piece in llm.stream("..."): ...`. A reader that lags far behind ends it, too."""
        request = make_request(prompt, sampling_params, options)
        await self._reconnect()
        (progress,) = numbered([request], await self._info([request]))
        stream = self._submit(progress.request, stream=True)
        try:
            async for found in stream:
                row = progress.read(found)
                progress.take(row)
                yield stream_output(row)
        except (RequestFailed, UnreadRows, ConnectionLost) as error:
            raise await self._error(0, error) from None
        finally:
            stream.abort()

    async def stats(self) -> dict[str, int]:
        """The cluster's counters and gauges by name."""
        await self._reconnect()
        try:
            return await self._open.stats()
        except ConnectionLost as error:
            raise await self._error(0, error) from None

    @property
    def _open(self) -> AsyncConnection:
        check_process(self._owner)
        if self._connection is None:
            raise ClusterError("use AsyncLLM in an `async with` block")
        if asyncio.get_running_loop() is not self._loop:
            raise ClusterError("this AsyncLLM is of another event loop; make one here, or use LLM from several threads")
        return self._connection

    async def _reconnect(self) -> None:
        """A new connection for one that broke, as when the cluster restarts the process at its other end."""
        if self._open.lost is not None:
            broken, self._connection = self._open, AsyncConnection(self._address)
            self._known_info = None
            await self._connection.__aenter__()
            await broken.aclose()

    async def _info(self, requests: list[JsonRequest]) -> Info | None:
        """What the cluster serves, if one of the requests needs the model's format; asked once on each connection."""
        if not any(map(needs_format, requests)):
            return None
        if self._known_info is None:
            try:
                self._known_info = await self._open.info()
            except (RequestFailed, ConnectionLost) as error:
                raise await self._error(0, error) from None
        return self._known_info

    def _submit(self, request: JsonRequest, *, stream: bool) -> Stream:
        try:
            return self._open.submit(request.prompt, request.params, stream=stream, **request.options)
        except (ConnectionLost, PeerStalled, FrameError) as error:
            raise ClusterError(str(error)) from None

    async def _run(self, requests: list[JsonRequest]) -> list[RequestOutput]:
        """At most MAX_LIVE at once; the first failure aborts the others."""
        await self._reconnect()
        begun = numbered(requests, await self._info(requests))
        room = asyncio.Semaphore(MAX_LIVE)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._one(progress, room)) for progress in begun]
        except* (GenerationError, ClusterError) as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _one(self, progress: Progress, room: asyncio.Semaphore) -> RequestOutput:
        async with room:
            stream = self._submit(progress.request, stream=False)
            try:
                async for row in stream:
                    progress.take(progress.read(row))
            except (RequestFailed, UnreadRows, ConnectionLost) as error:
                raise await self._error(progress.index, error) from None
            finally:
                stream.abort()
            return progress.output

    async def _error(self, index: int, error: Exception) -> GenerationError | ClusterError:
        if isinstance(error, RequestFailed):
            failed = GenerationError.of(index, error.error)
            if failed.code != SHUTTING_DOWN:
                return failed
        if isinstance(error, UnreadRows):
            return GenerationError(index, "aborted", str(error))
        return ClusterError(self._own.end if self._own and await self._ends(self._own) else str(error))

    async def _ends(self, own: ChildCluster) -> bool:
        """As its `ends`. Of any number of calls that fail together one asks, as each would wait in a thread."""
        if self._asked is None or self._asked.done():
            self._asked = asyncio.get_running_loop().run_in_executor(None, own.ends)
        return await asyncio.shield(self._asked)


def _close_started(starting: "asyncio.Future[ChildCluster]") -> None:
    """Nobody waits any more for a cluster that was starting."""
    if not starting.cancelled() and starting.exception() is None:
        starting.result().close()
