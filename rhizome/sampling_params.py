"""Sampling parameters as Python values: lists where the wire has arrays, `n` among them, checked at once."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common import sampling_params as wire
from common.fields import FieldError
from common.json_request import parse_request


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to generate. The fields mean what they mean in `common.sampling_params.SamplingParams`; `n` is how many
    answers each prompt gets (with `use_beam_search` the beams), `stop` may be one text.

    At most one of `json_schema` (a schema, or True for any JSON object), `regex`, `choice`, `lark` and `ebnf` says what
    the answer must be. Raises ValueError, which names the field, for a value outside its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool = False
    n: int = 1
    json_schema: Mapping[str, Any] | str | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    lark: str | None = None
    ebnf: str | None = None

    def __post_init__(self) -> None:
        self.to_wire()

    def to_wire(self) -> wire.SamplingParams:
        """The form on the wire. Raises ValueError."""
        names = [f.name for f in dataclasses.fields(self) if f.name not in (*_GRAMMAR, "n")]
        values = {name: getattr(self, name) for name in names}
        values["stop"] = self.stop if isinstance(self.stop, str) else list(self.stop)
        values["stop_token_ids"] = list(self.stop_token_ids)
        values["logit_bias"] = dict(self.logit_bias)
        try:
            return parse_request({"prompt": "", **values, "n": self.n, "grammar": self._grammar()}).params
        except FieldError as error:
            raise ValueError(str(error)) from None

    def _grammar(self) -> dict[str, str] | None:
        given = [name for name in _GRAMMAR if getattr(self, name) not in (None, False)]
        if len(given) > 1:
            raise ValueError(f"{given[1]}: excludes {given[0]}")
        match given:
            case ["json_schema"] if self.json_schema is True:
                return {"kind": "json_object"}
            case ["json_schema"]:
                schema = self.json_schema if isinstance(self.json_schema, str) else json.dumps(self.json_schema)
                return {"kind": "json_schema", "text": schema}
            case ["regex"]:
                return {"kind": "regex", "text": str(self.regex)}
            case ["choice"]:
                return {"kind": "choice", "text": json.dumps(list(self.choice or ()), ensure_ascii=False)}
            case ["lark"]:
                return {"kind": "lark", "text": str(self.lark)}
            case ["ebnf"]:
                return {"kind": "ebnf", "text": str(self.ebnf)}
        return None


_GRAMMAR = ("json_schema", "regex", "choice", "lark", "ebnf")
