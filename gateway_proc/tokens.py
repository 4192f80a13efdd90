"""/tokenize and /detokenize, as vLLM has them."""

from typing import Any

from starlette.requests import Request

from common.async_connection import RequestFailed
from common.connection import ConnectionLost
from gateway_proc.conversation import template_options, wire_message
from gateway_proc.errors import ApiError, of_cluster, refused
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
    try:
        tokens = await while_connected(request.receive, question)
    except RequestFailed as failure:
        raise of_cluster(failure.error, NAMES) from None
    except ConnectionLost as error:
        raise ApiError(503, str(error), code="not_ready", retry_after_s=1.0) from None
    ids = list(tokens.token_ids)
    strings = list(tokens.pieces) if body.return_token_strs else None
    return Json({"count": len(ids), "max_model_len": info.context_len, "tokens": ids, "token_strs": strings})


async def detokenize(service: Service, request: Request) -> Json:
    body = await service.reader.read(request, DetokenizeRequest)
    connection, info = service.backend.use()
    check_model(body.model, info)
    question = connection.detokenize(body.tokens, skip_special_tokens=bool(body.skip_special_tokens))
    try:
        text = await while_connected(request.receive, question)
    except RequestFailed as failure:
        raise of_cluster(failure.error, NAMES) from None
    except ConnectionLost as error:
        raise ApiError(503, str(error), code="not_ready", retry_after_s=1.0) from None
    return Json({"prompt": text, "text": text})
