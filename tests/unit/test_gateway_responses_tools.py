"""/v1/responses with functions and thoughts against a played cluster."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from common.config import HttpConfig
from common.messages import Finish
from gateway_proc.schemas.responses import ResponsesRequest
from tests.helpers_templates import QWEN3
from tests.unit.frontend_world import INFO
from tests.unit.gateway_world import World, answering, play, words

PATH = "/v1/responses"
QWEN = replace(INFO, chat_template=QWEN3)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather", "description": "How it is.", "parameters": CITY, "strict": False}
SPAWN = {"type": "function", "name": "spawn"}
AGENTS = {"type": "namespace", "name": "agents", "description": "Helpers.", "tools": [SPAWN]}
TOOLS = [WEATHER, AGENTS, {"type": "web_search", "external_web_access": False}]
THOUGHT = ("<think>\n", "Which", " city?", "\n</think>\n\n")
CALLS = (
    *('<tool_call>\n{"name": "wea', 'ther", "arguments": {"ci', 'ty": "Rom', 'a é"}}', "\n</tool_call>"),
    *('\n<tool_call>\n{"name": "agents__spawn", "arguments": {}}', "\n</tool_call>"),
)
CALLED = answering(words(*THOUGHT, "I ", "look.", "\n", *CALLS), QWEN)


def events_of(text: str) -> list[dict[str, Any]]:
    *events, done = text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    found = [json.loads(event.split("data: ", 1)[1]) for event in events]
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    for each in found:
        TypeAdapter(ResponseStreamEvent).validate_python(each)
    return found


def plain(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what is drawn for each answer."""
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


def test_thoughts_text_and_calls_are_items(short_dir: Path) -> None:
    async def test(world: World) -> None:
        response = await world.post(PATH, {"input": "hi", "tools": TOOLS, "include": ["reasoning.encrypted_content"]})
        answer = response.json()
        ignored = response.headers["x-rhizome-ignored-fields"].split(", ")
        assert ignored == ["tools_2_.external_web_access", "include", "tools_2_"]
        thought, said, called, spawned = answer["output"]
        assert thought["content"] == [{"type": "reasoning_text", "text": "Which city?"}] and thought["summary"] == []
        assert said["content"][0]["text"] == "I look."
        assert (called["name"], called["arguments"]) == ("weather", '{"city": "Roma é"}') and "namespace" not in called
        assert (spawned["namespace"], spawned["name"], spawned["arguments"]) == ("agents", "spawn", "{}")
        assert called["call_id"] != spawned["call_id"] and len({item["id"] for item in answer["output"]}) == 4
        assert {item["status"] for item in answer["output"]} == {"completed"} == {answer["status"]}
        assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
        assert (answer["tool_choice"], answer["parallel_tool_calls"]) == ("auto", True)
        assert answer["tools"][:2] == [WEATHER, AGENTS | {"tools": [SPAWN | {"parameters": None, "strict": False}]}]
        Response.model_validate(answer)
        shown = json.loads((await world.generated()).tools)
        assert [tool["function"]["name"] for tool in shown] == ["weather", "agents__spawn"]
        assert shown[0] == {"type": "function", "function": {k: v for k, v in WEATHER.items() if k != "type"}}

    play(short_dir, CALLED, test)


def test_a_stream_tells_what_the_whole_answer_tells(short_dir: Path) -> None:
    async def test(world: World) -> None:
        whole = (await world.post(PATH, {"input": "hi", "tools": TOOLS})).json()
        events = events_of((await world.post(PATH, {"input": "hi", "tools": TOOLS, "stream": True})).text)
        last = events[-1]["response"]
        assert events[-1]["type"] == "response.completed" and plain(last["output"]) == plain(whole["output"])
        kinds = [event["type"].removeprefix("response.") for event in events]
        around = ("output_item.added", "content_part.added"), ("content_part.done", "output_item.done")
        assert list(dict.fromkeys(kinds)) == [
            "created", "in_progress", *around[0], "reasoning_text.delta", "reasoning_text.done", *around[1],
            "output_text.delta", "output_text.done", "function_call_arguments.delta", "function_call_arguments.done",
            "completed",
        ]  # fmt: skip
        for number, item in enumerate(last["output"]):
            own = [event for event in events if event.get("output_index") == number]
            assert own[0]["item"] == item | {"status": "in_progress"} | (
                {"arguments": ""} if item["type"] == "function_call" else {"content": []}
            )
            assert own[-1]["item"] == item
            assert {event["item_id"] for event in own[1:-1]} == {item["id"]}
            text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
            assert "".join(event["delta"] for event in own if "delta" in event) == text
            (done,) = [event for event in own if event["type"].endswith(("_text.done", "arguments.done"))]
            assert done.get("text", done.get("arguments")) == text

    play(short_dir, CALLED, test)


@pytest.mark.parametrize("stream", [True, False])
def test_a_call_that_is_cut_off(short_dir: Path, stream: bool) -> None:
    async def test(world: World) -> None:
        response = await world.post(PATH, {"input": "hi", "tools": TOOLS, "stream": stream})
        answer = events_of(response.text)[-1]["response"] if stream else response.json()
        (item,) = answer["output"]
        assert (item["type"], item["arguments"], item["status"]) == ("function_call", '{"city": "Rom', "incomplete")
        assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})

    play(short_dir, answering(words(*CALLS[:3], finish=Finish.LENGTH), QWEN), test)


def test_a_conversation_with_calls_goes_on(short_dir: Path) -> None:
    """As clients keep it: the items of the answer as they came, and the results in any order."""

    async def test(world: World) -> None:
        asked: dict[str, Any] = {"input": "hi", "tools": TOOLS}
        first = (await world.post(PATH, asked)).json()
        a, b = (item["call_id"] for item in first["output"] if item["type"] == "function_call")
        parts = [{"type": "input_text", "text": "21"}, {"type": "input_text", "text": "degrees"}]
        results = [
            {"type": "function_call_output", "call_id": b, "output": '{"ok": true}'},
            {"type": "function_call_output", "call_id": a, "output": parts},
        ]
        sealed = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
        turns = [{"role": "user", "content": "hi"}, sealed, *first["output"], *results]
        response = await world.post(PATH, asked | {"input": turns})
        assert response.status_code == 200, response.text
        await world.generated()
        _, said, *found = (await world.generated()).chat
        assert (said.role, said.content) == ("assistant", "I look.")
        extra = json.loads(said.extra)
        assert extra["reasoning_content"] == "Which city?"
        calls = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in extra["tool_calls"]]
        assert calls == [(a, "weather", '{"city": "Roma é"}'), (b, "agents__spawn", "{}")]
        told = [(m.role, m.content, json.loads(m.extra)["tool_call_id"]) for m in found]
        assert told == [("tool", '{"ok": true}', b), ("tool", "21\ndegrees", a)]

    play(short_dir, CALLED, test, HttpConfig(strict_fields=False))


def test_turns_of_the_assistant_are_told_apart() -> None:
    def call(name: str) -> dict[str, Any]:
        return {"type": "function_call", "call_id": name, "name": name, "arguments": "{}"}

    def thought(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}

    def said(text: str) -> dict[str, Any]:
        return {"type": "message", "role": "assistant", "content": text}

    result = {"type": "function_call_output", "call_id": "d", "output": ""}
    items = [said("a"), said("b"), thought("c"), call("d"), result, thought("e"), said("f"), call("g"), call("h")]
    chat, _ = ResponsesRequest.model_validate_json(json.dumps({"input": items})).as_chat()
    found = [
        (m.role, m.content, m.reasoning_content, [call.function.name for call in m.tool_calls or ()])
        for m in chat.messages
    ]
    assert found == [
        ("assistant", "a", None, []), ("assistant", "b", None, []), ("assistant", None, "c", ["d"]),
        ("tool", "", None, []), ("assistant", "f", "e", ["g", "h"]),
    ]  # fmt: skip


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_forced_calls(short_dir: Path, choice: Any) -> None:
    async def test(world: World) -> None:
        asked = {"input": "hi", "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
        answer = (await world.post(PATH, asked)).json()
        assert [item["type"] for item in answer["output"]] == ["function_call"]
        assert (answer["tool_choice"], answer["parallel_tool_calls"]) == (choice, False)
        assert (await world.generated()).params.grammar is not None

    play(short_dir, answering(words(*CALLS[:5]), QWEN), test)


def test_the_official_sdk_reads_calls(short_dir: Path) -> None:
    class Weather(BaseModel):
        """How it is."""

        city: str

    async def test(world: World) -> None:
        url = f"{world.client.base_url}".rstrip("/") + "/v1"
        sdk = openai.AsyncOpenAI(base_url=url, api_key="none", http_client=world.client, max_retries=0)
        tool = openai.pydantic_function_tool(Weather, name="weather")
        flat: Any = {"type": "function", **tool["function"]}
        options: dict[str, Any] = {"model": "tiny", "input": [{"role": "user", "content": "hi"}], "tools": [flat]}
        async with sdk.responses.stream(**options) as stream:
            deltas = [event.delta async for event in stream if event.type == "response.function_call_arguments.delta"]
            final = await stream.get_final_response()
        call: Any = final.output[-1]
        assert "".join(deltas) == '{"city": "Roma é"}' == call.arguments and call.parsed_arguments == {"city": "Roma é"}
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "21"}
        again = await sdk.responses.create(**options | {"input": [*options["input"], *final.output, result]})
        assert again.output[-1].type == "function_call"
        for turn in (again.output, [item.model_dump() for item in again.output]):
            await sdk.responses.create(**options | {"input": [*turn, result]})

    play(short_dir, answering(words(*THOUGHT, *CALLS[:5]), QWEN), test, HttpConfig(strict_fields=True))


def test_as_many_functions_and_as_long_names_as_chats_take() -> None:
    body = {"input": "hi", "tools": [AGENTS | {"tools": [SPAWN | {"name": f"f{i}"} for i in range(128)]}]}
    chat, _ = ResponsesRequest.model_validate_json(json.dumps(body)).as_chat()
    assert [tool.function.name for tool in chat.tools or ()] == [f"agents__f{i}" for i in range(128)]
    named = AGENTS | {"name": "a" * 64, "tools": [SPAWN | {"name": "f" * 128}]}
    call = {"type": "function_call", "call_id": "1", "namespace": "a" * 64, "name": "f" * 128, "arguments": "{}"}
    chat, _ = ResponsesRequest.model_validate_json(json.dumps({"input": [call], "tools": [named]})).as_chat()
    assert chat.tools and chat.messages[0].tool_calls
    assert chat.tools[0].function.name == chat.messages[0].tool_calls[0].function.name == "a" * 64 + "__" + "f" * 128
