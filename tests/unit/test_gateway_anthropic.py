"""/v1/messages and /v1/messages/count_tokens: what is asked of the cluster, and its answers in Anthropic's form."""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages import ChatMessage, ErrorCode, Finish, Generate, RequestError
from common.rows import Row
from gateway_proc.anthropic_answer import Answer
from gateway_proc.chat_reader import ChoiceReader
from gateway_proc.conversation import conversation_of
from gateway_proc.errors import ApiError
from gateway_proc.generation import Usage
from gateway_proc.schemas.anthropic import MessagesRequest
from gateway_proc.schemas.chat import ChatRequest
from tests.helpers_templates import QWEN3
from tests.unit.fake_frontend import rows
from tests.unit.frontend_world import INFO
from tests.unit.gateway_world import HELLO, KEYS, World, answering, play, words

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
USER = {"role": "user", "content": "hi"}
BODY: dict[str, Any] = {"model": "tiny", "max_tokens": 7, "messages": [USER]}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL: dict[str, Any] = {"name": "weather", "description": "says it", "input_schema": SCHEMA}
USE = {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Rome"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
QWEN = replace(INFO, chat_template=QWEN3)


def told(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, each named after its type."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    found = []
    for part in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def chat_of(template: str = QWEN3, **fields: Any) -> tuple[ChatRequest, list[str]]:
    body = MessagesRequest.model_validate_json(json.dumps(BODY | fields))
    body.check_supported()
    return body.as_chat(template)


def put_together(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of a stream, which must be well-formed."""
    assert [e["type"] for e in events if e["type"].startswith("message")] == [
        "message_start", "message_delta", "message_stop"
    ]  # fmt: skip
    assert events[0]["type"] == "message_start" and [e["type"] for e in events[-2:]] == [
        "message_delta", "message_stop"
    ]  # fmt: skip
    message: dict[str, Any] = events[0]["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    opened, arguments = False, ""
    for event in events[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert not opened and event["index"] == len(message["content"])
                message["content"].append(dict(event["content_block"]))
                opened, arguments = True, ""
            case "content_block_delta":
                assert opened and event["index"] == len(message["content"]) - 1
                block, delta = message["content"][-1], event["delta"]
                match delta["type"]:
                    case "text_delta" | "thinking_delta" | "signature_delta":
                        field = delta["type"].removesuffix("_delta")
                        block[field] += delta[field]
                    case "input_json_delta":
                        arguments += delta["partial_json"]
            case "content_block_stop":
                assert opened and event["index"] == len(message["content"]) - 1
                opened = False
                with suppress(ValueError):  # a call that was cut off
                    message["content"][-1] |= {"input": json.loads(arguments)} if arguments else {}
            case other:
                assert other == "ping"
    assert not opened
    return message | events[-2]["delta"] | {"usage": events[-2]["usage"]}


def test_a_message(short_dir: Path) -> None:
    async def test(world: World) -> None:
        body = BODY | {
            "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            "stop_sequences": ["END"], "temperature": 0.5, "top_p": 0.9, "top_k": 3, "metadata": {"user_id": "joe"},
            "service_tier": "auto",
        }  # fmt: skip
        response = await world.post(PATH, body, headers={"x-request-id": "abc", "anthropic-version": "2023-06-01"})
        assert "x-rhizome-ignored-fields" not in response.headers
        assert response.json() == {
            "id": "msg_abc", "type": "message", "role": "assistant", "model": "tiny",
            "content": [{"type": "text", "text": "Hello"}], "stop_reason": "end_turn", "stop_sequence": None,
            "usage": {"input_tokens": 2, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 1,
                      "output_tokens": 2},
        }  # fmt: skip
        asked = await world.generated()
        assert asked.chat == (ChatMessage("system", "Be brief."), ChatMessage("user", "hi"))
        params = asked.params
        assert (params.max_tokens, params.stop, params.top_k, asked.stream) == (7, ("END",), 3, False)
        assert (params.temperature, params.top_p) == (0.5, 0.9)

    play(short_dir, HELLO, test)


def test_a_streamed_message(short_dir: Path) -> None:
    async def test(world: World) -> None:
        events = told(await world.post(PATH, BODY | {"stream": True}))
        assert [e["type"] for e in events] == [
            "message_start", "ping", "content_block_start", "content_block_delta", "content_block_delta",
            "content_block_stop", "message_delta", "message_stop",
        ]  # fmt: skip
        assert [e["delta"]["text"] for e in events if e["type"] == "content_block_delta"] == ["He", "llo"]
        assert events[0]["message"]["usage"]["input_tokens"] == 2
        whole = (await world.post(PATH, BODY)).json()
        assert put_together(events) | {"id": ""} == whole | {"id": ""}

    play(short_dir, HELLO, test)


def test_thoughts_and_calls(short_dir: Path) -> None:
    text = ["<think>", "so", "</think>\n\n", "Let me see. ", *CALL, "\n", CALL.replace("Rome", "Oslo")]

    async def test(world: World) -> None:
        body = BODY | {"tools": [TOOL]}
        whole = (await world.post(PATH, body)).json()
        asked = await world.generated()
        function = {"name": "weather", "description": "says it", "parameters": SCHEMA}
        assert json.loads(asked.tools) == [{"type": "function", "function": function}]
        thought, said, rome, oslo = whole["content"]
        assert thought == {"type": "thinking", "thinking": "so", "signature": whole["id"]}
        assert said["type"] == "text" and said["text"].strip() == "Let me see."
        assert [(c["type"], c["name"], c["input"]["city"]) for c in (rome, oslo)] == [
            ("tool_use", "weather", "Rome"), ("tool_use", "weather", "Oslo")
        ]  # fmt: skip
        assert whole["stop_reason"] == "tool_use" and rome["id"] != oslo["id"]
        streamed = put_together(told(await world.post(PATH, body | {"stream": True})))
        assert [known(b) for b in streamed["content"]] == [known(b) for b in whole["content"]]
        hidden = await world.post(PATH, body | {"thinking": {"type": "adaptive", "display": "omitted"}})
        assert [b["type"] for b in hidden.json()["content"]] == ["text", "tool_use", "tool_use"]
        one = body | {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
        assert [b["type"] for b in (await world.post(PATH, one)).json()["content"]] == ["thinking", "text", "tool_use"]

    play(short_dir, answering(words(*text), QWEN), test)


def known(block: dict[str, Any]) -> dict[str, Any]:
    """A block without what is drawn for each answer."""
    return {name: value for name, value in block.items() if name not in ("id", "signature")}


PIECES = ["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, CALL.replace('{"city": "Rome"}', "{}"), "\n", " ",
          "Rome", '{"name": "weather", "arguments": {"city": "R', '"}}', "é😀"]  # fmt: skip


@given(
    parts=st.lists(st.sampled_from(PIECES), max_size=8),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    finish=st.sampled_from([Finish.STOP, Finish.LENGTH]),
    stopped=st.sampled_from([None, 5, "END"]),
)
def test_a_stream_put_together_is_the_whole_answer(
    parts: list[str], cuts: list[int], finish: Finish, stopped: int | str | None
) -> None:
    text, pieces = "".join(parts), []
    while text:
        cut = cuts[len(pieces) % len(cuts)]
        pieces.append(text[:cut])
        text = text[cut:]
    body = MessagesRequest.model_validate_json(json.dumps(BODY | {"tools": [TOOL]}))
    chat, _ = body.as_chat(QWEN3)
    streamed = put_together(read(chat, pieces or [""], finish, stopped)[1])
    whole, _ = read(chat, ["".join(parts)], finish, stopped)
    assert [known(b) for b in streamed["content"]] == [known(b) for b in whole["content"]]
    assert [b.get("signature") for b in streamed["content"]] == [b.get("signature") for b in whole["content"]]
    assert (streamed["stop_reason"], streamed["stop_sequence"]) == (whole["stop_reason"], whole["stop_sequence"])
    kinds = [b["type"] for b in whole["content"]]
    assert (whole["stop_reason"] == "max_tokens") == (finish is Finish.LENGTH)
    assert whole["stop_reason"] != "tool_use" or "tool_use" in kinds


def read(
    chat: ChatRequest, pieces: list[str], finish: Finish, stopped: int | str | None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The whole message, and the events of a stream, of an answer that comes in these pieces."""
    reader, answer, usage = ChoiceReader(conversation_of(chat, QWEN)), Answer("msg_1", "tiny"), Usage()
    events = answer.begin(usage)
    for i, piece in enumerate(pieces):
        last = i == len(pieces) - 1
        row = Row(1, 0, piece, [7], finish if last else Finish.NONE, 3, 0, (), 0, stop_reason=stopped if last else None)
        for found in reader.feed(row):
            events += answer.take(found.delta)
    events += answer.end(reader, row)
    return answer.message(usage), events + answer.closing(usage)


@pytest.mark.parametrize(
    ("text", "finish", "stopped", "expected"),
    [
        ("a", Finish.STOP, None, ("end_turn", None)),
        ("a", Finish.STOP, 5, ("end_turn", None)),
        ("a", Finish.STOP, "END", ("stop_sequence", "END")),
        ('{"a": 1}', Finish.STOP, "END", ("stop_sequence", "END")),
        ("a", Finish.LENGTH, None, ("max_tokens", None)),
        (CALL, Finish.STOP, None, ("tool_use", None)),
        (CALL, Finish.STOP, "END", ("tool_use", None)),
        (CALL + " Well", Finish.STOP, "END", ("tool_use", None)),
        (CALL[:50], Finish.STOP, "END", ("stop_sequence", "END")),
        (CALL.replace('"Rome"', "") + '{"a": 1}', Finish.STOP, "END", ("stop_sequence", "END")),
        (CALL[:50], Finish.LENGTH, None, ("max_tokens", None)),
    ],
)
def test_why_an_answer_ended(text: str, finish: Finish, stopped: int | str | None, expected: tuple[str, Any]) -> None:
    chat, _ = MessagesRequest.model_validate_json(json.dumps(BODY | {"tools": [TOOL]})).as_chat(QWEN3)
    whole, _ = read(chat, [text], finish, stopped)
    assert (whole["stop_reason"], whole["stop_sequence"]) == expected


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", '"\\ud83d"', "[" * 300 + "]" * 300])
def test_arguments_that_json_cannot_carry_are_left_out(short_dir: Path, value: str) -> None:
    """Half of a surrogate pair is text that no answer can be encoded with, the others are no JSON."""

    async def test(world: World) -> None:
        response = await world.post(PATH, BODY | {"tools": [TOOL]})
        assert response.status_code == 200, response.text
        (block,) = response.json(parse_constant=pytest.fail)["content"]
        assert (block["type"], block["name"], block["input"]) == ("tool_use", "weather", {})

    play(short_dir, answering(words(CALL.replace('"Rome"', value)), QWEN), test)


def test_tokens_are_counted(short_dir: Path) -> None:
    async def test(world: World) -> None:
        counts = []
        for more in ({}, {"system": "abcd"}, {"tools": [TOOL]}, {"max_tokens": "x", "temperature": "x"}):
            response = await world.post(COUNT, {"messages": [USER]} | more)
            assert response.status_code == 200, response.text
            counts.append(response.json()["input_tokens"])
        plain, with_system, with_tools, with_others = counts
        assert plain == with_others and with_system > plain + 4 and with_tools >= plain
        assert (await world.post(COUNT, {"messages": [USER], "model": "x"})).status_code == 404

    play(short_dir, answering(words("b"), QWEN), test)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": [USE | {"input": None}]}]}, "messages[0].content[0].input"),
        ({"messages": [{"role": "assistant", "content": [USE] * 129}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [
            {"type": "image"}]}]}]}, "messages[0].content[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}] * 5000}]}, "messages"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"temperature": -1}, "temperature"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [True, False])
def test_what_is_refused(short_dir: Path, fields: dict[str, Any], param: str, stream: bool) -> None:
    async def test(world: World) -> None:
        response = await world.post(PATH, BODY | {"stream": stream} | fields)
        assert response.status_code == 400, response.text
        body = response.json()
        assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
        assert body["error"]["param"] == param and body["error"]["message"].startswith(param)

    play(short_dir, HELLO, test)


@pytest.mark.parametrize(
    ("code", "field", "status", "kind", "param"),
    [
        (ErrorCode.TOO_LONG, "chat", 400, "invalid_request_error", "messages"),
        (ErrorCode.INVALID, "params.stop", 400, "invalid_request_error", "stop_sequences"),
        (ErrorCode.INVALID, "template_args.enable_thinking", 400, "invalid_request_error", "thinking.type"),
        (ErrorCode.OVERLOADED, "", 429, "rate_limit_error", None),
        (ErrorCode.SHUTTING_DOWN, "", 503, "overloaded_error", None),
        (ErrorCode.INTERNAL, "", 500, "api_error", None),
        (ErrorCode.DEADLINE, "", 504, "timeout_error", None),
    ],
)
@pytest.mark.parametrize("begun", [False, True])
def test_the_cluster_refuses(
    short_dir: Path, code: ErrorCode, field: str, status: int, kind: str, param: str | None, begun: bool
) -> None:
    def refuse(msg: Generate) -> Any:
        if begun:
            yield rows(msg.rid, "begun", 1)
        yield RequestError(msg.rid, code, "no", field)

    async def test(world: World) -> None:
        response = await world.post(PATH, BODY | {"stream": True})
        if begun:
            assert response.status_code == 200
            body = told(response)[-1]
        else:
            assert response.status_code == status
            body = response.json()
        assert body["type"] == "error"
        assert (body["error"]["type"], body["error"]["param"]) == (kind, param)

    play(short_dir, answering(refuse), test)


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_was_cut_off_is_an_error(short_dir: Path, stream: bool) -> None:
    async def test(world: World) -> None:
        response = await world.post(PATH, BODY | {"stream": stream})
        body = told(response)[-1] if stream else response.json()
        assert body["type"] == "error" and body["error"]["type"] == "overloaded_error"

    play(short_dir, answering(words("a", finish=Finish.ABORT)), test)


def test_keys_in_the_header_of_anthropic(short_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test(world: World) -> None:
        for path in (PATH, COUNT):
            for headers in ({"x-api-key": KEYS["alice"]}, {"authorization": f"Bearer {KEYS['alice']}"}):
                assert (await world.post(path, BODY, headers=headers)).status_code == 200
            for headers in ({}, {"x-api-key": "wrong"}, {"x-api-key": ""}, {"x-api-key": f"Bearer {KEYS['alice']}"}):
                refused = await world.post(path, BODY, headers=headers)
                assert refused.status_code == 401
                assert refused.json()["type"] == "error"
                assert refused.json()["error"]["type"] == "authentication_error"
            for bearer, key, status in ((KEYS["alice"], "wrong", 200), ("wrong", KEYS["alice"], 401)):
                both = {"authorization": f"Bearer {bearer}", "x-api-key": key}
                assert (await world.post(path, BODY, headers=both)).status_code == status
        other = await world.post("/v1/completions", {"prompt": "x"}, headers={"x-api-key": KEYS["alice"]})
        assert other.status_code == 401 and "type" not in other.json(), "elsewhere it is no key"

    with caplog.at_level("DEBUG"):
        play(short_dir, HELLO, test, keys=True)
    assert "key=alice" in caplog.text and not any(key in caplog.text for key in KEYS.values())


def test_paths_below_have_errors_in_the_same_form(short_dir: Path) -> None:
    async def test(world: World) -> None:
        for response, status, kind in (
            (await world.post("/v1/messages/batches", {}), 404, "not_found_error"),
            (await world.client.get(PATH), 405, "invalid_request_error"),
            (await world.post(PATH, BODY | {"model": "x"}), 404, "not_found_error"),
            (await world.post(PATH, headers={"content-length": str(2**40)}), 413, "request_too_large"),
        ):
            assert response.status_code == status
            assert (response.json()["type"], response.json()["error"]["type"]) == ("error", kind)
        assert "type" not in (await world.post("/v1/messages_", {})).json()
        world.service.backend = None  # type: ignore[assignment]  # a mistake of ours
        failed = await world.post(PATH, BODY)
        assert failed.status_code == 500 and failed.json()["error"]["type"] == "api_error"

    play(short_dir, HELLO, test)


def test_a_conversation_that_the_server_should_keep_is_refused_so_that_the_sdk_understands(short_dir: Path) -> None:
    async def test(world: World) -> None:
        for path in (PATH, COUNT):
            for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
                response = await world.post(path, BODY | {"thread": thread})
                error = response.json()["error"]
                assert response.status_code == 400 and error["param"] == "thread"
                assert error["details"] == {"error_code": "thread_unsupported_request"}
        assert (await world.post(PATH, BODY | {"thread": None})).status_code == 200

    play(short_dir, HELLO, test)


def test_an_unknown_end_is_an_error() -> None:
    chat, _ = chat_of()
    with pytest.raises(ApiError):
        Answer("msg_1", "tiny").end(ChoiceReader(conversation_of(chat, INFO)), None)
