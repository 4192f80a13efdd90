"""Chats with tools and reasoning: what is asked of the cluster, and how its answers are read."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.messages import Finish
from common.parsers import Reasoning, ToolFormat, force_call, offer_calls
from common.rows import Row
from common.sampling_params import Grammar
from gateway_proc.chat_reader import ChoiceReader
from gateway_proc.conversation import Conversation, conversation_of
from gateway_proc.errors import ApiError
from gateway_proc.schemas.chat import ChatRequest
from tests.unit.frontend_world import INFO
from tests.unit.gateway_world import World, answering, events, play, words
from tokenizer_proc.chat_template import ChatTemplate

HERMES = "{% if tools %}<tool_call>{% endif %}"
THINKING = "{{ messages }}{% if again %}<think></think>{% endif %}{% if add_generation_prompt %}{% endif %}"
PHI_4_MINI = "{% for m in messages %}{{ m.content }}{% if 'tools' in m %}{{ m['tools'] }}{% endif %}{% endfor %}"
UNKNOWN = "{% if tools %}<function={% endif %}"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "clock"}},
]


def conversation(template: str = HERMES, **fields: Any) -> Conversation:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    info = replace(INFO, chat_template=template, takes_tools=ChatTemplate(template, {}).takes_tools)
    return conversation_of(ChatRequest.model_validate_json(json.dumps(body)), info)


def row(text: str, finish: Finish = Finish.NONE, tokens: int = 1) -> Row:
    return Row(1, 0, text, [7] * tokens, finish, 3, 0, (), 0)


def test_tools_go_to_the_template() -> None:
    found = conversation(tools=TOOLS)
    assert json.loads(found.template["tools"]) == TOOLS
    assert found.tool_format is ToolFormat.HERMES and found.offered.keys() == {"weather", "clock"} and not found.forced
    hidden = conversation(tools=TOOLS, tool_choice="none")
    assert hidden.template == {} and hidden.tool_format is None and not hidden.is_read
    for template in ("{{ messages }}", PHI_4_MINI, PHI_4_MINI + "{{ '[TOOL_CALLS]' }}"):
        assert conversation(template, tools=TOOLS).tool_format is ToolFormat.HERMES, "the tokenizer describes them"
    assert conversation(UNKNOWN, tools=TOOLS).tool_format is None


def test_without_tools_nothing_is_a_call() -> None:
    for fields in ({}, {"tools": []}, {"tools": [], "tool_choice": "auto"}, {"tool_choice": "none"}):
        found = conversation(**fields)
        assert found.tool_format is None and not found.is_read
    built_in = {"builtin_tools": ["python"]}
    assert conversation(tool_choice="auto", chat_template_kwargs=built_in).tool_format is ToolFormat.HERMES


def test_forced_calls_have_a_grammar() -> None:
    required = conversation(tools=TOOLS, tool_choice="required").grammar
    named = conversation(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "clock"}}).grammar
    assert required is not None and '"weather"' in required.text and '"clock"' in required.text
    assert named is not None and '"clock"' in named.text and '"weather"' not in named.text
    one = conversation(tools=TOOLS, tool_choice="required", parallel_tool_calls=False).grammar
    assert one is not None and one != required
    alone = force_call([("clock", None)], ToolFormat.HERMES, parallel=False)
    assert named == alone, "a named function is called once, as with OpenAI"
    formatted = conversation(tools=TOOLS, tool_choice="required", response_format={"type": "json_object"}).grammar
    assert formatted == required, "the format is for answers without calls, as with OpenAI"


def test_calls_that_may_be_made_are_right_where_a_tool_is_strict() -> None:
    assert conversation(tools=TOOLS).grammar is None
    strict = [TOOLS[0], {"type": "function", "function": TOOLS[1]["function"] | {"strict": True}}]
    offered = [("weather", {}), ("clock", None)]
    found = conversation(tools=strict)
    assert (found.grammar, found.grammar_field, found.forced) == (offer_calls(offered, Reasoning.NONE), "tools", False)
    assert conversation(HERMES + THINKING, tools=strict).grammar == offer_calls(offered, Reasoning.TAGS)
    continued = conversation(HERMES + THINKING, tools=strict, continue_final_message=True)
    assert continued.grammar == offer_calls(offered, Reasoning.NONE)
    for other in ({"tool_choice": "none"}, {"template": UNKNOWN}, {"template": "{{ tools }}[TOOL_CALLS]"}):
        assert conversation(**{"tools": strict, **other}).grammar is None, other
    assert conversation(tools=strict, guided_regex="a").grammar == Grammar("regex", "a")


def test_calls_may_be_made_instead_of_an_answer_in_a_response_format() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    found = conversation(tools=TOOLS, response_format=form)
    assert (found.grammar, found.grammar_field) == (
        offer_calls([("weather", {}), ("clock", {})], Reasoning.NONE, schema),
        "response_format",
    )
    anything = conversation(tools=TOOLS, response_format={"type": "json_object"}).grammar
    assert anything == offer_calls([("weather", {}), ("clock", {})], Reasoning.NONE, {"type": "object"})
    assert conversation(tools=TOOLS, tool_choice="none", response_format={"type": "json_object"}).grammar == Grammar(
        "json_object"
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
        ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "template": UNKNOWN}, "tool_choice"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
def test_what_cannot_be_done_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        conversation(**fields)
    assert caught.value.param == param and caught.value.status == 400


def test_template_arguments() -> None:
    found = conversation(THINKING, chat_template_kwargs={"a": 1}, reasoning_effort="low", continue_final_message=True)
    assert json.loads(found.template["template_args"]) == {"a": 1, "reasoning_effort": "low"}
    assert found.template["continue_final_message"] is True and found.template["add_generation_prompt"] is False
    assert found.reasoning is Reasoning.TAGS
    switched = "{{ enable_thinking }}" + THINKING
    quiet = conversation(switched, reasoning_effort="none")
    assert json.loads(quiet.template["template_args"]) == {"enable_thinking": False}
    assert quiet.reasoning is Reasoning.NONE
    own = conversation(switched, reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})
    assert json.loads(own.template["template_args"]) == {"enable_thinking": True}
    knows = conversation("{{ reasoning_effort }}" + switched, reasoning_effort="none")
    assert json.loads(knows.template["template_args"]) == {"reasoning_effort": "none"}
    assert not conversation(THINKING, separate_reasoning=False).is_read


@pytest.mark.parametrize("fields", [{}, {"separate_reasoning": False}])
def test_a_grammar_lets_the_model_think_first(fields: dict[str, Any]) -> None:
    """Also where its thoughts are shown with the answer."""
    opened = "{% if add_generation_prompt %}{{ '<think>\\n' }}{% endif %}"
    schema = conversation(opened, response_format={"type": "json_object"}, **fields).grammar
    assert schema is not None and (schema.opening, schema.closing) == ("", "</think>")
    call = conversation("<tool_call>" + opened, tools=TOOLS, tool_choice="required", **fields)
    assert call.grammar is not None and call.grammar.closing == "</think>"
    reader = ChoiceReader(call)
    reader.collect(row(f"I could {CALL}</think>\n{CALL}", Finish.STOP))
    message = reader.message()
    assert len(message["tool_calls"]) == 1 and ("reasoning_content" in message) == (not fields)


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.mark.parametrize("width", [1, 3, 1000])
def test_calls_are_read_alike_at_once_and_streamed(width: int) -> None:
    whole, streamed = (ChoiceReader(conversation(tools=TOOLS)) for _ in range(2))
    text = "Let me see. " + CALL
    parts = [text[i : i + width] for i in range(0, len(text), width)]
    rows = [row(part, Finish.STOP if i == len(parts) - 1 else Finish.NONE) for i, part in enumerate(parts)]
    content, arguments, names = "", "", []
    for each in rows:
        whole.collect(each)
        for piece in streamed.feed(each):
            content += piece.delta.get("content", "")
            for call in piece.delta.get("tool_calls", ()):
                names += [call["function"]["name"]] if "name" in call["function"] else []
                arguments += call["function"]["arguments"]
    message = whole.message()
    (call,) = message["tool_calls"]
    assert call["type"] == "function" and call["id"] and call["function"]["name"] == "weather" and names == ["weather"]
    assert json.loads(call["function"]["arguments"]) == json.loads(arguments) == {"city": "Rome"}
    assert message["content"].strip() == content.strip() == "Let me see."
    assert whole.finish_reason(Finish.STOP) == streamed.finish_reason(Finish.STOP) == "tool_calls"
    assert whole.finish_reason(Finish.LENGTH) == "length"


@pytest.mark.parametrize("width", [1, 7, 1000])
def test_without_parallel_calls_one_is_shown(width: int) -> None:
    found = conversation(tools=TOOLS, parallel_tool_calls=False)
    assert found.grammar is None, "auto: the model decides whether it calls"
    whole, streamed = ChoiceReader(found), ChoiceReader(found)
    text = CALL + "\n" + CALL.replace("Rome", "Oslo") + CALL
    shown = []
    for i in range(0, len(text), width):
        each = row(text[i : i + width], Finish.STOP if i + width >= len(text) else Finish.NONE)
        whole.collect(each)
        shown += [call for piece in streamed.feed(each) for call in piece.delta.get("tool_calls", ())]
    (call,) = whole.message()["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}
    assert {c["index"] for c in shown} == {0} and "Oslo" not in json.dumps(shown)
    assert whole.message()["content"] is None and whole.finish_reason(Finish.STOP) == "tool_calls"


def test_an_answer_without_a_call_is_content() -> None:
    reader = ChoiceReader(conversation(tools=TOOLS))
    reader.collect(row("just words", Finish.STOP))
    assert reader.message() == {"role": "assistant", "content": "just words", "refusal": None}
    assert reader.finish_reason(Finish.STOP) == "stop"


THOUGHT = answering(words("<think>", "a", " b", "</think>", "\n\n", "c"), replace(INFO, chat_template=THINKING))
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}


def test_reasoning_is_told_apart(short_dir: Path) -> None:
    async def test(world: World) -> None:
        answer = (await world.post("/v1/chat/completions", CHAT)).json()
        message = answer["choices"][0]["message"]
        assert (message["reasoning"], message["reasoning_content"], message["content"]) == ("a b", "a b", "c")
        assert answer["usage"]["completion_tokens"] == 6
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}  # with the tag that opens it
        hidden = (await world.post("/v1/chat/completions", CHAT | {"include_reasoning": False})).json()
        assert not {"reasoning", "reasoning_content"} & hidden["choices"][0]["message"].keys()
        assert hidden["choices"][0]["message"]["content"] == "c"
        together = (await world.post("/v1/chat/completions", CHAT | {"separate_reasoning": False})).json()
        assert together["choices"][0]["message"]["content"] == "<think>a b</think>\n\nc"
        assert "completion_tokens_details" not in together["usage"]

    play(short_dir, THOUGHT, test)


def test_streamed_reasoning(short_dir: Path) -> None:
    async def test(world: World) -> None:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        found = events(await world.post("/v1/chat/completions", CHAT | options))
        deltas = [chunk["choices"][0]["delta"] for chunk in found[:-1]]
        for name in ("reasoning", "reasoning_content"):
            assert "".join(d.get(name, "") for d in deltas) == "a b"
        assert "".join(d.get("content", "") for d in deltas) == "c"
        assert found[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}

    play(short_dir, THOUGHT, test)


GEMMA = (
    "{% if tools %}<|tool_call>{% endif %}{{ messages }}{% if enable_thinking %}<|channel>thought<channel|>{% endif %}"
)


def test_special_tokens_around_reasoning_are_shown_and_end_where_a_grammar_begins() -> None:
    found = conversation(GEMMA)
    assert (found.reasoning, found.tool_format, found.needs_special_tokens) == (Reasoning.TAGS, None, True)
    reader = ChoiceReader(found)
    for text in ("<|channel>thought\n", "hm", "<channel|>Y", "es."):
        reader.collect(row(text))
    assert reader.message() == {
        "role": "assistant", "content": "Yes.", "refusal": None, "reasoning": "hm", "reasoning_content": "hm",
    }  # fmt: skip
    off = conversation(GEMMA, chat_template_kwargs={"enable_thinking": False})
    reader = ChoiceReader(off)
    reader.collect(row("<|channel>thought\n<channel|>Yes."))
    assert off.needs_special_tokens and reader.message()["content"] == "Yes."
    bound = conversation(GEMMA, response_format={"type": "json_object"})
    assert (bound.reasoning, bound.grammar) == (Reasoning.NONE, Grammar("json_object"))
    assert not bound.needs_special_tokens and not bound.is_read
    forced = conversation(GEMMA, tools=TOOLS, tool_choice="required")
    assert forced.grammar == force_call([("weather", SCHEMA), ("clock", None)], ToolFormat.GEMMA)
    reader = ChoiceReader(forced)
    reader.collect(row('[{"name": "weather", "arguments": {"city": "Köln"}}]', Finish.STOP))
    (call,) = reader.message()["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Köln"}'}
    assert reader.finish_reason(Finish.STOP) == "tool_calls"


def test_what_is_around_answers_is_not_shown_without_thoughts() -> None:
    template = "{{ messages }}<|extra_0|>{% if enable_thinking is false %}<think>\n\n</think>{% endif %}"
    found = conversation(template, chat_template_kwargs={"enable_thinking": False})
    assert found.reasoning is Reasoning.NONE and not found.needs_special_tokens
    reader = ChoiceReader(found)
    reader.collect(row("<answer>\nYes.\n</answer>", Finish.STOP))
    assert reader.message()["content"] == "Yes."
