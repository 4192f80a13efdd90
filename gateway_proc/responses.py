"""/v1/responses: OpenAI's Responses API as far as it needs no state, as chats."""

from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request

from common.messages import Finish
from common.rows import Row
from gateway_proc.chat_reader import ChoiceReader
from gateway_proc.generation import Generation, Usage
from gateway_proc.http import EventStream, Json, named_event, while_connected
from gateway_proc.responses_answer import Answer, Event
from gateway_proc.schemas.responses import ResponsesRequest
from gateway_proc.service import Service

NAMES = {
    "text": "input", "chat": "input", "grammar": "text.format", "max_tokens": "max_output_tokens",
    "template_args.reasoning_effort": "reasoning.effort",
}  # fmt: skip


async def create(service: Service, request: Request) -> Any:
    """Serve one request. Raises ApiError, and ClientGone as soon as the client leaves."""
    body = await service.reader.read(request, ResponsesRequest)
    chat, unused = body.as_chat()
    service.reader.ignore(request, unused)
    connection, info, story = service.begin(request, chat)
    conversation = await service.conversation(connection, info, chat, "reasoning.effort")
    names = NAMES | ({"grammar": "tools"} if conversation.grammar_field == "tools" else {})
    params = service.chat_params(chat, conversation, body.max_output_tokens, names)
    generation = service.answers(connection, story, chat, conversation, params, names)
    answer = Answer(body, story.id, body.model or info.names[0], params.temperature, params.top_p)
    reader = ChoiceReader(conversation)
    if body.stream:
        events = _Events()
        return EventStream(
            _stream(answer, generation, reader, events),
            story,
            failure=lambda error: events([answer.failed(error)]),
        )
    return await while_connected(request.receive, _whole(answer, generation, reader))


def _take(answer: Answer, reader: ChoiceReader, row: Row, usage: Usage) -> list[Event]:
    """What a row adds."""
    events = [event for piece in reader.feed(row) for event in answer.take(piece.delta)]
    if usage.reasoning_tokens is not None:
        usage.reasoning_tokens += reader.take_reasoning_tokens()
    return events


async def _whole(answer: Answer, generation: Generation, reader: ChoiceReader) -> Json:
    finish = Finish.NONE
    with generation:
        async for rows in generation.rows():
            for _, row in rows:
                _take(answer, reader, row, generation.usage)
                finish = row.finish
    return Json(answer.end(finish, generation.usage)[-1]["response"])


async def _stream(
    answer: Answer, generation: Generation, reader: ChoiceReader, write: "_Events"
) -> AsyncIterator[bytes]:
    finish = Finish.NONE
    with generation:
        async for rows in generation.rows():
            events = [] if write.count else answer.begin()  # not earlier: what is refused gets an error response
            for _, row in rows:
                finish = row.finish
                events += _take(answer, reader, row, generation.usage)
            if events:
                yield write(events)
    yield write(answer.end(finish, generation.usage))


class _Events:
    """Numbers events, and writes them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, events: list[Event]) -> bytes:
        first = self.count
        self.count += len(events)
        return b"".join(named_event({**event, "sequence_number": first + i}) for i, event in enumerate(events))
