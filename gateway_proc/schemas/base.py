"""What all request models share: strict types, and unknown fields that are found and named."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from common.codec import schema_of
from common.fields import Float, Int, IntMap, Ints, ListOf, Maybe
from common.messages import Generate
from common.sampling_params import SamplingParams
from gateway_proc.errors import unsupported

T = TypeVar("T")
# Up to the first wrong item: pydantic takes seconds to say what is wrong with each of 100,000.
Items = Annotated[list[T], Field(fail_fast=True)]


def within(name: str, of: type = SamplingParams) -> Any:
    """Pydantic's bounds for a number, or the length of a list, as the wire schema has them."""
    checker = dict(schema_of(of))[name]
    if isinstance(checker, Maybe):
        checker = checker.inner
    match checker:
        case Int(lo, hi):
            return Field(ge=lo, le=hi)
        case Float(lo, hi, open_low):
            return Field(gt=lo, le=hi) if open_low else Field(ge=lo, le=hi)
        case Ints(most, least=least) | ListOf(_, most, least) | IntMap(Ints(most, least=least), _):
            return Field(min_length=least or None, max_length=most)
    raise TypeError(f"{name} has no bounds")


def within_generate(name: str) -> Any:
    """The bounds of a field of Generate."""
    return within(name, Generate)


class ApiModel(BaseModel):
    """A part of a request's JSON. `UNSUPPORTED` names known fields that are refused, with the values that change
    nothing and are therefore let pass (null always is)."""

    model_config = ConfigDict(
        strict=True, extra="allow", allow_inf_nan=False, hide_input_in_errors=True, protected_namespaces=()
    )
    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    def check_supported(self, path: str = "") -> None:
        """Raises ApiError for a known field that asks for something this server does not do."""
        for name, value in (self.model_extra or {}).items():
            allowed = self.UNSUPPORTED.get(name)
            if allowed is not None and value is not None and not any(_same(value, a) for a in allowed):
                raise unsupported(path + name)
        for part, where in _parts(self, path):
            part.check_supported(where)

    def unknown_fields(self, path: str = "") -> list[str]:
        """The paths of fields that mean nothing here."""
        own = [path + name for name in self.model_extra or {} if name not in self.UNSUPPORTED]
        return own + [name for part, where in _parts(self, path) for name in part.unknown_fields(where)]


def _same(value: Any, allowed: Any) -> bool:
    return type(value) is type(allowed) and bool(value == allowed)


def _parts(model: ApiModel, path: str) -> list[tuple[ApiModel, str]]:
    """The models inside a model, with the prefix of their fields' paths."""
    found: list[tuple[ApiModel, str]] = []
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, ApiModel):
            found.append((value, f"{path}{name}."))
        elif isinstance(value, list) and value and isinstance(value[0], ApiModel):  # all are then; tokens are many
            found += [(v, f"{path}{name}[{i}].") for i, v in enumerate(value)]
    return found
