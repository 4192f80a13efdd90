"""From requests to SamplingParams and Grammars."""

import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from common.codec import decode, encode, message_types
from common.messages import Generate
from common.sampling_params import MAX_GRAMMAR_CHARS, MAX_TOKEN_ID, Grammar, SamplingParams
from gateway_proc.errors import ApiError
from gateway_proc.params import Defaults, grammar_of, sampling_params
from gateway_proc.schemas.completions import CompletionRequest


def request(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate_json(json.dumps({"prompt": "x", **fields}))


def params(defaults: Defaults | None = None, max_tokens: int | None = None, **fields: Any) -> SamplingParams:
    made = sampling_params(
        request(**fields),
        defaults or Defaults(),
        max_tokens=max_tokens,
        logprobs=None,
        prompt_logprobs=None,
        grammar=None,
    )
    frame = encode(Generate(1, "x", None, None, made))
    assert decode(frame, message_types()).params == made  # what the gateway lets pass, the wire takes
    return made


def test_nothing_said_is_the_default() -> None:
    assert params() == SamplingParams()


def test_every_field_arrives() -> None:
    given = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 5, "repetition_penalty": 1.2,
        "presence_penalty": 0.3, "frequency_penalty": -0.4, "min_tokens": 2, "ignore_eos": True,
        "skip_special_tokens": False, "use_beam_search": True, "length_penalty": 0.7, "early_stopping": True,
        "include_stop_str_in_output": True,
    }  # fmt: skip
    made = params(max_tokens=9, stop="end", stop_token_ids=[3, 4], logit_bias={"5": -100, "17": 2.5}, **given)
    assert {name: getattr(made, name) for name in given} == given
    assert made.stop == ("end",) and made.stop_token_ids == array("i", [3, 4]) and made.max_tokens == 9
    assert made.logit_bias == {5: -100.0, 17: 2.5}
    made = params(allowed_token_ids=[7, 3, 7], bad_words=["a", "b", "a"])
    assert made.allowed_token_ids == array("i", [7, 3, 7]) and made.bad_words == ("a", "b")
    assert params().allowed_token_ids is None and params().bad_words == ()


@pytest.mark.parametrize(
    ("field", "value", "own"),
    [("top_k", -1, 0), ("seed", -1, None), ("seed", -2, 2**63 - 2), ("stop", [], ()), ("stop", ["a", "b"], ("a", "b"))],
)
def test_other_servers_spellings(field: str, value: Any, own: Any) -> None:
    assert getattr(params(**{field: value}), field) == own


def test_what_ended_the_answer_is_shown_by_two_names() -> None:
    for fields in ({"include_stop_str_in_output": True}, {"no_stop_trim": True}):
        assert params(**fields).include_stop_str_in_output
    assert not params(include_stop_str_in_output=False, no_stop_trim=False).include_stop_str_in_output


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"99999999999": 1}}, "logit_bias"),
        ({"logit_bias": {"²": 1}}, "logit_bias"),
        ({"stop_token_ids": [1, -5]}, "stop_token_ids[1]"),
        ({"stop_token_ids": [2**40]}, "stop_token_ids[0]"),
        ({"allowed_token_ids": [1, -5]}, "allowed_token_ids[1]"),
        ({"min_tokens": 9}, "min_tokens"),
    ],
)
def test_refusals(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        params(max_tokens=8, **fields)
    assert caught.value.param == param and caught.value.status == 400


def test_limits_themselves_are_allowed() -> None:
    assert params(max_tokens=9, min_tokens=9).min_tokens == 9
    grammar, _ = grammar_of(request(guided_regex="a" * MAX_GRAMMAR_CHARS))
    assert grammar is not None and len(grammar.text) == MAX_GRAMMAR_CHARS
    ends = [0, MAX_TOKEN_ID]
    made = params(stop_token_ids=ends, logit_bias={str(token): 1 for token in ends})
    assert (list(made.stop_token_ids), list(made.logit_bias)) == (ends, ends)
    for field, wrong in (("stop_token_ids", [MAX_TOKEN_ID + 1]), ("logit_bias", {str(MAX_TOKEN_ID + 1): 1})):
        with pytest.raises(ApiError, match=field):
            params(**{field: wrong})


def test_defaults_of_the_model(tmp_path: Path) -> None:
    def of(text: str) -> Defaults:
        (tmp_path / "generation_config.json").write_text(text)
        return Defaults.of_model(tmp_path)

    assert Defaults.of_model(tmp_path) == of("{") == of("[]") == of('{"eos_token_id": 3}') == Defaults()
    own = of(
        '{"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 50, "min_p": 7, "repetition_penalty": "x"}'
    )
    assert own == Defaults(temperature=0.6, top_k=20, top_p=0.95, max_tokens=50)
    assert own.given() == {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_tokens": 50}
    made = params(own, top_p=1.0)
    assert (made.temperature, made.top_k, made.top_p, made.max_tokens) == (0.6, 20, 1.0, 50)
    assert params(own, top_k=-1, temperature=0).top_k == 0
    assert Defaults().given() == {}


def test_beam_search_takes_no_defaults_of_draws() -> None:
    own = Defaults(temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, repetition_penalty=1.1, max_tokens=50)
    assert params(own, use_beam_search=True) == SamplingParams(use_beam_search=True, max_tokens=50)
    assert params(own, use_beam_search=True, top_k=5).top_k == 5  # which the tokenizer refuses by name
    assert params(own, use_beam_search=False).top_k == 20


SCHEMA = {"type": "object"}


@pytest.mark.parametrize(
    ("fields", "grammar", "name"),
    [
        ({}, None, "response_format"),
        ({"response_format": {"type": "text"}}, None, "response_format"),
        ({"response_format": {"type": "json_object"}}, Grammar("json_object"), "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True}}},
            Grammar("json_schema", json.dumps(SCHEMA)), "response_format",
        ),
        ({"guided_json": SCHEMA}, Grammar("json_schema", json.dumps(SCHEMA)), "guided_json"),
        ({"guided_json": json.dumps(SCHEMA)}, Grammar("json_schema", json.dumps(SCHEMA)), "guided_json"),
        ({"guided_regex": "a+"}, Grammar("regex", "a+"), "guided_regex"),
        ({"regex": "a+"}, Grammar("regex", "a+"), "regex"),
        ({"guided_choice": ["yes", "nö"]}, Grammar("choice", '["yes", "nö"]'), "guided_choice"),
        ({"guided_grammar": 'start: "a"'}, Grammar("lark", 'start: "a"'), "guided_grammar"),
        (
            {"structured_outputs": {"json": SCHEMA}}, Grammar("json_schema", json.dumps(SCHEMA)),
            "structured_outputs.json",
        ),
        ({"structured_outputs": {"regex": "b"}}, Grammar("regex", "b"), "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a"]}}, Grammar("choice", '["a"]'), "structured_outputs.choice"),
        ({"structured_outputs": {"json_object": True}}, Grammar("json_object"), "structured_outputs.json_object"),
    ],
)  # fmt: skip
def test_grammars(fields: dict[str, Any], grammar: Grammar | None, name: str) -> None:
    assert grammar_of(request(**fields)) == (grammar, name)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"guided_regex": "a" * (MAX_GRAMMAR_CHARS + 1)}, "guided_regex"),
    ],
)
def test_grammars_that_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        grammar_of(request(**fields))
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('root ::= "a"', "ebnf"),
        ('# a comment\n\n  root::= x\nx ::= "start: "', "ebnf"),
        ('start: "a"', "lark"),
        ('start: "root ::= x"', "lark"),
        ("nonsense", "lark"),
    ],
)
def test_vllms_grammars_are_lark_or_ebnf(text: str, kind: str) -> None:
    assert grammar_of(request(guided_grammar=text)) == (Grammar(kind, text), "guided_grammar")
    assert grammar_of(request(grammar=text)) == (Grammar(kind, text), "grammar")
    outputs = request(structured_outputs={"grammar": text})
    assert grammar_of(outputs) == (Grammar(kind, text), "structured_outputs.grammar")


def test_sglangs_names() -> None:
    assert grammar_of(request(choice=["a", "b"])) == (Grammar("choice", '["a", "b"]'), "choice")
    assert grammar_of(request(ebnf="start: x")) == (Grammar("ebnf", "start: x"), "ebnf")
    schema = '{"type": "object"}'
    for given in (schema, json.loads(schema)):
        assert grammar_of(request(json_schema=given)) == (Grammar("json_schema", schema), "json_schema")
    with pytest.raises(ApiError, match="cannot be used together with regex"):
        grammar_of(request(ebnf="x", regex="y"))
