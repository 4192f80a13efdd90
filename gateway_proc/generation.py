"""Running what an HTTP request asks for on the cluster: one stream per prompt, and all of them ended with it."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from common.async_connection import AsyncConnection
from common.codec import FrameError
from common.fields import FieldError
from common.logprobs import TokenLogprobs
from common.messages import ChatMessage, Finish
from common.rows import Row
from common.sampling_params import SamplingParams
from common.sockets import PeerStalled
from common.story import Story
from common.stream import Stream, UnreadRows
from gateway_proc.errors import ApiError, told_by_cluster

MAX_AHEAD = 64  # groups of rows that may wait for a slow reader of several prompts
Prompt = str | list[int] | list[ChatMessage]


@dataclass(frozen=True, slots=True)
class Job:
    """What is asked of the cluster for each prompt. `options` are further arguments of `submit`, `names` the client's
    names for the cluster's fields. With `prompt_only` no more than the prompt is wanted, but a token must be drawn: the
    answer is dropped as soon as it comes."""

    prompts: Sequence[Prompt]
    params: SamplingParams
    n: int
    stream: bool
    options: Mapping[str, Any]
    names: Mapping[str, str]
    prompt_only: bool = False


@dataclass(slots=True)
class Choice:
    """One answer, put together from its rows."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish: Finish = Finish.NONE
    stop_reason: int | str | None = None

    def add(self, row: Row) -> None:
        self.texts.append(row.text)
        self.token_ids.extend(row.token_ids)
        self.logprobs.extend(row.logprobs or ())
        self.prompt_logprobs = row.prompt_logprobs or self.prompt_logprobs
        self.finish = row.finish
        self.stop_reason = row.stop_reason

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass(slots=True)
class Usage:
    """Tokens of one HTTP request, counted as the rows come. A prompt counts once, however many choices it has."""

    prompts: dict[int, int] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    completion_tokens: int = 0
    reasoning_tokens: int | None = None

    def add(self, prompt: int, row: Row) -> None:
        self.prompts[prompt] = row.prompt_tokens
        if row.choice == 0 or prompt not in self.cached:  # the first choice computes what the others share
            self.cached[prompt] = row.cached_tokens
        self.completion_tokens += len(row.token_ids)

    @property
    def prompt_tokens(self) -> int:
        return sum(self.prompts.values())

    @property
    def cached_tokens(self) -> int:
        return sum(self.cached.values())

    def as_dict(self) -> dict[str, Any]:
        """OpenAI's `usage`."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.reasoning_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return usage


class Generation:
    """The streams of one HTTP request. Whatever ends it, no request is left running: use it in `with`."""

    def __init__(self, connection: AsyncConnection, job: Job, story: Story):
        self._connection = connection
        self._job = job
        self._story = story
        self._streams: list[Stream] = []
        self._pumps: list[asyncio.Task[None]] = []
        self.usage = Usage()

    def __enter__(self) -> "Generation":
        """Send the requests. Raises ApiError."""
        job = self._job
        try:
            with told_by_cluster(job.names):
                for prompt in job.prompts:
                    self._streams.append(
                        self._connection.submit(prompt, job.params, stream=job.stream, n=job.n, **job.options)
                    )
        except (FrameError, FieldError) as error:
            self._abort()
            raise ApiError(413, f"the request is too large: {error}", code="too_large") from None
        except PeerStalled as error:
            self._abort()
            raise ApiError(503, str(error), code="overloaded", retry_after_s=1.0) from None
        return self

    def __exit__(self, *_: object) -> None:
        for pump in self._pumps:
            pump.cancel()
        self._abort()
        self._story.prompt_tokens = self.usage.prompt_tokens
        self._story.cached_tokens = self.usage.cached_tokens

    def _abort(self) -> None:
        for stream in self._streams:
            stream.abort()

    async def rows(self) -> AsyncIterator[Iterator[tuple[int, Row]]]:
        """The rows of all prompts as they come, each with the number of its prompt; one iterator for all that came at
        once, which counts them as they are taken. Raises ApiError when one of the requests ends with an error."""
        if len(self._streams) == 1:
            while rows := await self._take(0):
                yield self._counted(0, rows)
            return
        arrived: asyncio.Queue[tuple[int, list[Row] | ApiError]] = asyncio.Queue(MAX_AHEAD)
        self._pumps = [asyncio.create_task(self._pump(i, arrived)) for i in range(len(self._streams))]
        running = len(self._streams)
        while running:
            prompt, found = await arrived.get()
            if isinstance(found, ApiError):
                raise found
            if found:
                yield self._counted(prompt, found)
            else:
                running -= 1

    async def _pump(self, prompt: int, arrived: "asyncio.Queue[tuple[int, list[Row] | ApiError]]") -> None:
        """Pass on the rows of one prompt of several; an empty list is its end."""
        try:
            while rows := await self._take(prompt):
                await arrived.put((prompt, rows))
            await arrived.put((prompt, []))
        except ApiError as error:
            await arrived.put((prompt, error))

    async def _take(self, prompt: int) -> list[Row]:
        try:
            with told_by_cluster(self._job.names):
                return await self._streams[prompt].take()
        except UnreadRows as error:
            raise ApiError(429, str(error), code="slow_reader") from None

    def _counted(self, prompt: int, rows: list[Row]) -> Iterator[tuple[int, Row]]:
        for row in rows:
            if self._job.prompt_only:
                row = _without_answer(row)
            self.usage.add(prompt, row)
            self._story.row(prompt, row)
            yield prompt, row

    async def collect(self) -> list[list[Choice]]:
        """All answers, by prompt and choice."""
        answers = [[Choice() for _ in range(self._job.n)] for _ in self._job.prompts]
        async for rows in self.rows():
            for prompt, row in rows:
                answers[prompt][row.choice].add(row)
        return answers


def _without_answer(row: Row) -> Row:
    finish = Finish.LENGTH if row.finish is Finish.STOP else row.finish
    logprobs = None if row.logprobs is None else ()
    return replace(row, text="", token_ids=(), logprobs=logprobs, finish=finish, stop_reason=None)


def finish_reason(finish: Finish) -> str | None:
    """OpenAI's word; "abort" is vLLM's and SGLang's for an answer that was cut off."""
    return {Finish.NONE: None, Finish.STOP: "stop", Finish.LENGTH: "length"}.get(finish, "abort")
