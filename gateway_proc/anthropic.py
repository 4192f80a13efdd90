"""/v1/messages and /v1/messages/count_tokens: Anthropic's Messages API, as chats."""

from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request

from common.rows import Row
from gateway_proc.anthropic_answer import Answer
from gateway_proc.chat_reader import ChoiceReader
from gateway_proc.generation import Generation
from gateway_proc.http import EventStream, Json, named_event, while_connected
from gateway_proc.requests import check_model
from gateway_proc.schemas.anthropic import CountTokensRequest, MessagesRequest
from gateway_proc.service import Service

NAMES = {
    "text": "messages", "chat": "messages", "grammar": "output_config.format", "stop": "stop_sequences",
    "template_args.enable_thinking": "thinking.type", "template_args.thinking": "thinking.type",
    "template_args.reasoning_effort": "output_config.effort",
}  # fmt: skip


async def create(service: Service, request: Request) -> Any:
    """Serve one request. Raises ApiError, and ClientGone as soon as the client leaves."""
    body = await service.reader.read(request, MessagesRequest)
    _, info = service.backend.use()
    chat, unused = body.as_chat(info.chat_template)
    service.reader.ignore(request, unused)
    connection, info, story = service.begin(request, chat)
    conversation = await service.conversation(connection, info, chat, "output_config.effort")
    names = NAMES | ({"grammar": "tools"} if conversation.grammar_field == "tools" else {})
    params = service.chat_params(chat, conversation, body.max_tokens, names)
    generation = service.answers(connection, story, chat, conversation, params, names)
    answer = Answer(f"msg_{story.id}", body.model or info.names[0])
    reader = ChoiceReader(conversation)
    if body.stream:
        return EventStream(_stream(answer, generation, reader), story, end=b"")
    return await while_connected(request.receive, _whole(answer, generation, reader))


async def count_tokens(service: Service, request: Request) -> Json:
    """How many tokens the prompt of such a request has."""
    body = await service.reader.read(request, CountTokensRequest)
    connection, info = service.backend.use()
    check_model(body.model, info)
    chat, unused = body.as_chat(info.chat_template)
    service.reader.ignore(request, unused)
    conversation = await service.conversation(connection, info, chat, "output_config.effort")
    return Json({"input_tokens": len(await service.prompt_ids(request, connection, conversation, NAMES))})


async def _whole(answer: Answer, generation: Generation, reader: ChoiceReader) -> Json:
    last: Row | None = None
    with generation:
        async for rows in generation.rows():
            for _, last in rows:
                for piece in reader.feed(last):
                    answer.take(piece.delta)
    answer.end(reader, last)
    return Json(answer.message(generation.usage))


async def _stream(answer: Answer, generation: Generation, reader: ChoiceReader) -> AsyncIterator[bytes]:
    last: Row | None = None
    with generation:
        async for rows in generation.rows():
            events = []
            begins = last is None  # not earlier: a request that is refused gets an error response
            for _, row in rows:
                if begins:
                    events += answer.begin(generation.usage)
                    begins = False
                last = row
                for piece in reader.feed(row):
                    events += answer.take(piece.delta)
            if events:
                yield b"".join(map(named_event, events))
    yield b"".join(map(named_event, [*answer.end(reader, last), *answer.closing(generation.usage)]))
