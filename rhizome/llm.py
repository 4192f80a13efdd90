"""`LLM`: generate, chat and stream from synchronous code."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

from common.codec import FrameError
from common.connection import Connection, ConnectionLost, frontend_in
from common.json_request import JsonRequest
from common.messages import Info
from common.run_dir import RunDirError, find_cluster
from common.sockets import PeerStalled
from rhizome.cluster import ChildCluster
from rhizome.errors import SHUTTING_DOWN, ClusterError, GenerationError, check_process
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

POLL_S = 1.0
MAX_LIVE = 1024  # requests of a call at the cluster at once; more would only wait there


class LLM:
    """A model, served by a cluster of its own that ends with this object, `close()`, or the process.

    `model` is the directory of a checkpoint; the other arguments are options of launch.py with underscores, such as
    `tp=2`, `dtype="bfloat16"`, `kv_memory="4GiB"`, `prefix_cache=False`. Raises ClusterError when it does not start.
    Threads may share an LLM.
    """

    def __init__(self, model: str | os.PathLike[str], **options: Any):
        self._own: ChildCluster | None = ChildCluster(model, options)
        self._set_up(self._own.address)

    @classmethod
    def connect(cls, run_dir: str | os.PathLike[str] | None = None) -> "LLM":
        """An LLM over a cluster that runs already, found as client.py finds it; `close()` leaves it running. Raises
        ClusterError when there is none."""
        llm = cls.__new__(cls)
        llm._own = None
        llm._set_up(frontend_of(run_dir))
        return llm

    def _set_up(self, address: str) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._closed = False
        self._owner = os.getpid()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the cluster, if it is our own, and wait until nothing of it is left: calls that run fail. After `connect`
        the cluster goes on, and calls that run as well. In a forked child nothing happens."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
        if self._own is not None:
            self._own.close()

    # ---- what users call ------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        **options: Unpack[Options],
    ) -> list[RequestOutput]:
        """The answers to prompts, texts or lists of token ids, in their order; `params` for all or one for each.

        Raises ValueError for wrong arguments before anything is sent, GenerationError when the cluster ends a prompt
        with an error (the others are aborted), ClusterError when the cluster goes away.
        """
        return self._run(make_requests("prompt", prompts_of(prompts), sampling_params, options), use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """The same for conversations, lists of {"role": ..., "content": ...}, through the model's chat template. What
        it thought comes apart from the text; with `skip_special_tokens=False` the text is all that it wrote. Calls of
        `tools` are text, as it wrote them."""
        return self._run(make_requests("messages", conversations_of(messages), sampling_params, options), use_tqdm)

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> Iterator[StreamOutput]:
        """The answer to a prompt or conversation as it is generated. Leaving the loop aborts it on the cluster."""
        request = make_request(prompt, sampling_params, options)
        return self._stream(request)

    def stats(self) -> dict[str, int]:
        """The cluster's counters and gauges by name."""
        with self._connection() as connection:
            return connection.stats()

    # ---- how ------------------------------------------------------------------------------------------------------

    def _run(self, requests: list[JsonRequest], use_tqdm: bool) -> list[RequestOutput]:
        with self._connection() as connection, _bar(len(requests), use_tqdm) as show:
            return run_all(connection, requests, show)

    def _stream(self, request: JsonRequest) -> Iterator[StreamOutput]:
        with self._connection() as connection:
            (progress,) = numbered([request], _info(connection, [request]))
            connection.submit(request.prompt, progress.request.params, **request.options)
            ended = False
            while not ended:
                for found in connection.poll(POLL_S):
                    row = progress.read(found)
                    ended = progress.take(row)
                    yield stream_output(row)

    @contextmanager
    def _connection(self) -> Iterator[Connection]:
        """A connection of the calling thread alone; kept for the next call if nothing is live on it."""
        check_process(self._owner)
        with self._lock:
            if self._closed:
                raise ClusterError("this LLM is closed")
            connection = self._idle.pop() if self._idle else None
        try:
            if connection is not None and _broken(connection):
                connection.close()
                connection = None
            if connection is None:
                connection = Connection(self._address)
            yield connection
        except (ConnectionLost, PeerStalled, FrameError, GenerationError) as error:
            if connection is not None:
                connection.abort_all()
                connection.close()
            if isinstance(error, GenerationError) and error.code != SHUTTING_DOWN:
                raise
            raise ClusterError(self._own.end if self._own and self._own.ends() else str(error)) from None
        except BaseException:
            if connection is not None:
                connection.abort_all()
                connection.close()
            raise
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        connection.close()


def _broken(connection: Connection) -> bool:
    """Whether an idle connection's other end has gone: the cluster restarts processes that die."""
    try:
        connection.poll(0.0)
    except ConnectionLost:
        return True
    return False


def _info(connection: Connection, requests: list[JsonRequest]) -> Info | None:
    """What the cluster serves, if one of the requests needs the model's format."""
    return connection.info() if any(map(needs_format, requests)) else None


def run_all(
    connection: Connection, requests: list[JsonRequest], show: Callable[[Progress], None]
) -> list[RequestOutput]:
    """Run requests, at most MAX_LIVE at once. Raises GenerationError for the first that fails."""
    waiting = iter(numbered(requests, _info(connection, requests)))
    live: dict[int, Progress] = {}
    outputs: dict[int, RequestOutput] = {}
    while len(outputs) < len(requests):
        while len(live) < MAX_LIVE and (following := next(waiting, None)) is not None:
            request = following.request
            live[connection.submit(request.prompt, request.params, stream=False, **request.options)] = following
        for row in connection.poll(POLL_S):
            progress = live[row.rid]
            if progress.take(progress.read(row)):
                outputs[progress.index] = progress.output
                del live[row.rid]
                show(progress)
    return [outputs[index] for index in range(len(requests))]


def frontend_of(run_dir: str | os.PathLike[str] | None) -> str:
    """The address of a running cluster. Raises ClusterError."""
    try:
        return frontend_in(find_cluster(None if run_dir is None else Path(run_dir)))
    except RunDirError as error:
        raise ClusterError(str(error)) from None


@contextmanager
def _bar(total: int, wanted: bool) -> Iterator[Callable[[Progress], None]]:
    """A progress bar with tokens per second, on stderr."""
    from tqdm import tqdm

    tokens = 0
    with tqdm(total=total, unit="req", disable=not wanted or total < 2) as bar:

        def show(progress: Progress) -> None:
            nonlocal tokens
            tokens += progress.tokens
            elapsed = bar.format_dict["elapsed"]
            if elapsed:
                bar.set_postfix_str(f"{tokens / elapsed:,.0f} tok/s", refresh=False)
            bar.update()

        yield show
