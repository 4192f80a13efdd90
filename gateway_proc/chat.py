"""/v1/chat/completions."""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from common.messages import Finish
from common.openai_logprobs import chat_logprobs, prompt_logprobs
from common.rows import Row
from gateway_proc.chat_reader import ChoiceReader, Piece
from gateway_proc.conversation import Conversation
from gateway_proc.errors import refused, unsupported
from gateway_proc.generation import Generation
from gateway_proc.http import EventStream, Json, event, while_connected
from gateway_proc.schemas.chat import ChatRequest
from gateway_proc.service import Service


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked request."""

    body: ChatRequest
    head: dict[str, Any]  # what every answer and chunk begins with
    conversation: Conversation
    prompt_token_ids: list[int] | None = None  # where they are wanted

    def reader(self) -> ChoiceReader:
        return ChoiceReader(self.conversation, with_tokens=bool(self.body.logprobs or self.body.return_token_ids))

    def logprobs(self, entries: Any) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        return chat_logprobs(entries or (), self.body.top_logprobs or 0, bool(self.body.return_tokens_as_token_ids))


async def create(service: Service, request: Request) -> Any:
    """Serve one request. Raises ApiError, and ClientGone as soon as the client leaves."""
    body = await service.reader.read(request, ChatRequest)
    connection, info, story = service.begin(request, body)
    if body.top_logprobs and not body.logprobs:
        raise refused("top_logprobs", "is only allowed with logprobs")
    if body.prompt_logprobs is not None and body.stream:
        raise refused("prompt_logprobs", "cannot be used with stream")
    conversation = await service.conversation(connection, info, body)
    for name in ("include_stop_str_in_output", "no_stop_trim"):
        if getattr(body, name) and conversation.needs_special_tokens:  # the mark at the end would be taken for text
            raise unsupported(name, "does not go with the marks that this model writes")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    names = {
        "text": "messages",
        "chat": "messages",
        "template_args": "chat_template_kwargs",
        **({"template_args.reasoning_effort": "reasoning_effort"} if body.reasoning_effort else {}),
        "grammar": conversation.grammar_field,
        "max_tokens": "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
    }
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = service.chat_params(
        body, conversation, max_tokens, names, logprobs=logprobs, prompt_logprobs=body.prompt_logprobs
    )
    head = {
        "id": f"chatcmpl-{story.id}",
        "object": "chat.completion.chunk" if body.stream else "chat.completion",
        "created": int(time.time()),
        "model": body.model or info.names[0],
    }
    generation = service.answers(connection, story, body, conversation, params, names)
    ids = None
    if body.return_token_ids:
        ids = await service.prompt_ids(request, connection, conversation, names, body.truncation())
    plan = Plan(body, head, conversation, ids)
    if body.stream:
        return EventStream(_stream(plan, generation), story)
    return await while_connected(request.receive, _answer(plan, generation))


async def _answer(plan: Plan, generation: Generation) -> Json:
    readers = [plan.reader() for _ in range(plan.body.n or 1)]
    rows: list[list[Row]] = [[] for _ in readers]
    with generation:
        async for found in generation.rows():
            for _, row in found:
                reader = readers[row.choice]
                reader.collect(row)
                _count(generation, reader)
                rows[row.choice].append(row)
    choices = [_choice(plan, i, reader, rows[i]) for i, reader in enumerate(readers)]
    answer = {**plan.head, "choices": choices, "usage": generation.usage.as_dict()}
    if plan.body.prompt_logprobs is not None:
        first = next((row.prompt_logprobs for row in rows[0] if row.prompt_logprobs), ())
        answer["prompt_logprobs"] = prompt_logprobs(first, plan.body.prompt_logprobs)
    if plan.prompt_token_ids is not None:
        answer["prompt_token_ids"] = plan.prompt_token_ids
    return Json(answer)


def _choice(plan: Plan, index: int, reader: ChoiceReader, rows: list[Row]) -> dict[str, Any]:
    last, shown = rows[-1], reader.take_shown()
    choice = {
        "index": index,
        "message": reader.message(),
        "logprobs": plan.logprobs([entry for row in shown for entry in row.logprobs or ()]),
        "finish_reason": reader.finish_reason(last.finish),
        "stop_reason": last.stop_reason,
    }
    if plan.body.return_token_ids:
        choice["token_ids"] = [token for row in shown for token in row.token_ids]
    return choice


def _count(generation: Generation, reader: ChoiceReader) -> None:
    if generation.usage.reasoning_tokens is not None:
        generation.usage.reasoning_tokens += reader.take_reasoning_tokens()


async def _stream(plan: Plan, generation: Generation) -> AsyncIterator[bytes]:
    options = plan.body.stream_options
    with_usage = bool(options and options.include_usage)
    writer = _Writer(plan, generation, with_usage, bool(options and options.continuous_usage_stats))
    with generation:
        async for rows in generation.rows():
            events = [chunk for _, row in rows for chunk in writer.take(row)]
            if events:
                yield b"".join(events)
        if with_usage:
            yield event({**plan.head, "choices": [], "usage": generation.usage.as_dict()})


class _Writer:
    """The chunks of one request."""

    def __init__(self, plan: Plan, generation: Generation, with_usage: bool, continuous: bool):
        self._plan = plan
        self._generation = generation
        self._with_usage = with_usage or continuous
        self._continuous = continuous
        self._readers: dict[int, ChoiceReader] = {}

    def take(self, row: Row) -> list[bytes]:
        """The chunks for a row. A choice begins with its role, alone, and ends with its finish reason, alone."""
        chunks = []
        reader = self._readers.get(row.choice)
        if reader is None:
            reader = self._readers[row.choice] = self._plan.reader()
            content = None if self._plan.conversation.forced else ""  # some clients begin a text where one comes
            chunks.append(self._chunk(row.choice, {"role": "assistant", "content": content}, begins=True))
        pieces = reader.feed(row)
        _count(self._generation, reader)
        shown = reader.take_shown()
        entries = [entry for each in shown for entry in each.logprobs or ()]
        logprobs = self._plan.logprobs(entries) if entries else None
        token_ids = [t for each in shown for t in each.token_ids] if self._plan.body.return_token_ids else None
        if not pieces and (logprobs or token_ids or self._continuous):
            pieces = [Piece({"content": ""})]
        for piece in pieces:
            chunks.append(self._chunk(row.choice, piece.delta, logprobs, token_ids=token_ids))
            logprobs = token_ids = None  # they go with the first chunk of their row
        if row.finish is not Finish.NONE:
            reason = reader.finish_reason(row.finish)
            chunks.append(self._chunk(row.choice, {}, finish_reason=reason, stop_reason=row.stop_reason))
        return chunks

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        *,
        token_ids: list[int] | None = None,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
        begins: bool = False,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        if stop_reason is not None:
            choice["stop_reason"] = stop_reason
        if token_ids is not None:
            choice["token_ids"] = token_ids
        chunk = {**self._plan.head, "choices": [choice]}
        if begins and self._plan.prompt_token_ids is not None:
            chunk["prompt_token_ids"] = self._plan.prompt_token_ids
        if self._with_usage:
            chunk["usage"] = self._generation.usage.as_dict() if self._continuous else None
        return event(chunk)
