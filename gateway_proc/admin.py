"""What is served and how it is: models, health, versions and the server's settings. Nothing here waits for the model
but /health_generate, which asks it for one token."""

import asyncio
import dataclasses
from array import array
from typing import Any

from starlette.requests import Request

from common.connection import ConnectionLost
from common.messages import Info
from common.sampling_params import SamplingParams
from common.stream import RequestFailed
from gateway_proc.errors import ApiError
from gateway_proc.http import Json, while_connected
from gateway_proc.service import Service

GENERATE_S = 20.0


async def live(service: Service, request: Request) -> Json:
    """This process answers; it says nothing about the cluster."""
    return Json({"status": "live"})


async def ready(service: Service, request: Request) -> Json:
    """Whether requests can be served now; if not, why."""
    problem = await service.backend.check()
    if problem is not None:
        return Json({"status": "not ready", "reason": problem}, 503, {"retry-after": "1"})
    return Json({"status": "ready"})


async def health_generate(service: Service, request: Request) -> Json:
    """Generate one token. Raises ApiError(503) when it does not come in time."""
    connection, info = service.backend.use()
    prompt = [info.eos_token_ids[0] if info.eos_token_ids else 0]
    stream = connection.submit(prompt, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True), stream=False)

    async def one_token() -> None:
        async with asyncio.timeout(GENERATE_S):
            async for _ in stream:
                pass

    try:
        await while_connected(request.receive, one_token())
    except (TimeoutError, RequestFailed, ConnectionLost) as error:
        problem = str(error) or f"no token came within {GENERATE_S:g} s"
        raise ApiError(503, problem, code="not_ready", retry_after_s=1.0) from None
    finally:
        stream.abort()
    return Json({"status": "ready"})


async def load(service: Service, request: Request) -> Json:
    """vLLM's /load: HTTP requests that generate and have not ended."""
    return Json({"server_load": service.load})


async def loads(service: Service, request: Request) -> Json:
    """SGLang's /get_load: the same as the scheduler sees it, over every socket, and tokens in the KV cache that are in
    use."""
    _, info = service.backend.use()
    stats = await service.backend.stats()
    pages = stats["scheduler.total_pages"] - stats["scheduler.free_pages"] - stats["scheduler.evictable_pages"]
    waiting = stats["scheduler.waiting"]
    numbers = {"num_reqs": stats["scheduler.running"] + waiting, "num_waiting_reqs": waiting}
    return Json([{"dp_rank": 0, **numbers, "num_tokens": pages * info.page_size}])


async def models(service: Service, request: Request) -> Json:
    """OpenAI's list of models, with vLLM's `root` and `max_model_len`."""
    _, info = service.backend.use()
    return Json({"object": "list", "data": [_model(info, name) for name in info.names]})


async def model(service: Service, request: Request) -> Json:
    _, info = service.backend.use()
    name = request.path_params["model"]
    if name not in info.names:
        raise ApiError(404, f"the model {name[:200]!r} does not exist", param="model", code="model_not_found")
    return Json(_model(info, name))


def _model(info: Info, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": info.started_at,
        "owned_by": "rhizome",
        "root": info.model,
        "parent": None,
        "max_model_len": info.context_len,
    }


async def version(service: Service, request: Request) -> Json:
    _, info = service.backend.use()
    return Json({"version": info.version})


async def model_info(service: Service, request: Request) -> Json:
    """SGLang's /get_model_info."""
    _, info = service.backend.use()
    return Json(
        {
            "model_path": info.model,
            "tokenizer_path": info.model,
            "served_model_name": info.names[0],
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": "default",
            "max_model_len": info.context_len,
            "vocab_size": info.vocab_size,
            "architectures": [info.architecture],
            "has_image_understanding": False,
            "has_audio_understanding": False,
        }
    )


async def server_info(service: Service, request: Request) -> Json:
    """What is served, how it is set up, and its counters now."""
    _, info = service.backend.use()
    shown: dict[str, Any] = {
        name: list(value) if isinstance(value, array | tuple) else value
        for name in (f.name for f in dataclasses.fields(info))
        if name not in ("rid", "chat_template") and (value := getattr(info, name)) is not None
    }
    return Json(
        {
            **shown,
            "model_path": info.model,
            "tokenizer_path": info.model,
            "served_model_name": info.names[0],
            "tp_size": info.tp,
            "max_total_num_tokens": info.kv_tokens,
            "max_model_len": info.context_len,
            "default_sampling_params": service.defaults.given(),
            "stats": {k: v for k, v in (await service.backend.stats()).items() if "/" not in k},
        }
    )
