"""A model that speaks the harmony format, over HTTP: what is asked of the cluster, and how its answers are shown."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.harmony import CHANNEL, END, MESSAGE, START
from common.messages import Finish
from common.parsers import Reasoning, ToolFormat, offer_calls
from common.sampling_params import Grammar
from tests.helpers_templates import HARMONY
from tests.unit.frontend_world import INFO
from tests.unit.gateway_world import World, answering, events, play, words
from tests.unit.test_gateway_conversation import CHAT, TOOLS, conversation

MODEL = replace(INFO, chat_template=HARMONY)
THOUGHT = (CHANNEL, "analysis", MESSAGE, "We", " see.", END)
FINAL = (START, "assistant", CHANNEL, "final", MESSAGE)
CALL = (START, "assistant", CHANNEL, "commentary", " to=functions.weather ", "json", MESSAGE, '{"city":', ' "Rome"}')
ANSWERED = answering(words(*THOUGHT, *FINAL, "Yes", "."), MODEL)
CALLED = answering(words(*THOUGHT, *CALL), MODEL)
WITH_TOOLS = {**CHAT, "tools": TOOLS}


def test_the_mark_at_the_end_is_not_shown(short_dir: Path) -> None:
    async def test(world: World) -> None:
        for name in ("include_stop_str_in_output", "no_stop_trim"):
            refused = await world.post("/v1/chat/completions", CHAT | {name: True})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == name
            assert (await world.post("/v1/chat/completions", CHAT | {name: False})).status_code == 200
            assert (await world.post("/v1/completions", {"prompt": "x", name: True})).status_code == 200

    play(short_dir, ANSWERED, test)


def test_an_answer(short_dir: Path) -> None:
    async def test(world: World) -> None:
        answer = (await world.post("/v1/chat/completions", CHAT)).json()
        message = answer["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("We see.", "Yes.")
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}, "with the header"
        assert (await world.generated()).params.skip_special_tokens is False
        together = (await world.post("/v1/chat/completions", CHAT | {"separate_reasoning": False})).json()
        assert together["choices"][0]["message"]["content"] == "We see.\n\nYes."
        hidden = (await world.post("/v1/chat/completions", CHAT | {"include_reasoning": False})).json()
        assert hidden["choices"][0]["message"] == {"role": "assistant", "content": "Yes.", "refusal": None}

    play(short_dir, ANSWERED, test)


def test_a_call_whole_and_streamed(short_dir: Path) -> None:
    async def test(world: World) -> None:
        choice = (await world.post("/v1/chat/completions", WITH_TOOLS)).json()["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
        assert choice["message"]["reasoning_content"] == "We see."
        found = events(await world.post("/v1/chat/completions", WITH_TOOLS | {"stream": True}))
        deltas = [chunk["choices"][0]["delta"] for chunk in found]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "We see."
        calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
        assert calls[0] == {"name": "weather", "arguments": ""}
        assert "".join(call["arguments"] for call in calls) == '{"city": "Rome"}'
        assert found[-1]["choices"][0]["finish_reason"] == "tool_calls"
        assert not any(delta.get("content") for delta in deltas)

    play(short_dir, CALLED, test)


@pytest.mark.parametrize(("choice", "content"), [("auto", ""), ("required", None)])
def test_a_stream_of_a_call_that_must_come_says_that_there_is_no_content(
    short_dir: Path, choice: str, content: str | None
) -> None:
    """Vercel's AI SDK begins a text with the first content that is none of null."""

    async def test(world: World) -> None:
        found = events(await world.post("/v1/chat/completions", WITH_TOOLS | {"stream": True, "tool_choice": choice}))
        assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": content}

    play(short_dir, CALLED, test)


def test_an_answer_that_is_cut_off(short_dir: Path) -> None:
    async def test(world: World) -> None:
        choice = (await world.post("/v1/chat/completions", WITH_TOOLS)).json()["choices"][0]
        assert choice["finish_reason"] == "length"
        thought = {"reasoning": "We see.", "reasoning_content": "We see."}
        assert choice["message"] == {"role": "assistant", "content": "", "refusal": None, **thought}

    play(short_dir, answering(words(*THOUGHT, *CALL[:4], finish=Finish.LENGTH), MODEL), test)


def test_a_response(short_dir: Path) -> None:
    async def test(world: World) -> None:
        asked: dict[str, Any] = {"input": "hi", "reasoning": {"effort": "high"}}
        answer = (await world.post("/v1/responses", asked)).json()
        thought, said = answer["output"]
        assert (thought["type"], thought["content"]) == ("reasoning", [{"type": "reasoning_text", "text": "We see."}])
        assert (said["type"], said["content"][0]["text"]) == ("message", "Yes.")
        assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": 5}
        assert answer["reasoning"] == {"effort": "high", "summary": None}
        generate = await world.generated()
        assert json.loads(generate.template_args) == {"reasoning_effort": "high"}
        assert generate.params.skip_special_tokens is False
        response = await world.post("/v1/responses", {"input": "hi", "reasoning": {"effort": "none"}})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "reasoning.effort")
        response = await world.post("/v1/responses", {"input": "hi", "reasoning": {"summary": "auto"}})
        assert response.headers["x-rhizome-ignored-fields"] == "reasoning.summary"  # the thoughts themselves are shown

    play(short_dir, ANSWERED, test)


@pytest.mark.parametrize("effort", ["low", "medium", "high"])
def test_efforts_go_to_the_template(effort: str) -> None:
    found = conversation(HARMONY, reasoning_effort=effort)
    assert json.loads(found.template["template_args"]) == {"reasoning_effort": effort}


def test_an_effort_that_the_format_does_not_know_is_refused(short_dir: Path) -> None:
    async def test(world: World) -> None:
        response = await world.post("/v1/chat/completions", CHAT | {"reasoning_effort": "minimal"})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "reasoning_effort") and "low, medium, high" in str(error)

    play(short_dir, ANSWERED, test)


def test_formats_and_grammars() -> None:
    plain, hidden = conversation(HARMONY), conversation(HARMONY, tools=TOOLS, tool_choice="none")
    for found in (plain, hidden):
        assert found.tool_format is None and found.reasoning is Reasoning.CHANNEL
        assert found.is_read and found.needs_special_tokens
    merged = conversation(HARMONY, separate_reasoning=False)
    assert merged.together and merged.is_read and merged.needs_special_tokens
    built_in = conversation(HARMONY, chat_template_kwargs={"builtin_tools": ["python"]})
    assert built_in.tool_format is ToolFormat.HARMONY, "its calls are shown"
    schema = conversation(HARMONY, guided_regex="a+").grammar
    assert schema == Grammar(
        "regex", "a+", opening="<|channel|>analysis<|message|>", closing="<|end|><|start|>assistant",
        heading="<|channel|>final<|message|>",
    )  # fmt: skip
    forced = conversation(HARMONY, tools=TOOLS, tool_choice="required").grammar
    assert forced is not None and forced.heading == "" and forced.closing == "<|end|><|start|>assistant"
    assert "to=functions.weather" in forced.text and "to=functions.clock" in forced.text


def test_calls_that_may_be_made_are_right_where_a_tool_is_strict() -> None:
    strict = [TOOLS[0], {"type": "function", "function": TOOLS[1]["function"] | {"strict": True}}]
    assert conversation(HARMONY, tools=TOOLS).grammar is None
    found = conversation(HARMONY, tools=strict)
    assert found.grammar == offer_calls([("weather", {}), ("clock", None)], Reasoning.CHANNEL)
    assert (found.grammar_field, found.forced) == ("tools", False)
    form = {"response_format": {"type": "json_object"}}
    offered = offer_calls([("weather", {}), ("clock", {})], Reasoning.CHANNEL, {"type": "object"})
    assert conversation(HARMONY, tools=TOOLS, **form).grammar == offered
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "So"}]
    assert conversation(HARMONY, tools=strict, messages=messages, continue_final_message=True).grammar is None
    built_in = {"builtin_tools": ["python"]}
    assert conversation(HARMONY, tools=strict, chat_template_kwargs=built_in).grammar is None, "calls of another form"


def test_an_answer_that_goes_on_is_in_its_channel_already() -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "So"}]
    found = conversation(HARMONY, messages=messages, continue_final_message=True, guided_regex="a+")
    assert found.grammar == Grammar("regex", "a+") and found.reasoning is Reasoning.CHANNEL
    opened = "<think></think>{% if add_generation_prompt %}{{ '<think>\\n' }}{% endif %}"
    assert conversation(opened, guided_regex="a+").reasoning is Reasoning.OPENED
    found = conversation(opened, messages=messages, continue_final_message=True, guided_regex="a+")
    assert found.grammar == Grammar("regex", "a+") and found.reasoning is Reasoning.TAGS


def test_reasoning_of_earlier_turns_under_any_name() -> None:
    for name in ("reasoning_content", "reasoning", "thinking"):
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", name: "hm"}]
        (_, answer) = conversation(HARMONY, messages=messages).messages
        assert json.loads(answer.extra) == {"reasoning_content": "hm"}
