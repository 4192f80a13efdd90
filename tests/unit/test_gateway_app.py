"""The gateway's endpoints against a played cluster: formats, statuses, errors, headers."""

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.config import HttpConfig
from common.messages import ChatMessage, ErrorCode, Finish, Generate, RequestError, ints
from tests.unit.fake_frontend import rows
from tests.unit.gateway_world import KEYS, World, answering, events, play, words

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
HELLO = answering(words("He", "llo"))


def test_a_chat(short_dir: Path) -> None:
    async def test(world: World) -> None:
        response = await world.post("/v1/chat/completions", CHAT | {"model": "tiny", "max_tokens": 7})
        assert response.status_code == 200, response.text
        answer = response.json()
        assert answer["id"] == f"chatcmpl-{response.headers['x-request-id']}"
        assert (answer["object"], answer["model"]) == ("chat.completion", "tiny")
        (choice,) = answer["choices"]
        assert choice["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
        assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
        assert answer["usage"] == {
            "prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 1},
        }  # fmt: skip
        asked = await world.generated()
        assert asked.chat == (ChatMessage("user", "hi"),) and not asked.stream and asked.params.max_tokens == 7

    play(short_dir, HELLO, test)


def test_a_streamed_chat(short_dir: Path) -> None:
    async def test(world: World) -> None:
        options = {"stream": True, "n": 2, "stream_options": {"include_usage": True}}
        found = events(await world.post("/v1/chat/completions", CHAT | options))
        assert {chunk["object"] for chunk in found} == {"chat.completion.chunk"} and len({c["id"] for c in found}) == 1
        assert found[-1]["choices"] == [] and found[-1]["usage"]["completion_tokens"] == 4
        assert found[-1]["usage"]["prompt_tokens"] == 3  # once, not for each choice
        assert all(chunk["usage"] is None for chunk in found[:-1])
        for index in range(2):
            deltas = [c["choices"][0] for c in found[:-1] if c["choices"][0]["index"] == index]
            assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
            assert [d["delta"] for d in deltas[1:-1]] == [{"content": "He"}, {"content": "llo"}]
            assert deltas[-1]["delta"] == {} and deltas[-1]["finish_reason"] == "stop"
            assert all(d["finish_reason"] is None for d in deltas[:-1])

    play(short_dir, HELLO, test)


def test_continuous_usage(short_dir: Path) -> None:
    async def test(world: World) -> None:
        options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        found = events(await world.post("/v1/completions", {"prompt": "x", **options}))
        assert [chunk["usage"]["completion_tokens"] for chunk in found] == [1, 2, 2]

    play(short_dir, HELLO, test)


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        ("ab", [("ab", None)]),
        (["ab", "c"], [("ab", None), ("c", None)]),
        ([1, 2], [(None, ints(1, 2))]),
        ([[1, 2], [3]], [(None, ints(1, 2)), (None, ints(3))]),
    ],
)
def test_completions_take_prompts_of_every_kind(short_dir: Path, prompt: Any, asked: list[Any]) -> None:
    async def test(world: World) -> None:
        response = await world.post("/v1/completions", {"prompt": prompt, "n": 2, "echo": True})
        assert response.status_code == 200, response.text
        answer = response.json()
        assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(asked)))
        echoes = [text or "".join(chr(96 + t) for t in ids) for text, ids in asked]
        assert [choice["text"] for choice in answer["choices"]] == [e + "Hello" for e in echoes for _ in range(2)]
        assert answer["usage"]["prompt_tokens"] == 3 * len(asked) and answer["usage"]["completion_tokens"] == 4 * len(
            asked
        )
        got = [await world.generated() for _ in asked]
        assert [(m.text, m.token_ids) for m in got] == asked and all(m.params.max_tokens == 16 for m in got)

    play(short_dir, HELLO, test)


def test_streamed_completions_of_several_prompts(short_dir: Path) -> None:
    async def test(world: World) -> None:
        found = events(
            await world.post("/v1/completions", {"prompt": ["a", "b"], "n": 2, "stream": True, "echo": True})
        )
        for index in range(4):
            chunks = [c["choices"][0] for c in found if c["choices"][0]["index"] == index]
            assert [c["text"] for c in chunks] == ["ab"[index // 2] + "He", "llo"]
            assert [c["finish_reason"] for c in chunks] == [None, "stop"]

    play(short_dir, HELLO, test)


def test_an_echo_without_an_answer(short_dir: Path) -> None:
    async def test(world: World) -> None:
        response = await world.post("/v1/completions", {"prompt": "ab", "max_tokens": 0, "echo": True})
        answer = response.json()
        assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("ab", "length")
        assert answer["usage"]["completion_tokens"] == 0
        assert (await world.generated()).params.max_tokens == 1
        refused = await world.post("/v1/completions", {"prompt": "ab", "max_tokens": 0})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "max_tokens"

    play(short_dir, HELLO, test)


def test_sglang_generate(short_dir: Path) -> None:
    async def test(world: World) -> None:
        response = await world.post("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 5}, "rid": "r"})
        answer = response.json()
        assert (answer["text"], answer["output_ids"]) == ("Hello", [20, 21])
        meta = answer["meta_info"]
        assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == ("r", 3, 2, 1)
        assert meta["finish_reason"] == {"type": "stop", "matched": 21}
        assert (await world.generated()).params.max_tokens == 5
        several = await world.post("/generate", {"input_ids": [[1], [2]], "stream": True})
        found = events(several)
        assert [e["text"] for e in found if e["index"] == 1][-1] == "Hello"  # the whole text so far
        both = await world.post("/generate", {"text": "x", "input_ids": [1]})
        assert both.status_code == 400 and both.json()["error"]["param"] == "text"

    play(short_dir, HELLO, test)


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        (ErrorCode.INVALID, 400, "invalid_request_error"),
        (ErrorCode.TOO_LONG, 400, "invalid_request_error"),
        (ErrorCode.OVERLOADED, 429, "rate_limit_error"),
        (ErrorCode.SHUTTING_DOWN, 503, "service_unavailable_error"),
        (ErrorCode.INTERNAL, 500, "server_error"),
        (ErrorCode.DEADLINE, 504, "timeout_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_of_the_cluster(short_dir: Path, code: ErrorCode, status: int, kind: str, stream: bool) -> None:
    """An error before anything was streamed has its own status, also when a stream was asked for."""

    def fail(msg: Generate) -> Iterable[Any]:
        yield RequestError(msg.rid, code, "chat: is wrong", "chat", 5, 2.2 if code == ErrorCode.OVERLOADED else 0.0)

    async def test(world: World) -> None:
        response = await world.post("/v1/chat/completions", CHAT | {"stream": stream})
        assert response.status_code == status and response.headers["content-type"] == "application/json"
        error = response.json()["error"]
        assert (error["type"], error["param"], error["message"]) == (kind, "messages", "messages: is wrong")
        assert response.headers.get("retry-after") == {429: "3", 503: "1"}.get(status)
        assert "x-request-id" in response.headers

    play(short_dir, answering(fail), test)


def test_an_error_in_the_middle_of_a_stream_is_an_event(short_dir: Path) -> None:
    def fail(msg: Generate) -> Iterable[Any]:
        yield rows(msg.rid, "begun", 1)
        yield RequestError(msg.rid, ErrorCode.DEADLINE, "too late", "deadline_ms")

    async def test(world: World) -> None:
        found = events(await world.post("/v1/completions", {"prompt": "x", "stream": True, "timeout_ms": 5}))
        assert found[0]["choices"][0]["text"] == "begun" and found[-1]["error"]["type"] == "timeout_error"
        assert (await world.generated()).deadline_ms == 5

    play(short_dir, answering(fail), test)


def test_one_failed_prompt_fails_all_and_aborts_the_others(short_dir: Path) -> None:
    aborted: list[int] = []

    def answer(msg: Generate) -> Iterable[Any]:
        if msg.text == "bad":
            yield RequestError(msg.rid, ErrorCode.TOO_LONG, "too long", "text")

    def with_aborts(msg: Any) -> Iterable[Any]:
        if type(msg).__name__ == "Abort":
            aborted.append(msg.rid)
            yield rows(msg.rid, "", finish=Finish.ABORT)
        yield from answering(answer)(msg)

    async def test(world: World) -> None:
        response = await world.post("/v1/completions", {"prompt": ["good", "bad", "good"]})
        assert response.status_code == 400 and response.json()["error"]["param"] == "prompt"
        while len(aborted) < 2:
            await asyncio.sleep(0.01)

    play(short_dir, with_aborts, test)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param"),
    [
        ("POST", "/v1/completions", b"", 400, None),
        ("POST", "/v1/completions", b"{", 400, None),
        ("POST", "/v1/completions", b"[]", 400, None),
        ("POST", "/v1/completions", b'"x"', 400, None),
        ("POST", "/v1/completions", b'{"prompt": "\xff"}', 400, None),
        ("POST", "/v1/completions", b'{"prompt": "\\ud800"}', 400, None),
        ("POST", "/v1/completions", b'{"prompt": "x", "a": ' + b"[" * 10000, 400, None),
        ("POST", "/v1/completions", b'{"prompt": "x", "a": ' + b"[" * 300 + b"]" * 300 + b"}", 400, None),
        ("POST", "/v1/completions", b"{}", 400, "prompt"),
        ("POST", "/v1/completions", b'{"prompt": []}', 400, "prompt"),
        ("POST", "/v1/completions", b'{"prompt": "x", "suffix": "y"}', 400, "suffix"),
        ("POST", "/v1/completions", b'{"prompt": "x", "model": "other"}', 404, "model"),
        ("POST", "/v1/completions", b'{"prompt": "x", "best_of": 2, "n": 3}', 400, "best_of"),
        ("POST", "/v1/completions", b'{"prompt": "x", "best_of": 2, "stream": true}', 400, "best_of"),
        ("POST", "/v1/completions", b'{"prompt": "x", "stream_options": {}}', 400, "stream_options"),
        ("POST", "/v1/chat/completions", b'{"messages": []}', 400, "messages"),
        ("POST", "/v1/chat/completions", b'{"messages": [{"role": "user"}]}', 400, "messages[0].content"),
        ("POST", "/v1/chat/completions", b'{"messages": [{"role": "king", "content": ""}]}', 400, "messages[0].role"),
        (
            "POST", "/v1/chat/completions",
            b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}',
            400, "messages[0].content[0].type",
        ),
        ("POST", "/v1/chat/completions", json.dumps(CHAT | {"top_logprobs": 2}).encode(), 400, "top_logprobs"),
        ("POST", "/v1/chat/completions", json.dumps(CHAT | {"tool_choice": "required"}).encode(), 400, "tool_choice"),
        ("POST", "/v1/chat/completions", json.dumps(CHAT | {"functions": [{}]}).encode(), 400, "functions"),
        ("POST", "/v1/chat/completions", json.dumps(CHAT | {"logit_bias": {"x": 1}}).encode(), 400, "logit_bias"),
        ("GET", "/nowhere", None, 404, None),
        ("GET", "/v1/completions", None, 405, None),
        ("DELETE", "/v1/models", None, 405, None),
        ("GET", "/v1/models/other", None, 404, "model"),
    ],
)  # fmt: skip
def test_what_is_refused(short_dir: Path, method: str, path: str, body: bytes, status: int, param: str | None) -> None:
    async def test(world: World) -> None:
        response = await world.client.request(method, path, content=body)
        assert response.status_code == status, response.text
        assert set(response.json()) == {"error"}
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["param"] == param and error["message"]
        assert status != 405 or response.headers["allow"]

    play(short_dir, HELLO, test)


def test_bodies_are_bounded_and_must_be_json(short_dir: Path) -> None:
    async def test(world: World) -> None:
        large = await world.post("/v1/completions", {"prompt": "x" * 3000})
        assert large.status_code == 413 and "2048 bytes" in large.json()["error"]["message"]

        async def chunks() -> Any:
            for _ in range(4):
                yield b" " * 1000

        assert (await world.client.post("/v1/completions", content=chunks())).status_code == 413
        form = await world.client.post("/v1/completions", data={"prompt": "x"})
        assert form.status_code == 415 and form.json()["error"]["type"] == "invalid_request_error"

    play(short_dir, HELLO, test, HttpConfig(max_body_bytes=2048))


def test_unknown_fields_are_named_and_known_ones_are_not(short_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    body = CHAT | {
        "zap": 1,
        "a\nb": 2,
        "response_format": {"type": "text", "odd": 1},
        "service_tier": "auto",
        "user": "u",
    }

    async def test(world: World) -> None:
        for _ in range(2):
            response = await world.post("/v1/chat/completions", body)
            assert response.status_code == 200
            assert response.headers["x-rhizome-ignored-fields"] == "zap, a_b, response_format.odd"

    with caplog.at_level("INFO"):
        play(short_dir, HELLO, test)
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert [w for w in warnings if "ignored" in w] == [
        "fields that mean nothing here are ignored: a_b, response_format.odd, zap"
    ]
    told = [r.getMessage() for r in caplog.records if r.getMessage().startswith("request ")]
    assert len(told) == 2 and "user=u" in told[0] and "ignored=zap,a_b" in told[0] and "output=2" in told[0]


def test_strict_fields(short_dir: Path) -> None:
    async def test(world: World) -> None:
        refused = await world.post("/v1/chat/completions", CHAT | {"zap": 1})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "zap"
        assert (await world.post("/v1/chat/completions", CHAT)).status_code == 200

    play(short_dir, HELLO, test, HttpConfig(strict_fields=True))


def test_request_ids(short_dir: Path) -> None:
    async def test(world: World) -> None:
        for given, kept in (("abc-1", True), ("x" * 200, False), ("a b", False), ("<script>", False)):
            response = await world.post("/v1/completions", {"prompt": "x"}, headers={"x-request-id": given})
            assert (response.headers["x-request-id"] == given) is kept
            assert response.json()["id"] == f"cmpl-{response.headers['x-request-id']}"

    play(short_dir, HELLO, test)


def test_keys(short_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    def bearer(key: str) -> dict[str, str]:
        return {"authorization": f"Bearer {key}"}

    async def test(world: World) -> None:
        for headers in (
            {},
            bearer("wrong-key"),
            {"authorization": f"Basic {KEYS['alice']}"},
            {"authorization": KEYS["bob"]},
        ):
            response = await world.post("/v1/completions", {"prompt": "x"}, headers=headers)
            assert response.status_code == 401 and response.json()["error"]["type"] == "authentication_error"
        assert (await world.client.get("/metrics")).status_code == 401
        assert (await world.client.get("/health")).status_code == 200
        salts = set()
        for key in KEYS.values():
            for salt in (None, "s"):
                body = {"prompt": "x", "cache_salt": salt}
                assert (await world.post("/v1/completions", body, headers=bearer(key))).status_code == 200
                salts.add((await world.generated()).cache_salt)
        assert len(salts) == 4 and "" not in salts and "s" not in salts

    with caplog.at_level("DEBUG"):
        play(short_dir, HELLO, test, keys=True)
    assert "key=alice" in caplog.text and not any(key in caplog.text for key in KEYS.values())


def test_a_key_has_a_limit_of_its_own(short_dir: Path) -> None:
    def forever(msg: Generate) -> Iterable[Any]:
        return ()

    async def test(world: World) -> None:
        alice, bob = ({"authorization": f"Bearer {KEYS[name]}"} for name in ("alice", "bob"))
        waiting = asyncio.create_task(world.post("/v1/completions", {"prompt": "x"}, headers=alice))
        await world.generated()
        second = await world.post("/v1/completions", {"prompt": "x"}, headers=alice)
        assert second.status_code == 429 and second.headers["retry-after"] == "1"
        other = asyncio.create_task(world.post("/v1/completions", {"prompt": "x"}, headers=bob))
        await world.generated()
        for task in (waiting, other):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        again = asyncio.create_task(world.post("/v1/completions", {"prompt": "x"}, headers=alice))
        await world.generated()
        again.cancel()
        await asyncio.gather(again, return_exceptions=True)

    play(short_dir, answering(forever), test, HttpConfig(key_concurrency=1), keys=True)


def test_cross_origin_requests_are_refused_by_default(short_dir: Path) -> None:
    async def asks(world: World) -> tuple[str | None, int]:
        headers = {"origin": "https://a.example", "access-control-request-method": "POST"}
        preflight = await world.client.options("/v1/completions", headers=headers)
        response = await world.post("/v1/completions", {"prompt": "x"}, headers={"origin": "https://a.example"})
        return response.headers.get("access-control-allow-origin"), preflight.status_code

    async def closed(world: World) -> None:
        assert await asks(world) == (None, 405)

    async def opened(world: World) -> None:
        assert await asks(world) == ("https://a.example", 200)

    play(short_dir, HELLO, closed)
    play(short_dir, HELLO, opened, HttpConfig(cors_origins=("https://a.example",)))


def test_before_the_cluster_is_there(short_dir: Path) -> None:
    async def test(world: World) -> None:
        assert (await world.client.get("/health/live")).status_code == 200
        for path in ("/health", "/health/ready"):
            response = await world.client.get(path)
            assert response.status_code == 503 and "starting" in response.json()["reason"]
        for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", CHAT)):
            response = await world.post(path, body)
            assert response.status_code == 503 and "starting" in response.json()["error"]["message"]
            assert response.headers["retry-after"] == "1"
        assert (await world.client.get("/v1/models")).status_code == 503
        metrics = (await world.client.get("/metrics")).text
        assert 'rhizome_up{model_name=""} 0.0' in metrics

    play(short_dir, HELLO, test, started=False)


def test_a_cluster_that_dies_and_stopping(short_dir: Path) -> None:
    def begin(msg: Generate) -> Iterable[Any]:
        yield rows(msg.rid, "begun", 1)

    async def test(world: World) -> None:
        assert (await world.client.get("/health/ready")).status_code == 200
        asked = asyncio.create_task(world.post("/v1/completions", {"prompt": "x"}))
        await world.generated()
        await asyncio.get_running_loop().run_in_executor(None, world.cluster.close)
        response = await asked
        assert response.status_code == 503 and "ended" in response.json()["error"]["message"]
        assert (await world.client.get("/health/ready")).status_code == 503
        world.service.backend.stop()
        assert "stopping" in (await world.client.get("/health/ready")).json()["reason"]

    play(short_dir, answering(begin), test)


def test_models_and_information(short_dir: Path) -> None:
    async def test(world: World) -> None:
        get = world.client.get
        (model,) = (await get("/v1/models")).json()["data"]
        assert (model["id"], model["root"], model["max_model_len"], model["created"]) == ("tiny", "/models/tiny", 32, 5)
        assert (await get("/v1/models/tiny")).json() == model
        assert (await get("/version")).json() == {"version": "9"}
        assert (await get("/get_model_info")).json()["model_path"] == "/models/tiny"
        for path in ("/server_info", "/get_server_info"):
            info = (await get(path)).json()
            assert info["max_total_num_tokens"] == 4096 and info["stats"]["scheduler.running"] == 2
            assert "chat_template" not in info
        detokenized = await world.post("/detokenize", {"tokens": [1, 2]})
        assert detokenized.json()["prompt"] == "ab"

    play(short_dir, HELLO, test)


def test_the_description_covers_every_endpoint(short_dir: Path) -> None:
    async def test(world: World) -> None:
        schema = (await world.client.get("/openapi.json")).json()
        assert (await world.client.get("/docs")).status_code == 200
        chat = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert chat == {"$ref": "#/components/schemas/ChatRequest"}
        components = schema["components"]["schemas"]
        assert components["ChatRequest"]["properties"]["temperature"]["anyOf"][0]["maximum"] == 100
        text = json.dumps(schema)
        for reference in {part.split('"')[0] for part in text.split('"$ref": "#/components/schemas/')[1:]}:
            assert reference in components, reference

    play(short_dir, HELLO, test)


def test_metrics(short_dir: Path) -> None:
    async def test(world: World) -> None:
        await world.post("/v1/completions", {"prompt": "x"})
        await world.client.get("/secret/path/of/somebody")
        response = await world.client.get("/metrics")
        found = {f.name: f for f in text_string_to_metric_families(response.text)}
        assert found["vllm:num_requests_running"].samples[0].value == 2
        assert found["vllm:kv_cache_usage_perc"].samples[0].value == 0.25
        assert found["rhizome_process_up"].samples[0].value == 1
        requests = {
            tuple(s.labels.values()): s.value
            for s in found["rhizome_http_requests"].samples
            if s.name.endswith("_total")
        }
        assert requests["POST", "/v1/completions", "200"] == 1 and requests["GET", "unknown", "404"] == 1
        tokens = {s.labels["kind"]: s.value for s in found["rhizome_http_tokens"].samples if s.name.endswith("_total")}
        assert tokens == {"prompt": 3, "cached": 1, "output": 2}
        assert "secret" not in response.text

    play(short_dir, HELLO, test)
