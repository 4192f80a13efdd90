"""/tokenize and /detokenize, as vLLM has them."""

from typing import Any

from starlette.requests import Request

from gateway_proc.conversation import template_options, wire_message
from gateway_proc.errors import refused, told_by_cluster, unsupported
from gateway_proc.http import Json, while_connected
from gateway_proc.requests import check_model
from gateway_proc.schemas.native import DetokenizeRequest, TokenizeRequest
from gateway_proc.service import Service

NAMES = {"text": "prompt", "chat": "messages", "token_ids": "tokens", "template_args": "chat_template_kwargs"}


async def tokenize(service: Service, request: Request) -> Json:
    body = await service.reader.read(request, TokenizeRequest)
    connection, info = service.backend.use()
    check_model(body.model, info)
    if (body.prompt is None) == (body.messages is None):
        raise refused("prompt", "exactly one of prompt and messages must be given")
    prompt: Any = body.prompt
    if body.messages is not None:
        if body.add_special_tokens:
            raise unsupported(
                "add_special_tokens", "is not supported with messages: the chat template adds what it wants"
            )
        prompt = [wire_message(message, i) for i, message in enumerate(body.messages)]
        options = template_options(body, dict(body.chat_template_kwargs or {}), shown=True)
    else:
        for name in ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"):
            if getattr(body, name) is not None:
                raise refused(name, "is only allowed with messages")
        options = {}
    question = connection.tokenize(
        prompt,
        add_special_tokens=body.add_special_tokens is not False,
        with_pieces=bool(body.return_token_strs),
        **options,
    )
    with told_by_cluster(NAMES):
        tokens = await while_connected(request.receive, question)
    ids = list(tokens.token_ids)
    strings = list(tokens.pieces) if body.return_token_strs else None
    return Json({"count": len(ids), "max_model_len": info.context_len, "tokens": ids, "token_strs": strings})


async def detokenize(service: Service, request: Request) -> Json:
    body = await service.reader.read(request, DetokenizeRequest)
    connection, info = service.backend.use()
    check_model(body.model, info)
    question = connection.detokenize(body.tokens, skip_special_tokens=bool(body.skip_special_tokens))
    with told_by_cluster(NAMES):
        text = await while_connected(request.receive, question)
    return Json({"prompt": text, "text": text})
