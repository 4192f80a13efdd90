"""/v1/responses against a played cluster."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from common.config import HttpConfig
from common.messages import ChatMessage, ErrorCode, Finish, Generate, RequestError
from common.sampling_params import Grammar
from tests.unit.gateway_world import World, answering, play, words

PATH = "/v1/responses"
HELLO = answering(words("He", "llo"))
CALL = {"type": "function_call", "name": "f", "arguments": "{}"}
SPACE = {"type": "namespace", "name": "a"}


def test_a_response(short_dir: Path) -> None:
    async def test(world: World) -> None:
        body = {"input": "hi", "instructions": "Be brief.", "max_output_tokens": 7, "metadata": {"a": "b"}, "top_k": 3}
        answer = (await world.post(PATH, body)).json()
        assert (answer["object"], answer["status"], answer["metadata"]) == ("response", "completed", {"a": "b"})
        (item,) = answer["output"]
        assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
        assert item["content"] == [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}]
        assert answer["usage"] == {
            "input_tokens": 3, "output_tokens": 2, "total_tokens": 5,
            "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        }  # fmt: skip
        assert Response.model_validate(answer).output_text == "Hello" and answer["truncation"] == "disabled"
        asked = await world.generated()
        assert asked.truncate_prompt_tokens is None
        assert asked.chat == (ChatMessage("system", "Be brief."), ChatMessage("user", "hi"))
        assert (asked.params.max_tokens, asked.params.top_k, asked.stream) == (7, 3, False)
        turns = [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            item,
            {"role": "user", "content": "x"},
        ]
        assert (await world.post(PATH, {"input": turns})).status_code == 200
        asked = await world.generated()
        assert [(m.role, m.content) for m in asked.chat] == [("user", "hi"), ("assistant", "Hello"), ("user", "x")]

    play(short_dir, HELLO, test)


def test_an_input_that_may_be_cut(short_dir: Path) -> None:
    async def test(world: World) -> None:
        for truncation, kept in (("auto", -1), ("disabled", None)):
            answer = (await world.post(PATH, {"input": "hi", "truncation": truncation})).json()
            assert answer["truncation"] == truncation
            assert (await world.generated()).truncate_prompt_tokens == kept
        refused = await world.post(PATH, {"input": "hi", "truncation": "middle"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "truncation")

    play(short_dir, HELLO, test)


@pytest.mark.parametrize(("finish", "status"), [(Finish.STOP, "completed"), (Finish.LENGTH, "incomplete")])
def test_a_streamed_response(short_dir: Path, finish: Finish, status: str) -> None:
    async def test(world: World) -> None:
        response = await world.post(PATH, {"input": "hi", "stream": True})
        assert response.headers["content-type"].startswith("text/event-stream")
        *parts, done = response.text.removesuffix("\n\n").split("\n\n")
        assert done == "data: [DONE]"
        found = [part.split("\n") for part in parts]
        data = [json.loads(line.removeprefix("data: ")) for _, line in found]
        assert [name.removeprefix("event: ") for name, _ in found] == [d["type"] for d in data]
        assert [d["sequence_number"] for d in data] == list(range(len(data)))
        assert [d["type"].removeprefix("response.") for d in data] == [
            "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
            "output_text.delta", "output_text.done", "content_part.done", "output_item.done", status,
        ]  # fmt: skip
        assert [d["delta"] for d in data if "delta" in d] == ["He", "llo"]
        for each in data:
            TypeAdapter(ResponseStreamEvent).validate_python(each)
        last = data[-1]["response"]
        assert last["status"] == status and last["output"][0]["content"][0]["text"] == "Hello"
        assert last["incomplete_details"] == (None if finish is Finish.STOP else {"reason": "max_output_tokens"})

    play(short_dir, answering(words("He", "llo", finish=finish)), test)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_the_cluster_cuts_off(short_dir: Path, stream: bool) -> None:
    async def test(world: World) -> None:
        response = await world.post(PATH, {"input": "hi", "stream": stream})
        if not stream:
            assert (response.status_code, response.json()["error"]["code"]) == (503, "shutting_down")
            return
        last = failed(response.text)
        assert last["error"] == {
            "code": "server_error", "message": "the answer was cut off", "param": None,
            "type": "service_unavailable_error",
        }  # fmt: skip

    play(short_dir, answering(words("He", "llo", finish=Finish.ABORT)), test)


def failed(text: str) -> dict[str, Any]:
    """The response with which a stream ended that failed after it had begun."""
    *events, done = text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]" and events[0].startswith("event: response.created\n")
    assert events[-1].startswith("event: response.failed\n")
    data = [json.loads(event.split("data: ")[1]) for event in events]
    assert [each["sequence_number"] for each in data] == list(range(len(data)))
    for each in data:
        TypeAdapter(ResponseStreamEvent).validate_python(each)
    last: dict[str, Any] = data[-1]["response"]
    assert (last["id"], last["status"], last["output"]) == (data[0]["response"]["id"], "failed", [])
    return last


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        (ErrorCode.INVALID, "invalid_prompt", "invalid_request_error"),
        (ErrorCode.OVERLOADED, "rate_limit_exceeded", "rate_limit_error"),
        (ErrorCode.INTERNAL, "server_error", "server_error"),
        (ErrorCode.DEADLINE, "server_error", "timeout_error"),
    ],
)
def test_a_stream_that_fails_ends_with_a_typed_event(short_dir: Path, error: ErrorCode, code: str, kind: str) -> None:
    def generate(msg: Generate) -> Iterable[Any]:
        yield from words("He", finish=Finish.NONE)(msg)
        yield RequestError(msg.rid, error, "no more", "params.grammar")

    async def test(world: World) -> None:
        last = failed((await world.post(PATH, {"input": "hi", "stream": True})).text)
        assert (last["error"]["code"], last["error"]["type"]) == (code, kind)

    play(short_dir, answering(generate), test)


def test_a_format(short_dir: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"type": ["string", "null"], "default": None}}}

    async def test(world: World) -> None:
        form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
        answer = (await world.post(PATH, {"input": "hi", "text": {"format": form}})).json()
        assert answer["text"]["format"] == form
        assert (await world.generated()).params.grammar == Grammar("json_schema", json.dumps(schema))

    play(short_dir, HELLO, test)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "file_search", "vector_store_ids": ["a"]}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "web_search"}]}]}, "tools[0].tools[0].type"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "function"}]}]}, "tools[0].tools[0].name"),
        ({"tools": [SPACE | {"tools": [{"type": "function", "name": f"f{i}"} for i in range(129)]}]}, "tools"),
        ({"tools": [SPACE | {"name": "a" * 65, "tools": []}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"include": ["message.output_text.logprobs"]}, "include[0]"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"type": "local_shell_call"}]}, "input[0].type"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call", "call_id": "1", "arguments": "{}"}]}, "input[0].name"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [CALL | {"call_id": str(i)} for i in range(129)]}, "input"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0].output"),
        (
            {"input": [{"type": "function_call_output", "call_id": "1", "output": [{"type": "input_image"}]}]},
            "input[0].output[0].type",
        ),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_what_is_refused(short_dir: Path, fields: dict[str, Any], param: str, stream: bool) -> None:
    async def test(world: World) -> None:
        response = await world.post(PATH, {"input": "hi", "stream": stream} | fields)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"].startswith(param), response.text

    play(short_dir, HELLO, test)


@pytest.mark.parametrize("stream", [True, False])
def test_the_cluster_refuses(short_dir: Path, stream: bool) -> None:
    def refuse(msg: Generate) -> list[Any]:
        return [RequestError(msg.rid, ErrorCode.TOO_LONG, "too long", "chat")]

    async def test(world: World) -> None:
        response = await world.post(PATH, {"input": "hi", "stream": stream})
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["param"], error["code"]) == ("input", "context_length_exceeded")

    play(short_dir, answering(refuse), test)


def test_the_official_sdk_understands_it(short_dir: Path) -> None:
    async def test(world: World) -> None:
        url = f"{world.client.base_url}".rstrip("/") + "/v1"
        sdk = openai.AsyncOpenAI(base_url=url, api_key="none", http_client=world.client, max_retries=0)
        options: dict[str, Any] = {"model": "tiny", "input": "hi"}
        whole = await sdk.responses.create(**options)
        assert whole.output_text == "Hello" and whole.usage is not None and whole.usage.output_tokens == 2
        async with sdk.responses.stream(**options) as stream:
            seen = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert seen[0] == "response.created" and seen[-1] == "response.completed"
        assert final.output_text == "Hello" and final.usage == whole.usage

    play(short_dir, HELLO, test)


def test_answers_that_openai_s_sdk_sends_back_are_known_to_the_last_field(short_dir: Path) -> None:
    async def test(world: World) -> None:
        url = f"{world.client.base_url}".rstrip("/") + "/v1"
        sdk = openai.AsyncOpenAI(base_url=url, api_key="none", http_client=world.client, max_retries=0)
        first = await sdk.responses.create(model="tiny", input="hi")
        for turn in (first.output[0], first.output[0].model_dump()):
            again = await sdk.responses.create(model="tiny", input=[turn, {"role": "user", "content": "x"}])  # type: ignore[list-item]
            assert again.output_text == "Hello"
        said = (await sdk.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])).choices[
            0
        ]
        for message in (said.message, said.message.model_dump()):
            await sdk.chat.completions.create(model="tiny", messages=[message])  # type: ignore[list-item]

    play(short_dir, HELLO, test, HttpConfig(strict_fields=True))
