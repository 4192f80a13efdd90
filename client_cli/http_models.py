"""The list of models of an HTTP server, which is also how to see that somebody is there."""

import json
import time
from http import HTTPStatus
from typing import Any

import aiohttp

from client_cli.http_loop import HttpLoop, failure_text
from client_cli.openai_body import error_of, json_or_text
from common.connection import ConnectionLost, Unreachable

RETRY_S = 0.2
PATH = "/v1/models"
_REFUSED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


def find_model(http: HttpLoop[Any], wanted: str | None, wait_s: float) -> str:
    """The model to ask for: `wanted`, or the first that the server lists where that is None. Waits up to `wait_s` for a
    server that is still starting. Raises Unreachable when nobody answers, ConnectionLost when the key is refused."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            status, text = http.get(PATH)
            problem = error_of(0, status, json_or_text(text)).problem
            if status in _REFUSED:
                hint = "" if http.server.api_key else "; --api-key-env NAME says which environment variable has the key"
                raise ConnectionLost(f"{http.server.root}{PATH}: {problem}{hint}")
            if wanted is not None and status < HTTPStatus.INTERNAL_SERVER_ERROR:  # a list is not needed
                return wanted
            if status == HTTPStatus.OK:
                return str(models_of(text)[0]["id"])
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            problem = failure_text(error)
        if time.monotonic() >= deadline:
            raise Unreachable(f"no answer at {http.server.root}: {problem}")
        http.poll(RETRY_S)


def models_of(text: str) -> list[dict[str, Any]]:
    """The models of the page, at least one, each with an id. Raises ValueError."""
    try:
        models = json.loads(text)["data"]
        if models and all(type(model["id"]) is str for model in models):
            return list(models)
    except (ValueError, LookupError, TypeError, RecursionError):
        pass
    raise ValueError("the list of models cannot be read; name one with --model")
