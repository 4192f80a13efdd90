"""`Connection`'s interface over HTTP: requests to any server that speaks OpenAI's API, streamed as rows."""

import asyncio
import json
import time
from collections.abc import Sequence
from itertools import count
from typing import Any, TypeAlias

import aiohttp

from client_cli.errors import ClientError
from client_cli.http_loop import HttpLoop, Server, failure_text
from client_cli.http_models import find_model
from client_cli.openai_body import Piece, Usage, error_of, json_or_text, pieces, to_body, usage_of
from client_cli.sse import SseParser
from common.connection import Row
from common.messages import ChatMessage, ErrorCode, Finish, RequestError
from common.sampling_params import SamplingParams

Rows: TypeAlias = "list[Row | RequestError]"


class HttpLink:
    """One thread submits and polls. A request that fails, also because its connection broke, ends with RequestError.

    `model` None takes the first one that the server lists. Raises as find_model does, which is asked for that, and to
    wait for the server.
    """

    def __init__(self, server: Server, model: str | None = None, wait_s: float = 0.0):
        self._http: HttpLoop[Row | RequestError] = HttpLoop(server)
        self._numbers = count()
        self._live: dict[int, asyncio.Task[Rows]] = {}
        try:
            self.model = model if model is not None and not wait_s else find_model(self._http, model, wait_s)
        except BaseException:
            self._http.close()
            raise

    @property
    def live(self) -> int:
        return len(self._live)

    def submit(
        self,
        prompt: str | Sequence[int] | Sequence[ChatMessage],
        params: SamplingParams,
        *,
        stream: bool = True,
        n: int = 1,
        cache_salt: str = "",
        priority: int = 0,
        deadline_ms: int = 0,
        tools: str = "",
        template_args: str = "",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        truncate_prompt_tokens: int | None = None,
        truncation_side: str = "",
    ) -> int:
        if tools:
            raise ClientError("tools: do not work over HTTP, where servers take the calls out of the answer")
        rid = next(self._numbers)
        stream = stream and params.prompt_logprobs is None  # servers refuse both together
        path, body = to_body(
            prompt, params, self.model, stream=stream, n=n, cache_salt=cache_salt, priority=priority,
            deadline_ms=deadline_ms, template_args=template_args, add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message, truncate_prompt_tokens=truncate_prompt_tokens,
            truncation_side=truncation_side,
        )  # fmt: skip
        answer = _Answer(rid, n, params.logprobs, params.prompt_logprobs)
        task = self._live[rid] = self._http.start(self._run(answer, path, body))
        task.add_done_callback(lambda ended: self._end(answer, ended))
        return rid

    def abort(self, rid: int) -> None:
        """Cut the connection of a request, which aborts it on the server."""
        if (task := self._live.get(rid)) is not None:
            task.cancel()

    def abort_all(self) -> None:
        for task in self._live.values():
            task.cancel()

    def poll(self, timeout_s: float) -> Rows:
        return self._http.poll(timeout_s)

    def close(self) -> None:
        self._http.close()

    def _end(self, answer: "_Answer", task: "asyncio.Task[Rows]") -> None:
        del self._live[answer.rid]
        for row in answer.aborted() if task.cancelled() else task.result():
            self._http.arrive(row)

    async def _run(self, answer: "_Answer", path: str, body: dict[str, Any]) -> Rows:
        """The last rows of a request; those before them have been handed over."""
        try:
            async with self._http.post(path, body) as response:
                if response.status != 200:
                    return [error_of(answer.rid, response.status, json_or_text(await response.text(errors="replace")))]
                if response.content_type == "text/event-stream":
                    return await self._stream(answer, response)
                values = json.loads(await response.read())
                return [*answer.take(values, time.monotonic_ns()), *answer.end()]
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            problem = failure_text(error)
        except Exception as error:  # whatever a server says, the request must end
            problem = f"the server's answer cannot be read: {error}"
        return [RequestError(answer.rid, ErrorCode.INTERNAL, problem[:4096])]

    async def _stream(self, answer: "_Answer", response: aiohttp.ClientResponse) -> Rows:
        parser = SseParser()
        async for chunk in response.content.iter_any():
            now = time.monotonic_ns()
            for event in parser.feed(chunk):
                if event == b"[DONE]":
                    return answer.end()
                values = json.loads(event)
                if "error" in values:
                    return [error_of(answer.rid, 200, values)]
                for row in answer.take(values, now):
                    self._http.arrive(row)
        return answer.end()


class _Answer:
    """One request's way from chunks to rows. The last rows wait for the token counts, which come at the very end."""

    def __init__(self, rid: int, n: int, top: int | None, prompt_top: int | None):
        self.rid = rid
        self._top = top
        self._prompt_top = prompt_top
        self._open = set(range(n))
        self._ended: list[tuple[Piece, int]] = []
        self._usage: Usage | None = None

    def take(self, values: dict[str, Any], now: int) -> Rows:
        self._usage = usage_of(values) or self._usage
        rows: Rows = []
        for piece in pieces(values, self._top, self._prompt_top):
            if piece.choice not in self._open:
                continue
            if piece.finish is not Finish.NONE:
                self._open.remove(piece.choice)
                self._ended.append((piece, now))
            elif piece.generated:
                rows.append(self._row(piece, Finish.NONE, now))
        return rows

    def end(self) -> Rows:
        """The last rows; what has not said that it ended was cut off."""
        if self._open:
            return [RequestError(self.rid, ErrorCode.INTERNAL, "the stream ended before the answer did")]
        return [self._row(piece, piece.finish, now) for piece, now in self._ended]

    def aborted(self) -> Rows:
        now = time.monotonic_ns()
        cut = [Piece(choice, "", "", (), Finish.ABORT, False) for choice in sorted(self._open)]
        whole = [self._row(piece, piece.finish, at) for piece, at in self._ended]
        return [*whole, *(self._row(piece, Finish.ABORT, now) for piece in cut)]

    def _row(self, piece: Piece, finish: Finish, now: int) -> Row:
        usage = self._usage or Usage(0, None, 0)
        return Row(
            self.rid, piece.choice, piece.text, piece.token_ids, finish, usage.prompt_tokens, usage.cached_tokens, (),
            now, piece.logprobs, piece.prompt_logprobs, tokens_so_far=usage.completion_tokens,
            reasoning=piece.thought,
        )  # fmt: skip
