"""/v1/messages: the chat that is made of a request."""

import json
from pathlib import Path
from typing import Any

import pytest

from common.config import HttpConfig
from gateway_proc.conversation import conversation_of
from tests.helpers_templates import QWEN3
from tests.unit.gateway_world import World, answering, play, words
from tests.unit.test_gateway_anthropic import BODY, COUNT, PATH, QWEN, SCHEMA, TOOL, USE, USER, chat_of

EFFORT = "{{ messages }}{{ reasoning_effort }}{% if add_generation_prompt %}{% endif %}"


def test_a_conversation_with_tools_as_clients_send_it_back(short_dir: Path) -> None:
    """With everything that Anthropic's SDK writes out of an answer of ours, and unknown fields refused."""
    said = [
        {"type": "thinking", "thinking": "so", "signature": "msg_1"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "Let me see.", "citations": None},
        USE | {"caller": None, "toolset_name": None},
        USE | {"id": "2", "caller": {"type": "direct"}, "cache_control": {"type": "ephemeral"}},
    ]
    results = [
        {"type": "text", "text": "Here:"},
        {"type": "tool_result", "tool_use_id": "1", "content": "rain", "is_error": False},
        {"type": "tool_result", "tool_use_id": "2", "content": [{"type": "text", "text": t} for t in ("a", "b")]},
    ]
    turns = [USER, {"role": "assistant", "content": said}, {"role": "user", "content": results}]

    async def test(world: World) -> None:
        response = await world.post(PATH, BODY | {"messages": turns, "tools": [TOOL | {"type": "custom"}]})
        assert response.status_code == 200, response.text
        asked = await world.generated()
        assert [(m.role, m.content) for m in asked.chat or ()] == [
            ("user", "hi"), ("assistant", "Let me see."), ("tool", "rain"), ("tool", "a\nb"), ("user", "Here:")
        ]  # fmt: skip
        extra = [json.loads(m.extra) for m in asked.chat or () if m.extra]
        assert extra[0]["reasoning_content"] == "so"
        assert [(c["id"], json.loads(c["function"]["arguments"])) for c in extra[0]["tool_calls"]] == [
            ("1", {"city": "Rome"}), ("2", {"city": "Rome"})
        ]  # fmt: skip
        assert [e["tool_call_id"] for e in extra[1:]] == ["1", "2"]

    play(short_dir, answering(words("ok"), QWEN), test, HttpConfig(strict_fields=True))


def test_system_prompts() -> None:
    blocks = [{"type": "text", "text": t} for t in ("x-anthropic-billing-header: cc_version=1; cch=5;", "a", "b")]
    chat, _ = chat_of(system=blocks, messages=[USER, {"role": "system", "content": "c"}])
    assert [(m.role, m.content) for m in chat.messages] == [("system", "a\nb"), ("user", "hi"), ("system", "c")]


def test_a_last_message_of_the_assistant_is_gone_on_with() -> None:
    begun = {"role": "assistant", "content": "It"}
    assert chat_of(messages=[USER, begun])[0].continue_final_message
    assert not chat_of(messages=[USER, begun, USER])[0].continue_final_message
    assert not chat_of(messages=[USER, {"role": "assistant", "content": [USE]}])[0].continue_final_message


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "weather"}, "weather"),
    ],
)
@pytest.mark.parametrize("single", [None, False, True])
def test_choices_of_tools(choice: dict[str, Any], expected: str, single: bool | None) -> None:
    given = choice if single is None else choice | {"disable_parallel_tool_use": single}
    chat, _ = chat_of(tools=[TOOL | {"strict": True}], tool_choice=given)
    found = chat.tool_choice
    assert (found if isinstance(found, str) or found is None else found.function.name) == expected
    assert chat.parallel_tool_calls is (None if single is None else not single)
    assert chat.tools is not None and chat.tools[0].function.strict


ENABLED, DISABLED, ADAPTIVE = ({"thinking": {"type": t}} for t in ("enabled", "disabled", "adaptive"))


@pytest.mark.parametrize(
    ("template", "fields", "arguments", "effort", "unused"),
    [
        (QWEN3, {}, None, None, []),
        (QWEN3, ADAPTIVE, None, None, []),
        (QWEN3, ENABLED, {"enable_thinking": True}, None, []),
        (QWEN3, DISABLED, {"enable_thinking": False}, None, []),
        ("{% if thinking %}{% endif %}", DISABLED, {"thinking": False}, None, []),
        ("{{ message.thinking }}", DISABLED, None, None, ["thinking.type"]),
        ("{{ message.thinking }}", ENABLED, None, None, []),
        (QWEN3, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"enable_thinking": True}, None,
         ["thinking.budget_tokens"]),
        (QWEN3, {"output_config": {"effort": "high"}}, None, None, ["output_config.effort"]),
        (EFFORT, {"output_config": {"effort": "high"}}, None, "high", []),
    ],
)  # fmt: skip
def test_thinking_and_effort_as_the_template_knows_them(
    template: str, fields: dict[str, Any], arguments: Any, effort: str | None, unused: list[str]
) -> None:
    chat, found = chat_of(template, **fields)
    assert (chat.chat_template_kwargs, chat.reasoning_effort, found) == (arguments, effort, unused)


def test_what_has_no_effect_is_named_in_the_answer(short_dir: Path) -> None:
    async def test(world: World) -> None:
        body = BODY | {"output_config": {"effort": "low"}, "zap": 1}
        for path in (PATH, COUNT):
            response = await world.post(path, body)
            assert response.status_code == 200
            ignored = response.headers["x-rhizome-ignored-fields"].split(", ")
            assert {"zap", "output_config.effort"} <= set(ignored)

    play(short_dir, answering(words("b"), QWEN), test)


def test_an_output_format() -> None:
    chat, _ = chat_of(output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    grammar = conversation_of(chat, QWEN).grammar
    assert grammar is not None and json.loads(grammar.text) == SCHEMA
