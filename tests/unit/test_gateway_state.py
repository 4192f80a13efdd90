"""What the gateway says of itself and of the cluster: health, models, tokens, description, metrics."""

import asyncio
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from common.messages import ChatMessage, Generate, Tokenize, Tokens, ints
from gateway_proc.app import ROUTES
from tests.unit.fake_frontend import rows
from tests.unit.gateway_world import CHAT, HELLO, World, answering, play


def test_before_the_cluster_is_there(short_dir: Path) -> None:
    async def test(world: World) -> None:
        assert (await world.client.get("/health/live")).status_code == 200
        assert (await world.post("/ping")).status_code == 503
        for path in ("/health", "/health/ready", "/ping"):
            response = await world.client.get(path)
            assert response.status_code == 503 and "starting" in response.json()["reason"]
            assert (await world.client.head(path)).status_code == 503
        for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", CHAT)):
            response = await world.post(path, body)
            assert response.status_code == 503 and "starting" in response.json()["error"]["message"]
            assert response.headers["retry-after"] == "1"
        assert (await world.client.get("/v1/models")).status_code == 503
        metrics = (await world.client.get("/metrics")).text
        assert 'rhizome_up{model_name=""} 0.0' in metrics

    play(short_dir, HELLO, test, started=False)


def test_requests_show_that_the_loop_lives_when_they_begin_and_end(short_dir: Path) -> None:
    """A loop that thousands of requests keep busy does not come to its timers for longer than it may be silent."""
    shown: list[str] = []

    async def test(world: World) -> None:
        for status, path in ((200, "/health/live"), (404, "/nothing")):
            before = len(shown)
            assert (await world.client.get(path)).status_code == status
            assert len(shown) == before + 2

    play(short_dir, HELLO, test, alive=lambda: shown.append(""))


def test_a_cluster_that_dies_and_stopping(short_dir: Path) -> None:
    def begin(msg: Generate) -> Iterable[Any]:
        yield rows(msg.rid, "begun", 1)

    async def test(world: World) -> None:
        assert (await world.client.get("/health/ready")).status_code == 200
        asked = asyncio.create_task(world.post("/v1/completions", {"prompt": "x"}))
        await world.generated()
        await asyncio.get_running_loop().run_in_executor(None, world.cluster.close)
        response = await asked
        assert response.status_code == 503 and "other end is gone" in response.json()["error"]["message"]
        assert (await world.client.get("/health/ready")).status_code == 503
        world.service.backend.stop()
        assert "stopping" in (await world.client.get("/health/ready")).json()["reason"]

    play(short_dir, answering(begin), test)


def test_the_load_is_what_has_begun_and_not_ended(short_dir: Path) -> None:
    def begin(msg: Generate) -> Iterable[Any]:
        yield rows(msg.rid, "begun", 1)

    async def load(world: World) -> int:
        return int((await world.client.get("/load")).json()["server_load"])

    async def test(world: World) -> None:
        assert (await world.client.get("/ping")).status_code == (await world.post("/ping")).status_code == 200
        assert (await world.post("/v1/completions", {"prompt": "x", "temperature": -1})).status_code == 400
        assert (await world.post("/v1/completions", {"prompt": "x", "model": "other"})).status_code == 404
        assert await load(world) == 0
        asked = [asyncio.create_task(world.post(path, body)) for path, body in (
            ("/v1/completions", {"prompt": ["x", "y"]}), ("/v1/chat/completions", CHAT),
        )]  # fmt: skip
        for _ in range(3):
            await world.generated()
        assert await load(world) == 2
        (scheduler,) = (await world.client.get("/get_load")).json()
        assert scheduler == {"dp_rank": 0, "num_reqs": 3, "num_waiting_reqs": 1, "num_tokens": 32}
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        assert await load(world) == 0

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
        assert set(schema["paths"]["/ping"]) == {"get", "post"}
        components = schema["components"]["schemas"]
        assert components["ChatRequest"]["properties"]["temperature"]["anyOf"][0]["maximum"] == 100
        text = json.dumps(schema)
        for reference in {part.split('"')[0] for part in text.split('"$ref": "#/components/schemas/')[1:]}:
            assert reference in components, reference

    play(short_dir, HELLO, test)


def test_parts_of_bodies_have_names_of_their_own() -> None:
    """The description knows them by these alone."""
    known: dict[str, Any] = {}
    for body in [route.body for route in ROUTES if route.body is not None]:
        for name, schema in body.model_json_schema().get("$defs", {}).items():
            assert known.setdefault(name, schema) == schema, f"{name} of {body.__name__}"


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
        (restarts,) = [s for s in found["rhizome_process_restarts"].samples if s.name.endswith("_total")]
        assert (restarts.labels["process"], restarts.value) == ("worker-0", 3), "names of processes are no names here"
        assert all(re.fullmatch(r"(rhizome_|vllm:)[a-z0-9_]+", name) for name in found)

    play(short_dir, HELLO, test)


def test_tokens_of_a_chat_with_tools(short_dir: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    asked: list[Any] = []

    def answer(msg: Any) -> Iterable[Any]:
        if isinstance(msg, Tokenize):
            asked.append(msg)
            yield Tokens(msg.rid, ints(5, 6), ("a", "b") if msg.with_pieces else ())
        else:
            yield from HELLO(msg)

    async def test(world: World) -> None:
        body = CHAT | {"tools": tools, "chat_template_kwargs": {"enable_thinking": False}, "return_token_strs": True}
        found = (await world.post("/tokenize", body | {"add_generation_prompt": False})).json()
        assert (found["tokens"], found["token_strs"], found["count"]) == ([5, 6], ["a", "b"], 2)
        (question,) = asked
        assert json.loads(question.tools) == tools and json.loads(question.template_args) == {"enable_thinking": False}
        assert not question.add_generation_prompt and question.chat == (ChatMessage("user", "hi"),)
        for more, param in (
            ({"prompt": "x", "tools": tools}, "tools"),
            ({"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
            (CHAT | {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
            (CHAT | {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
            (CHAT | {"prompt": "x"}, "prompt"),
            (CHAT | {"add_special_tokens": True}, "add_special_tokens"),
        ):
            refused = await world.post("/tokenize", more)
            assert refused.status_code == 400 and refused.json()["error"]["param"] == param
        assert len(asked) == 1

    play(short_dir, answer, test)
