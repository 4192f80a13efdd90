"""From an HTTP request to a checked model of its body."""

import logging
from codecs import BOM_UTF8
from dataclasses import dataclass, field
from typing import TypeVar

from pydantic import ValidationError
from starlette.requests import Request

from common.messages import Info
from common.story import shown
from gateway_proc.errors import ApiError, of_validation, refused
from gateway_proc.http import read_body, story_of
from gateway_proc.schemas.base import ApiModel

log = logging.getLogger(__name__)

MAX_NAMED = 1000  # sets of unknown fields that are remembered, so that each is named once in the log
MAX_SHOWN = 32  # fields of such a set
# Nothing else runs while a body is parsed, and whoever is silent for --freeze-timeout (3 s) counts as dead.
MAX_VALUES = 2**21  # about a second
MAX_PARTS = 2**17  # lists, objects and the fields of these: up to a second, too
M = TypeVar("M", bound=ApiModel)


@dataclass(slots=True)
class BodyReader:
    """Reads bodies of at most `limit` bytes. `strict` refuses unknown fields, which are else named and left out."""

    limit: int
    strict: bool = False
    _named: set[tuple[str, ...]] = field(default_factory=set)

    async def read(self, request: Request, kind: type[M]) -> M:
        """The body as `kind`. Raises ApiError, which names the field."""
        content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if content_type != "application/json" and not content_type.endswith("+json"):
            problem = f"the body must be application/json, not {shown(content_type)}"
            raise ApiError(415, problem, code="unsupported_media_type")
        coding = request.headers.get("content-encoding", "identity").strip().lower()
        if coding != "identity":
            raise ApiError(415, f"the body must come as it is, not as {shown(coding)}", code="unsupported_media_type")
        body = await read_body(request.receive, request.headers, self.limit)
        model = self.parse(body, kind)
        self.ignore(request, model.unknown_fields())
        return model

    def ignore(self, request: Request, fields: list[str]) -> None:
        """Name fields of a request that change nothing."""
        if fields:
            ignored = [shown(name) for name in fields[:MAX_SHOWN]]
            self._name(ignored)
            story_of(request).ignored += ignored

    def parse(self, body: bytes, kind: type[M]) -> M:
        """Raises ApiError. The parser itself ends at 200 levels of nesting and at text that is not UTF-8."""
        _check_values(body)
        try:
            model = kind.model_validate_json(body.removeprefix(BOM_UTF8))  # editors on Windows write one
        except ValidationError as error:
            raise of_validation(error) from None
        model.check_supported()
        if self.strict and (unknown := model.unknown_fields()):
            raise refused(shown(unknown[0]), "is not a known field (strict mode)", "unknown_parameter")
        return model

    def _name(self, unknown: list[str]) -> None:
        names = tuple(sorted(unknown))
        if names not in self._named and len(self._named) < MAX_NAMED:
            self._named.add(names)
            log.warning("fields that mean nothing here are ignored: %s", ", ".join(names))


def _check_values(body: bytes) -> None:
    """Raises ApiError for a body that takes long to parse."""
    values, parts = _counts(body)
    if values > MAX_VALUES or parts > MAX_PARTS:
        # Perhaps that is punctuation in texts. These begin and end with quotes that no backslash is before.
        values, parts = _counts(b"".join(body.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2]))
    if values > MAX_VALUES:
        raise ApiError(413, f"the body has {values} values, {MAX_VALUES} is the limit", code="too_large")
    if parts > MAX_PARTS:
        problem = f"the body has {parts} lists, objects and fields of objects, {MAX_PARTS} is the limit"
        raise ApiError(413, problem, code="too_large")


def _counts(body: bytes) -> tuple[int, int]:
    """How many values there are, beside first ones, and how many lists, objects and fields."""
    return body.count(b","), sum(map(body.count, (b"[", b"{", b":")))


def check_model(name: str | None, info: Info) -> None:
    """Raises ApiError(404) for a model that is not served here. None is the one that is, and so is "", as in vLLM."""
    if name and name not in info.names and name != info.model:
        served = ", ".join(info.names)
        problem = f"the model {name[:200]!r} does not exist; served is {served}"
        raise ApiError(404, problem, param="model", code="model_not_found")
