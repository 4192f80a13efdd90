"""The request models: every field refuses wrong types by its name, ranges are those of the wire, nothing is ignored
silently."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.codec import schema_of
from common.fields import Float, Int, Maybe
from common.messages import Generate
from common.sampling_params import SamplingParams
from gateway_proc.errors import ApiError
from gateway_proc.requests import BodyReader
from gateway_proc.schemas.base import ApiModel
from gateway_proc.schemas.chat import ChatRequest
from gateway_proc.schemas.completions import CompletionRequest
from gateway_proc.schemas.native import DetokenizeRequest, NativeParams, NativeRequest, TokenizeRequest

LEAST: dict[type[ApiModel], dict[str, Any]] = {
    ChatRequest: {"messages": [{"role": "user", "content": "x"}]},
    CompletionRequest: {"prompt": "x"},
    NativeRequest: {"text": "x"},
    NativeParams: {},
    TokenizeRequest: {"prompt": "x"},
    DetokenizeRequest: {"tokens": [1]},
}
READER = BodyReader(10**6)


def names_of(kind: type[ApiModel]) -> list[str]:
    """What clients call the fields, every alias too."""
    names: list[str] = []
    for name, field in kind.model_fields.items():
        alias = field.validation_alias
        names += (
            [str(c) for c in alias.choices] if alias is not None and not isinstance(alias, str) else [alias or name]
        )  # type: ignore[union-attr]
    return names


def parse(kind: type[ApiModel], **fields: Any) -> Any:
    least = {} if "text" in fields else LEAST[kind]  # another name of `prompt`
    return READER.parse(json.dumps(least | fields).encode(), kind)


def refusal(kind: type[ApiModel], **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(kind, **fields)
    return caught.value


MAPS = {  # any map is of their type
    "logit_bias", "guided_json", "chat_template_kwargs", "stream_options", "structured_outputs", "sampling_params",
    "json_schema",
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name"), [(k, n) for k in LEAST for n in names_of(k)], ids=lambda v: getattr(v, "__name__", v)
)
def test_every_field_refuses_wrong_types_by_name(kind: type[ApiModel], name: str) -> None:
    wrong: list[Any] = [[{"x": [None]}]]
    if name not in MAPS:
        wrong.append({"no such thing": [None]})
    for value in wrong:
        error = refusal(kind, **{name: value})
        assert error.status == 400 and error.param is not None
        assert error.param.split(".")[0].split("[")[0] == name, error.message
        assert error.message.startswith(error.param)


@pytest.mark.parametrize("kind", [k for k in LEAST if k is not DetokenizeRequest], ids=lambda k: k.__name__)
def test_null_is_the_same_as_absent(kind: type[ApiModel]) -> None:
    required = [name for name, field in kind.model_fields.items() if field.is_required()]
    nulls = {name: None for name in names_of(kind) if name not in {*required, *LEAST[kind]}}
    assert parse(kind, **nulls).model_dump(exclude_none=True).keys() <= {
        *LEAST[kind],
        *required,
        "max_tokens",
        "max_new_tokens",
    }


def test_the_ranges_are_those_of_the_wire() -> None:
    wire = dict(schema_of(SamplingParams)) | dict(schema_of(Generate))
    checked = 0
    for kind in (ChatRequest, CompletionRequest):
        for name in kind.model_fields:
            checker = wire.get(name)
            checker = checker.inner if isinstance(checker, Maybe) else checker
            if not isinstance(checker, Int | Float) or name in (
                "logprobs",
                "seed",
                "top_k",
                "deadline_ms",
                "max_tokens",
            ):
                continue
            low = checker.lo + 0.5 if isinstance(checker, Float) and checker.open_low else checker.lo
            for value in (low, checker.hi):
                assert getattr(parse(kind, **{name: value}), name) == value
            for value in (checker.lo - 1, checker.hi + 1):
                assert refusal(kind, **{name: value}).param == name
            checked += 1
    assert checked >= 20


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop_token_ids": [1, "x"]}, "stop_token_ids[1]"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": 1}]}]},
         "messages[1].content[0].text"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "web", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"n": 1.5}, "n"),
        ({"top_k": -2}, "top_k"),
        ({"stream": 1}, "stream"),
    ],
)  # fmt: skip
def test_refusals_name_the_place(fields: dict[str, Any], param: str) -> None:
    error = refusal(ChatRequest, **fields)
    assert (error.status, error.param) == (400, param), error.message


UNSUPPORTED = [(kind, name, allowed) for kind in LEAST for name, allowed in kind.UNSUPPORTED.items()]


@pytest.mark.parametrize(("kind", "name", "allowed"), UNSUPPORTED, ids=lambda v: getattr(v, "__name__", str(v)))
def test_known_fields_that_are_not_supported_are_refused_by_name(kind: type[ApiModel], name: str, allowed: Any) -> None:
    error = refusal(kind, **{name: "something else"})
    assert (error.status, error.param, error.code) == (400, name, "unsupported_parameter")
    for value in (None, *allowed):  # what changes nothing is let pass, and is not called unknown
        assert parse(kind, **{name: value}).unknown_fields() == []


def test_unknown_fields_are_found_everywhere() -> None:
    model = parse(
        ChatRequest,
        zap=1,
        messages=[{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}], "odd": 1}],
        stream=True,
        stream_options={"include_usage": True, "more": 2},
        tools=[{"type": "function", "function": {"name": "f", "parameters": {"anything": 1}, "odd": 3}}],
    )
    assert model.unknown_fields() == [
        "zap", "stream_options.more", "messages[0].odd", "messages[0].content[0].cache_control",
        "tools[0].function.odd",
    ]  # fmt: skip


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("kind", LEAST, ids=lambda k: k.__name__)
def test_any_json_is_taken_or_refused(kind: type[ApiModel]) -> None:
    @given(st.dictionaries(st.sampled_from(names_of(kind)) | st.text(max_size=8), JSON, max_size=5))
    def check(fields: dict[str, Any]) -> None:
        try:
            body = json.dumps(LEAST[kind] | fields).encode()
            READER.parse(body, kind)
        except ApiError as error:
            assert error.status == 400 and error.message

    check()


@given(st.binary(max_size=60))
def test_any_bytes_are_taken_or_refused(body: bytes) -> None:
    with pytest.raises(ApiError):
        READER.parse(body, CompletionRequest)
