"""Errors in OpenAI's format: `{"error": {"message", "type", "param", "code"}}` with the HTTP status that fits; under
/v1/messages in Anthropic's, `{"type": "error", "error": {...}}`."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from common.connection import ConnectionLost
from common.messages import ErrorCode, RequestError
from common.stream import RequestFailed

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    499: "client_closed_request",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
ANTHROPIC = "/v1/messages"
_CODES = {
    ErrorCode.INVALID: (400, "invalid_value"),
    ErrorCode.TOO_LONG: (400, "context_length_exceeded"),
    ErrorCode.OVERLOADED: (429, "overloaded"),
    ErrorCode.SHUTTING_DOWN: (503, "shutting_down"),
    ErrorCode.INTERNAL: (500, "internal_error"),
    ErrorCode.DEADLINE: (504, "deadline_exceeded"),
}
_KEY = re.compile(r"[a-z_][A-Za-z0-9_]*")  # labels of unions in pydantic's paths, such as list[int], are not
_UNION_LABELS = frozenset({"str", "int", "float", "bool", "none", "dict"})


def is_anthropic(path: str) -> bool:
    """Whether whoever asks this path speaks Anthropic's API."""
    return path == ANTHROPIC or path.startswith(f"{ANTHROPIC}/")


class ApiError(Exception):
    """What a client is told. `param` names the offending field, `retry_after_s` is when to try again."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self, path: str = "") -> dict[str, Any]:
        """What a client gets that has asked `path`, as JSON: OpenAI's form, or Anthropic's and our fields in it."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        if not is_anthropic(path):
            return {"error": error}
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": error | {"type": kind, "details": {"error_code": self.code}}}

    @property
    def told(self) -> tuple[str, str]:
        """Code and message, as stories tell them."""
        return self.code or self.type, self.message

    def headers(self) -> dict[str, str]:
        headers = {}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"  # which RFC 9110 asks for
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        return headers


def refused(param: str, problem: str, code: str = "invalid_value") -> ApiError:
    """A field of the request is wrong."""
    return ApiError(400, f"{param}: {problem}", param=param, code=code)


def unsupported(param: str, problem: str = "is not supported") -> ApiError:
    """A field is known, and this server cannot do what it asks for."""
    return refused(param, problem, "unsupported_parameter")


def of_cluster(error: RequestError, names: Mapping[str, str]) -> ApiError:
    """What the cluster refused or ended, in the client's words: `names` are its names for the fields of Generate."""
    status, code = _CODES.get(ErrorCode(error.code), (500, "internal_error"))
    field = error.field.removeprefix("params.")
    stem = re.match(r"[a-z_]*", field)
    own = names.get(stem[0], stem[0]) if stem else ""
    param = names.get(field) or (own + field[len(stem[0]) :] if stem else field)
    message = error.problem
    for prefix in (error.field, field):
        if prefix and message.startswith(f"{prefix}: "):
            message = message[len(prefix) + 2 :]
            if field == "grammar":
                message = message.removeprefix("text: ")  # the cluster's name for what the field holds
            message = f"{param}: {message}"
            break
    retry = error.retry_after_s or (1.0 if status in (429, 503) else None)
    return ApiError(status, message, param=param or None, code=code, retry_after_s=retry)


def our_mistake() -> ApiError:
    """What is told of an exception that nobody expected."""
    return ApiError(500, "an internal error; the log says more", code="internal_error")


@contextmanager
def told_by_cluster(names: Mapping[str, str]) -> Iterator[None]:
    """What the cluster refuses inside, and that it is lost, is raised as ApiError; `names` as in `of_cluster`."""
    try:
        yield
    except RequestFailed as failure:
        raise of_cluster(failure.error, names) from None
    except ConnectionLost as error:
        raise ApiError(503, str(error), code="not_ready", retry_after_s=1.0) from None


def of_validation(error: ValidationError) -> ApiError:
    """The most specific problem that pydantic found, with the path of the field in the client's JSON. That a list is
    too long tells more than that its items are not of the other types that a field may have."""
    found: dict[str, list[str]] = {}
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    for problem in [problem for problem in problems if problem["type"] == "too_long"] or problems:
        if problem["type"] == "json_invalid":
            return ApiError(
                400, f"the body is not valid JSON: {problem['msg'].removeprefix('Invalid JSON: ')}", code="invalid_json"
            )
        text = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
        found.setdefault(path_of(problem["loc"]), []).append(_decapitalized(text))
    param = max(found, key=lambda path: path.count(".") + path.count("["))
    words = " or ".join(dict.fromkeys(found[param]))
    if not param:
        return ApiError(400, "the body must be a JSON object", code="invalid_type")
    return refused(param, words)


def path_of(loc: Iterable[str | int]) -> str:
    """Pydantic's location as `messages[0].content`, without the labels of unions in it."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif _KEY.fullmatch(part) and part not in _UNION_LABELS:
            path += f".{part}" if path else part
    return path


def _decapitalized(text: str) -> str:
    return text[:1].lower() + text[1:]
