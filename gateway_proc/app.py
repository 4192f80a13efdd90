"""The application: its routes, what is around them, and its OpenAPI description."""

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from common.config import HttpConfig
from common.story import Story
from common.tracing import Traces
from gateway_proc import admin, anthropic, chat, completions, native, responses, tokens
from gateway_proc.auth import Keys
from gateway_proc.errors import ApiError, our_mistake
from gateway_proc.http import error_response, story_of
from gateway_proc.metrics import Metrics, Scrape
from gateway_proc.middleware import Answered, Authorized, Lingering, Observed
from gateway_proc.schemas.anthropic import CountTokensRequest, MessagesRequest
from gateway_proc.schemas.base import ApiModel
from gateway_proc.schemas.chat import ChatRequest
from gateway_proc.schemas.completions import CompletionRequest
from gateway_proc.schemas.native import DetokenizeRequest, NativeRequest, TokenizeRequest
from gateway_proc.schemas.responses import ResponsesRequest
from gateway_proc.service import Service

Handler = Callable[[Service, Request], Awaitable[Any]]
STREAMED = ("application/json", "text/event-stream")
CONTENT_TYPE_LATEST = "text/plain; version=0.0.4; charset=utf-8"
REF = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True)
class Route:
    """An endpoint; one with a `body` is a POST. `answers` are the media types of what it answers with. With `post` it
    takes a POST, too, whatever that holds."""

    path: str
    handler: Handler
    summary: str
    body: type[ApiModel] | None = None
    answers: tuple[str, ...] = ("application/json",)
    post: bool = False


ROUTES = (
    Route("/v1/chat/completions", chat.create, "Answer a conversation", ChatRequest, STREAMED),
    Route("/v1/completions", completions.create, "Continue prompts", CompletionRequest, STREAMED),
    Route("/v1/responses", responses.create, "Answer with text, as OpenAI's Responses API", ResponsesRequest, STREAMED),
    Route("/v1/messages", anthropic.create, "Answer a conversation, as Anthropic's API", MessagesRequest, STREAMED),
    Route("/v1/messages/count_tokens", anthropic.count_tokens, "How many tokens a prompt has", CountTokensRequest),
    Route("/v1/models", admin.models, "The models that are served"),
    Route("/v1/models/{model:path}", admin.model, "One of them"),
    Route("/generate", native.create, "Continue prompts, as SGLang's native endpoint", NativeRequest, STREAMED),
    Route("/tokenize", tokens.tokenize, "Tokens of a text or chat", TokenizeRequest),
    Route("/detokenize", tokens.detokenize, "Text of tokens", DetokenizeRequest),
    Route("/health", admin.ready, "Whether requests can be served"),
    Route("/health/live", admin.live, "Whether this process answers"),
    Route("/health/ready", admin.ready, "Whether requests can be served, and why not"),
    Route("/health_generate", admin.health_generate, "Whether the model generates a token"),
    Route("/ping", admin.ready, "Whether requests can be served, as SageMaker asks", post=True),
    Route("/load", admin.load, "Requests in work, as vLLM says it"),
    Route("/get_load", admin.loads, "Requests in work, as SGLang says it"),
    Route("/version", admin.version, "The version"),
    Route("/server_info", admin.server_info, "What is served, settings and counters"),
    Route("/get_server_info", admin.server_info, "SGLang's name for /server_info"),
    Route("/get_model_info", admin.model_info, "What is served, as SGLang says it"),
    Route("/model_info", admin.model_info, "SGLang's newer name for it"),
)


def build(
    service: Service,
    metrics: Metrics,
    keys: Keys,
    http: HttpConfig,
    scrape: Callable[[], Awaitable[Scrape]],
    traces: Traces | None = None,
    alive: Callable[[], object] = lambda: None,
) -> ASGIApp:
    """The whole application as ASGI. `alive` is called at every request's beginning and end: when thousands come at
    once, the loop is busy with them for longer than a process may be silent."""

    def began() -> None:
        alive()
        metrics.began()

    def told(story: Story, seconds: float) -> None:
        alive()
        metrics.told(story, seconds)
        service.load -= story.generates
        if traces is not None:
            traces.told(story)

    app = FastAPI(title="Rhizome", version="1", redoc_url=None, docs_url="/docs", swagger_ui_oauth2_redirect_url=None)
    app.router.redirect_slashes = False
    for route in ROUTES:
        _add(app, service, route)

    async def show_metrics(service: Service, request: Request) -> Response:
        authorization = request.headers.get("authorization")
        if authorization is not None:
            keys.name_of(authorization)  # a wrong key is refused here too
        private = authorization is not None or not keys.required
        return Response(metrics.show(await scrape(), private=private), headers={"content-type": CONTENT_TYPE_LATEST})

    _add(app, service, Route("/metrics", show_metrics, "Prometheus metrics", answers=("text/plain",)))
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_mistake)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    inner: ASGIApp = Answered(Authorized(app, keys))
    if http.cors_origins:
        inner = CORSMiddleware(
            inner,
            allow_origins=list(http.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-rhizome-ignored-fields", "retry-after"],
        )
    return Lingering(Observed(inner, began, told))


def _add(app: FastAPI, service: Service, route: Route) -> None:
    async def serve(request: Request) -> Any:
        story_of(request).route = route.path
        return await route.handler(service, request)

    names = re.findall(r"{(\w+)", route.path)
    extra: dict[str, Any] = {
        "parameters": [{"name": n, "in": "path", "required": True, "schema": {"type": "string"}} for n in names]
    }
    if route.body is not None:
        reference = {"$ref": REF.format(model=route.body.__name__)}
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
    error = {
        "description": "Refused or failed",
        "content": {"application/json": {"schema": {"$ref": REF.format(model="Error")}}},
    }
    if route.post:  # before the one below, since a 405 allows what the first one takes
        both = ["GET", "POST"]
        app.add_api_route(route.path, serve, methods=both, include_in_schema=False, response_class=Response)
    app.add_api_route(
        route.path,
        serve,
        methods=["GET" if route.body is None else "POST"],
        summary=route.summary,
        operation_id=route.path.strip("/").translate(str.maketrans("/:{}", "____")),
        response_model=None,
        response_class=Response,
        responses={
            200: {"description": "The answer", "content": {kind: {"schema": {}} for kind in route.answers}},
            "4XX": error,
            "5XX": error,
        },
        openapi_extra=extra,
    )
    if route.body is None:  # load balancers probe with HEAD; a server leaves the body out
        app.add_api_route(route.path, serve, methods=["HEAD"], include_in_schema=False, response_class=Response)


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    story_of(request).fail(*error.told)
    return error_response(error, request.url.path)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """What the router itself refuses: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    problems = {
        404: f"there is no {path}: OpenAI's paths begin with /v1, /docs lists all",
        405: f"{path} does not take {request.method}",
    }
    own = ApiError(error.status_code, problems.get(error.status_code, str(error.detail)), code="not_found")
    if error.status_code == 405:
        own.code = "method_not_allowed"
    story_of(request).fail(*own.told)
    return error_response(own, request.url.path, error.headers)


async def _on_mistake(request: Request, error: Exception) -> Response:
    """The answer alone: Starlette raises the error again, and `Answered` tells of it."""
    return error_response(our_mistake(), request.url.path)


_ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "type": {"const": "error", "description": "under /v1/messages alone"},
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        },
    },
}


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        models: dict[str, Any] = {"Error": _ERROR_SCHEMA}
        for route in ROUTES:
            if route.body is not None:
                own = route.body.model_json_schema(ref_template=REF)
                models |= own.pop("$defs", {})
                models[route.body.__name__] = own
            if route.post:
                paths = schema["paths"][route.path]
                paths["post"] = {**paths["get"], "operationId": f"{paths['get']['operationId']}_post"}
        schema.setdefault("components", {})["schemas"] = models
        app.openapi_schema = schema
    return app.openapi_schema
