"""What the gateway refuses before the cluster hears of it, unknown fields, and request ids."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from common.config import HttpConfig
from tests.unit.gateway_world import CHAT, HELLO, World, play


def test_an_empty_model_is_the_served_one(short_dir: Path) -> None:
    async def test(world: World) -> None:
        for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", CHAT)):
            response = await world.post(path, body | {"model": ""})
            assert (response.status_code, response.json()["model"]) == (200, "tiny")

    play(short_dir, HELLO, test)


@pytest.mark.parametrize(
    ("path", "body", "field", "most"),
    [
        (
            "/v1/chat/completions", CHAT | {"max_completion_tokens": 1, "min_tokens": 5},
            "min_tokens", "max_completion_tokens",
        ),
        ("/v1/chat/completions", CHAT | {"max_tokens": 1, "min_tokens": 5}, "min_tokens", "max_tokens"),
        (
            "/generate", {"text": "x", "sampling_params": {"max_new_tokens": 1, "min_new_tokens": 5}},
            "sampling_params.min_new_tokens", "sampling_params.max_new_tokens",
        ),
    ],
)  # fmt: skip
def test_a_refusal_names_the_fields_that_came(
    short_dir: Path, path: str, body: dict[str, Any], field: str, most: str
) -> None:
    async def test(world: World) -> None:
        response = await world.post(path, body)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, field)
        assert error["message"] == f"{field}: must be at most {most} (1), got 5"

    play(short_dir, HELLO, test)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop_token_ids": [1, -2]}, "stop_token_ids[1]"), ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"regex": "a", "json_schema": "{}"}, "json_schema"), ({"top_p": 2.0}, "top_p"),
    ],
)  # fmt: skip
def test_what_sglangs_parameters_may_not_be(short_dir: Path, fields: dict[str, Any], param: str) -> None:
    async def test(world: World) -> None:
        response = await world.post("/generate", {"text": "x", "sampling_params": fields})
        assert (response.status_code, response.json()["error"]["param"]) == (400, f"sampling_params.{param}")
        assert (
            await world.post("/generate", {"text": "x", "sampling_params": {"sampling_seed": -1}})
        ).status_code == 200
        assert (await world.generated()).params.seed is None, "a fresh one, as elsewhere"

    play(short_dir, HELLO, test)


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
        ("POST", "/v1/completions", json.dumps({"prompt": ["x"] * 1025}).encode(), 400, "prompt"),
        ("POST", "/v1/completions", b'{"prompt": "x", "suffix": "y"}', 400, "suffix"),
        ("POST", "/v1/completions", b'{"prompt": "x", "model": "other"}', 404, "model"),
        ("POST", "/v1/completions", b'{"prompt": "x", "best_of": 2, "n": 3}', 400, "best_of"),
        ("POST", "/v1/completions", b'{"prompt": "x", "best_of": 2, "stream": true}', 400, "best_of"),
        ("POST", "/v1/completions", b'{"prompt": "x", "best_of": 2, "use_beam_search": true}', 400, "best_of"),
        ("POST", "/v1/completions", b'{"prompt": "x", "best_of": 65}', 400, "best_of"),
        ("POST", "/v1/completions", b'{"prompt": "x", "n": 65}', 400, "n"),
        ("POST", "/v1/completions", b'{"prompt": "x", "prompt_logprobs": 1, "stream": true}', 400, "prompt_logprobs"),
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
        assert (path == "/nowhere") == ("there is no /nowhere: OpenAI's paths begin with /v1" in error["message"])

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
        headers = {"content-type": "application/json", "content-encoding": "gzip"}
        packed = await world.client.post("/v1/completions", content=gzip.compress(b"{}"), headers=headers)
        assert packed.status_code == 415 and "not as gzip" in packed.json()["error"]["message"]

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
        for name in ("request_id", "rid"):
            response = await world.post("/v1/completions", {"prompt": "x", name: "abc-2"})
            assert response.headers["x-request-id"] == "abc-2" and response.json()["id"] == "cmpl-abc-2"
            refused = await world.post("/v1/completions", {"prompt": "x", name: "a\nb"})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == name

    play(short_dir, HELLO, test)
