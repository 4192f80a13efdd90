"""Conversations in OpenAI's schema for a template that speaks the harmony format."""

import json
from typing import Any

import pytest

from tests.helpers_templates import HARMONY
from tests.unit.test_chat_request import CALLS, RESULT, SYSTEM, TOOLS, USER, reference, wire
from tests.unit.test_chat_request import rendered as rendered_in_schema
from tokenizer_proc.chat_request import parse_messages
from tokenizer_proc.harmony_prompt import harmony_messages, harmony_tools
from tokenizer_proc.limits import Refused

ANSWER = {"role": "assistant", "content": "Fine."}
NO_INSTRUCTIONS = "<|start|>user<|message|>"


def rendered(messages: list[dict[str, Any]], **fields: Any) -> str:
    """The prompt behind the system message."""
    return rendered_in_schema(HARMONY, messages, **fields).split("<|end|>", 1)[1]


def call(number: int, name: str) -> dict[str, Any]:
    return {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": f'{{"n": {number}}}'}}


def called(name: str, number: int) -> str:
    return f'<|start|>assistant to=functions.{name}<|channel|>commentary json<|message|>{{"n": {number}}}<|call|>'


def result(name: str, content: str) -> str:
    return f'<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>"{content}"<|end|>'


def thought(text: str) -> str:
    return f"<|start|>assistant<|channel|>analysis<|message|>{text}<|end|>"


@pytest.mark.parametrize("messages", [[USER], [SYSTEM, USER], [USER, CALLS, RESULT], [USER, CALLS, RESULT, ANSWER]])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_equal_to_transformers(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> None:
    arguments = {"reasoning_effort": "high", "builtin_tools": ["python"], "model_identity": "You are Bo."}
    theirs = reference().apply_chat_template(
        harmony_messages(parse_messages(wire(messages))), tools=tools, chat_template=HARMONY, tokenize=False,
        add_generation_prompt=True, **arguments,
    )  # fmt: skip
    sent = {"tools": json.dumps(tools) if tools else "", "template_args": json.dumps(arguments)}
    assert rendered_in_schema(HARMONY, messages, **sent) == theirs
    assert theirs.startswith("<|start|>system<|message|>You are Bo.") and "\nReasoning: high\nTool: python" in theirs
    assert theirs.endswith("<|start|>assistant")


def test_reasoning_has_the_templates_name() -> None:
    prompt = rendered([USER, {**CALLS, "reasoning_content": "hm"}, RESULT])
    assert thought("hm") + "<|start|>assistant to=functions.get_weather" in prompt
    both = rendered([USER, {**CALLS, "reasoning_content": "hm", "content": "I look."}, RESULT])
    assert thought("hm\n\nI look.") in both
    assert thought("I look.") in rendered([USER, {**CALLS, "content": "I look."}, RESULT])
    (answer,) = harmony_messages([{**ANSWER, "reasoning_content": "hm"}])
    assert answer == {**ANSWER, "thinking": "hm"}


def test_each_of_several_calls_has_its_result_behind_it() -> None:
    calls = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call(1, "f"), call(2, "g")]}
    two, one = ({"role": "tool", "content": text, "tool_call_id": f"c{text}"} for text in "21")
    expected = thought("hm") + called("f", 1) + result("f", "1") + called("g", 2) + result("g", "2")
    for results in ([two, one], [one, two], [{"role": "tool", "content": text} for text in "12"]):
        assert f"{expected}<|start|>user" in rendered([USER, calls, *results, USER])
    assert rendered([USER, calls, two]).endswith(
        called("f", 1) + called("g", 2) + result("g", "2") + "<|start|>assistant"
    )
    stray = {"role": "tool", "content": "3", "tool_call_id": "c3"}
    assert expected + result("g", "3") in rendered([USER, calls, one, two, stray])


def test_instructions_are_in_one_message() -> None:
    prompt = rendered([SYSTEM, USER, ANSWER, {"role": "system", "content": "Be brief."}, USER])
    assert prompt.startswith("<|start|>developer<|message|>Be kind.\n\nBe brief.<|end|><|start|>user")
    assert rendered([USER]).startswith(NO_INSTRUCTIONS)


def test_tools_have_descriptions() -> None:
    bare = [{"type": "function", "function": {"name": "clock", "parameters": {}, "description": None}}]
    assert "// \nclock: {}" in rendered([USER], tools=json.dumps(bare))
    assert harmony_tools(TOOLS) == TOOLS and harmony_tools(None) is None


def test_an_answer_goes_on() -> None:
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert rendered([USER, ANSWER], **options).endswith("<|start|>assistant<|channel|>final<|message|>Fine.")


def test_the_templates_own_words() -> None:
    with pytest.raises(Refused, match="no call before this result"):
        rendered([USER, RESULT])
