"""Sampling parameters as Python values: lists where the wire has arrays, `n` among them, checked at once."""

import dataclasses
import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common import sampling_params as wire
from common.fields import FieldError
from common.json_request import parse_request


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to generate. The fields mean what they mean in `common.sampling_params.SamplingParams`; `n` is how many
    answers each prompt gets (with `use_beam_search` the beams), `stop` may be one text. As in vLLM, a `top_k` of -1 is
    0, and None for `stop`, `stop_token_ids`, `logit_bias` and `bad_words` is nothing.

    At most one of `json_schema` (a schema, or True for any JSON object), `regex`, `choice`, `lark` and `ebnf` says what
    the answer must be. Raises ValueError, which names the field, for a value outside its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default_factory=dict)
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool = False
    include_stop_str_in_output: bool = False
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = ()
    prompt_logprobs_start: int = 0
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
        values["top_k"] = 0 if self.top_k == -1 else self.top_k
        stop, stop_ids, biases = self.stop, self.stop_token_ids, self.logit_bias
        values["stop"] = stop if isinstance(stop, str) else [] if stop is None else listed("stop", stop)
        values["stop_token_ids"] = [] if stop_ids is None else integers("stop_token_ids", stop_ids)
        values["bad_words"] = [] if self.bad_words is None else listed("bad_words", self.bad_words)
        if self.allowed_token_ids is not None:
            values["allowed_token_ids"] = integers("allowed_token_ids", self.allowed_token_ids)
        try:
            values["logit_bias"] = {} if biases is None else {_token_id(key): bias for key, bias in biases.items()}
        except (AttributeError, TypeError):
            raise ValueError(f"logit_bias: must map token ids to numbers, got {self.logit_bias!r:.100}") from None
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
                try:
                    schema = self.json_schema if isinstance(self.json_schema, str) else json.dumps(self.json_schema)
                except (TypeError, ValueError) as error:
                    raise ValueError(f"json_schema: must be a JSON schema: {error}") from None
                return {"kind": "json_schema", "text": schema}
            case ["choice"]:
                texts = listed("choice", self.choice)
                if not all(isinstance(text, str) for text in texts):
                    raise ValueError("choice: must be a list of texts")
                return {"kind": "choice", "text": json.dumps(texts, ensure_ascii=False)}
            case [name]:
                text = getattr(self, name)
                if not isinstance(text, str):
                    raise ValueError(f"{name}: must be text, got {text!r}")
                return {"kind": name, "text": text}
        return None


def integers(name: str, values: Any) -> list[int]:
    """A list of integers of any type, also numpy's. Raises ValueError with the field's name."""
    wanted = "a list of integers"
    try:
        return [operator.index(value) for value in listed(name, values, wanted)]
    except TypeError:
        raise ValueError(f"{name}: must be {wanted}, got {values!r:.100}") from None


def listed(name: str, values: Any, wanted: str = "a list") -> list[Any]:
    """What can be iterated over and is no text, as a list. Raises ValueError with the field's name."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise ValueError(f"{name}: must be {wanted}, got {values!r:.100}")
    return list(values)


def _token_id(key: Any) -> str | int:
    return key if isinstance(key, str) else operator.index(key)  # JSON has texts for keys


_GRAMMAR = ("json_schema", "regex", "choice", "lark", "ebnf")
