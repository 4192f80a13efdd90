"""Who may ask: keys, their limits, other origins."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from common.config import HttpConfig
from common.messages import Generate
from tests.unit.gateway_world import HELLO, KEYS, World, answering, play


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
            assert response.headers["www-authenticate"] == "Bearer"
        for path in ("/health", "/ping", "/load", "/get_load"):
            assert (await world.client.get(path)).status_code == 200
        salts = set()
        for key in KEYS.values():
            for salt in (None, "s"):
                body = {"prompt": "x", "cache_salt": salt}
                assert (await world.post("/v1/completions", body, headers=bearer(key))).status_code == 200
                salts.add((await world.generated()).cache_salt)
        assert len(salts) == 4 and "" not in salts and "s" not in salts
        scraped = await world.client.get("/metrics")
        assert scraped.status_code == 200 and "rhizome_http_requests_total" in scraped.text
        assert "alice" not in scraped.text, "who asks is told to those with a key alone"
        told = await world.client.get("/metrics", headers=bearer(KEYS["bob"]))
        assert told.status_code == 200 and 'rhizome_http_tokens_total{key="alice"' in told.text
        assert (await world.client.get("/metrics", headers=bearer("wrong-key"))).status_code == 401

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


def test_refusals_of_every_kind_can_be_read_from_another_origin(short_dir: Path) -> None:
    def forever(msg: Generate) -> Iterable[Any]:
        return ()

    async def test(world: World) -> None:
        key = {"authorization": f"Bearer {KEYS['alice']}", "origin": "https://a.example"}
        waiting = asyncio.create_task(world.post("/v1/completions", {"prompt": "x"}, headers=key))
        await world.generated()
        found = {
            401: await world.client.get("/v1/models", headers={"origin": "https://a.example"}),
            429: await world.post("/v1/completions", {"prompt": "x"}, headers=key),
            414: await world.client.get("/v1/models?" + "x" * 9000, headers=key),
            404: await world.client.get("/nothing", headers=key),
        }
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        world.service.backend = None  # type: ignore[assignment]  # a mistake of ours
        found[500] = await world.client.get("/v1/models", headers=key)
        for status, response in found.items():
            assert response.status_code == status and response.json()["error"]["message"]
            assert response.headers["access-control-allow-origin"] == "https://a.example", status
            assert "x-request-id" in response.headers["access-control-expose-headers"]
            assert response.headers["x-request-id"]

    http = HttpConfig(key_concurrency=1, cors_origins=("https://a.example",))
    play(short_dir, answering(forever), test, http, keys=True)
