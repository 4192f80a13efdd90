"""From an HTTP request to a checked model of its body."""

import logging
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
        body = await read_body(request.receive, request.headers, self.limit)
        model = self.parse(body, kind)
        unknown = [shown(name) for name in model.unknown_fields()[:MAX_SHOWN]]
        if unknown:
            self._name(unknown)
            story_of(request).ignored = unknown
        return model

    def parse(self, body: bytes, kind: type[M]) -> M:
        """Raises ApiError. The parser itself ends at 200 levels of nesting and at text that is not UTF-8."""
        try:
            model = kind.model_validate_json(body)
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


def check_model(name: str | None, info: Info) -> None:
    """Raises ApiError(404) for a model that is not served here. None is the one that is, and so is "", as in vLLM."""
    if name and name not in info.names and name != info.model:
        served = ", ".join(info.names)
        problem = f"the model {name[:200]!r} does not exist; served is {served}"
        raise ApiError(404, problem, param="model", code="model_not_found")
