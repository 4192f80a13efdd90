"""From a request's fields to SamplingParams. Pure: no sockets, no clock."""

import json
import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from common.codec import schema_of
from common.fields import FieldError
from common.sampling_params import MAX_GRAMMAR_CHARS, MAX_TOKEN_ID, Grammar, SamplingParams
from gateway_proc.errors import refused
from gateway_proc.schemas.sampling import SamplingFields

SEED_MASK = 2**63 - 1
_EBNF = re.compile(r"(?m)^\s*[\w-]+\s*::=")
_LARK = re.compile(r"(?m)^\s*(%llguidance\b|start\s*:(?!:))")


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a request gets that says nothing: the model's own where its generation_config.json has some (as vLLM
    does), else those of SamplingParams."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None

    @classmethod
    def of_model(cls, model: Path) -> "Defaults":
        """Those of a checkpoint. Values outside their range are left out, as is a file that cannot be read."""
        try:
            values = json.loads((model / "generation_config.json").read_text())
        except (OSError, ValueError):
            return cls()
        if not isinstance(values, dict):
            return cls()
        values = values | {"max_tokens": values.get("max_new_tokens")}
        checkers, own = dict(schema_of(SamplingParams)), {}
        for name in cls.__dataclass_fields__:
            try:
                if values.get(name) is not None:
                    own[name] = checkers[name].unpack(values[name], name)
            except FieldError:
                continue
        return cls(**own)

    def without_draws(self) -> "Defaults":
        """Those for a beam search, which draws nothing: a model's filters do not go with it, and the client did not ask
        for them."""
        return Defaults(max_tokens=self.max_tokens)

    def given(self) -> dict[str, Any]:
        """Those that differ from SamplingParams' own."""
        plain = Defaults()
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: value for name, value in values.items() if value != getattr(plain, name)}


def sampling_params(
    request: SamplingFields,
    defaults: Defaults,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    prompt_logprobs_start: int = 0,
    grammar: Grammar | None,
    skip_special_tokens: bool | None = None,
    names: Mapping[str, str] = MappingProxyType({}),
) -> SamplingParams:
    """All that concerns how tokens are drawn. `names` are the client's names for fields. Raises ApiError where they do
    not fit together."""
    given: dict[str, Any] = {
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "min_tokens": request.min_tokens,
        "ignore_eos": request.ignore_eos,
        "include_stop_str_in_output": request.include_stop_str_in_output or request.no_stop_trim,
        "skip_special_tokens": request.skip_special_tokens if skip_special_tokens is None else skip_special_tokens,
        "use_beam_search": request.use_beam_search,
        "length_penalty": request.length_penalty,
        "early_stopping": request.early_stopping,
    }
    if request.use_beam_search:
        defaults = defaults.without_draws()
    for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
        value = getattr(request, name)
        given[name] = getattr(defaults, name) if value is None else value
    max_tokens = defaults.max_tokens if max_tokens is None else max_tokens
    if max_tokens is not None and (request.min_tokens or 0) > max_tokens:
        most = f"{names.get('max_tokens', 'max_tokens')} ({max_tokens})"
        raise refused(names.get("min_tokens", "min_tokens"), f"must be at most {most}, got {request.min_tokens}")
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or ()
    return SamplingParams(
        top_k=max(0, defaults.top_k if request.top_k is None else request.top_k),
        seed=_seed(request.seed),
        max_tokens=max_tokens,
        stop=tuple(stop),
        stop_token_ids=_token_ids(request.stop_token_ids or [], names.get("stop_token_ids", "stop_token_ids")),
        allowed_token_ids=_token_ids(request.allowed_token_ids, "allowed_token_ids")
        if request.allowed_token_ids
        else None,
        bad_words=tuple(dict.fromkeys(request.bad_words or ())),
        logit_bias=_logit_bias(request.logit_bias or {}, names.get("logit_bias", "logit_bias")),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        prompt_logprobs_start=prompt_logprobs_start,
        grammar=grammar,
        **{name: value for name, value in given.items() if value is not None},
    )


def _seed(seed: int | None) -> int | None:
    """-1 draws a fresh one, as with vLLM; other negative ones are as good as any."""
    return None if seed is None or seed == -1 else seed & SEED_MASK


def _token_ids(ids: list[int], field: str) -> "array[int]":
    for i, token in enumerate(ids):
        if not 0 <= token <= MAX_TOKEN_ID:
            raise refused(f"{field}[{i}]", f"must be a token id between 0 and {MAX_TOKEN_ID}, got {token}")
    return array("i", ids)


def _logit_bias(values: Mapping[str, float], field: str) -> dict[int, float]:
    """OpenAI's map from token ids as texts."""
    bias = {}
    for key, value in values.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) <= MAX_TOKEN_ID):
            raise refused(field, f"keys must be token ids, got {key[:40]!r}")
        bias[int(key)] = value
    return bias


def grammar_of(request: SamplingFields, within: str = "") -> tuple[Grammar | None, str]:
    """What the answer must match, and the field that says so; `within` is what precedes the names of all fields. Raises
    ApiError when several fields do."""
    found = [(within + name, grammar) for name, grammar in _grammars(request) if grammar is not None]
    if len(found) > 1:
        raise refused(found[1][0], f"cannot be used together with {found[0][0]}")
    if not found:
        return None, "response_format"
    name, grammar = found[0]
    if len(grammar.text) > MAX_GRAMMAR_CHARS:
        raise refused(name, f"must have at most {MAX_GRAMMAR_CHARS} characters, got {len(grammar.text)}")
    return grammar, name


def _grammars(request: SamplingFields) -> list[tuple[str, Grammar | None]]:
    found: list[tuple[str, Grammar | None]] = [
        ("response_format", _of_response_format(request)),
        ("guided_json", _of_schema(request.guided_json)),
        ("guided_regex", _of("regex", request.guided_regex)),
        ("guided_choice", _of_choice(request.guided_choice)),
        ("guided_grammar", _of_grammar(request.guided_grammar)),
        ("regex", _of("regex", request.regex)),
        ("choice", _of_choice(request.choice)),
        ("grammar", _of_grammar(request.grammar)),
        ("ebnf", _of("ebnf", request.ebnf)),
        ("json_schema", _of_schema(request.json_schema)),
    ]
    outputs = request.structured_outputs
    if outputs is not None:
        own = [
            ("structured_outputs.json", _of_schema(outputs.json_)),
            ("structured_outputs.regex", _of("regex", outputs.regex)),
            ("structured_outputs.choice", _of_choice(outputs.choice)),
            ("structured_outputs.grammar", _of_grammar(outputs.grammar)),
            ("structured_outputs.json_object", Grammar("json_object") if outputs.json_object else None),
        ]
        if not any(grammar for _, grammar in own):
            raise refused("structured_outputs", "one of json, regex, choice, grammar and json_object must be given")
        found += own
    return found


def _of_response_format(request: SamplingFields) -> Grammar | None:
    form = request.response_format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return Grammar("json_object")
    if form.json_schema is None or form.json_schema.schema_ is None:
        raise refused("response_format.json_schema", "must hold a schema when type is json_schema")
    return Grammar("json_schema", json.dumps(form.json_schema.schema_, ensure_ascii=False))


def _of_schema(schema: dict[str, Any] | str | None) -> Grammar | None:
    if schema is None:
        return None
    return Grammar("json_schema", schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False))


def _of(kind: str, text: str | None) -> Grammar | None:
    return None if text is None else Grammar(kind, text)


def _of_grammar(text: str | None) -> Grammar | None:
    """Lark's syntax, or EBNF where rules are defined with `::=`; vLLM takes both too."""
    if text is None:
        return None
    return Grammar("ebnf" if _EBNF.search(text) and not _LARK.search(text) else "lark", text)


def _of_choice(choice: list[str] | None) -> Grammar | None:
    return None if choice is None else Grammar("choice", json.dumps(choice, ensure_ascii=False))
