"""/v1/responses: OpenAI's Responses API as far as it needs no state and no tools."""

import time
from collections.abc import AsyncIterator
from typing import Any

from pydantic_core import to_json
from starlette.requests import Request

from common.messages import Finish
from common.rows import Row
from gateway_proc.chat_reader import ChoiceReader
from gateway_proc.errors import ApiError, refused
from gateway_proc.generation import Generation, Usage
from gateway_proc.http import EventStream, Json, while_connected
from gateway_proc.schemas.chat import ChatRequest
from gateway_proc.schemas.responses import ResponsesRequest
from gateway_proc.service import Service


async def create(service: Service, request: Request) -> Any:
    """Serve one request. Raises ApiError, and ClientGone as soon as the client leaves."""
    body = await service.reader.read(request, ResponsesRequest)
    chat = _as_chat(body)
    connection, info, story = service.begin(request, chat)
    conversation = await service.conversation(connection, info, chat, "reasoning.effort")
    names = {
        "text": "input", "chat": "input", "grammar": "text.format", "max_tokens": "max_output_tokens",
        "template_args.reasoning_effort": "reasoning.effort",
    }  # fmt: skip
    params = service.chat_params(chat, conversation, body.max_output_tokens, names)
    generation = service.answers(connection, story, chat, conversation, params, names)
    answer = _Answer(body, story.id, body.model or info.names[0], params.temperature, params.top_p)
    reader = ChoiceReader(conversation)
    if body.stream:
        events = _Events()
        return EventStream(
            _stream(answer, generation, reader, events),
            story,
            failure=lambda error: events("response.failed", response=answer.failed(error)),
        )
    return await while_connected(request.receive, _whole(answer, generation, reader))


def _as_chat(body: ResponsesRequest) -> ChatRequest:
    form = body.text.format if body.text else None
    if form is not None and form.type == "json_schema" and form.schema_ is None:
        raise refused("text.format.schema", "is required when type is json_schema")
    return body.as_chat()


_FAILURES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


class _Answer:
    """The response object in each of its states. `temperature` and `top_p` are those in use."""

    def __init__(self, body: ResponsesRequest, request_id: str, model: str, temperature: float, top_p: float):
        form = body.text.format if body.text else None
        self.message_id = f"msg_{request_id}"
        self._fixed: dict[str, Any] = {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": False,
            "temperature": temperature,
            "text": {"format": form.model_dump(by_alias=True, exclude_unset=True) if form else {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": top_p,
            "truncation": body.truncation or "disabled",
            "user": body.user,
        }

    def begun(self) -> dict[str, Any]:
        return self._state("in_progress", [], None, None)

    def ended(self, text: str, finish: Finish, usage: Usage) -> dict[str, Any]:
        """Raises ApiError when the cluster cut the answer off."""
        if finish not in (Finish.STOP, Finish.LENGTH):
            raise ApiError(503, "the answer was cut off", code="shutting_down")
        whole = finish is Finish.STOP
        details = None if whole else {"reason": "max_output_tokens"}
        status = "completed" if whole else "incomplete"
        return self._state(status, [self.message(status, [text_part(text)])], details, _usage(usage))

    def failed(self, error: ApiError) -> dict[str, Any]:
        """OpenAI has a few codes, for all that can go wrong in the middle of an answer; `type` and `param` say more."""
        code = _FAILURES.get(error.status, "server_error")
        told = {"code": code, "message": error.message, "param": error.param, "type": error.type}
        return self._state("failed", [], None, None) | {"error": told}

    def message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.message_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _state(self, status: str, output: list[Any], details: Any, usage: Any) -> dict[str, Any]:
        changing = {"status": status, "output": output, "incomplete_details": details, "usage": usage, "error": None}
        return {**self._fixed, **changing}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _text(reader: ChoiceReader, row: Row, usage: Usage) -> str:
    """What a row adds to the text that is shown; reasoning is counted and not shown."""
    text = "".join(piece.delta.get("content", "") for piece in reader.feed(row))
    if usage.reasoning_tokens is not None:
        usage.reasoning_tokens += reader.take_reasoning_tokens()
    return text


async def _whole(answer: _Answer, generation: Generation, reader: ChoiceReader) -> Json:
    text, finish = [], Finish.NONE
    with generation:
        async for rows in generation.rows():
            for _, row in rows:
                text.append(_text(reader, row, generation.usage))
                finish = row.finish
    return Json(answer.ended("".join(text), finish, generation.usage))


async def _stream(
    answer: _Answer, generation: Generation, reader: ChoiceReader, events: "_Events"
) -> AsyncIterator[bytes]:
    place = {"item_id": answer.message_id, "output_index": 0, "content_index": 0}
    texts: list[str] = []
    finish = Finish.NONE
    with generation:
        async for rows in generation.rows():
            found = b""
            if not events.count:  # not earlier: a request that is refused gets an error response
                found += events("response.created", response=answer.begun())
                found += events("response.in_progress", response=answer.begun())
                found += events("response.output_item.added", output_index=0, item=answer.message("in_progress", []))
                found += events("response.content_part.added", **place, part=text_part(""))
            for _, row in rows:
                finish = row.finish
                if text := _text(reader, row, generation.usage):
                    texts.append(text)
                    found += events("response.output_text.delta", **place, delta=text, logprobs=[])
            if found:
                yield found
    text = "".join(texts)
    response = answer.ended(text, finish, generation.usage)
    yield b"".join(
        [
            events("response.output_text.done", **place, text=text, logprobs=[]),
            events("response.content_part.done", **place, part=text_part(text)),
            events("response.output_item.done", output_index=0, item=response["output"][0]),
            events(f"response.{response['status']}", response=response),
        ]
    )


class _Events:
    """Typed and numbered server-sent events."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, kind: str, **fields: Any) -> bytes:
        data = to_json({"type": kind, "sequence_number": self.count, **fields})
        self.count += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)
