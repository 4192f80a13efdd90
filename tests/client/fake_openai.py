"""A server of somebody else that speaks OpenAI's format, played by the test with aiohttp in a thread.

What it does is in the prompt: `refuse` answers 400, `overload` 429, `cut` breaks off, `garbage` sends no JSON, `deep`
JSON that no stack holds, `error` an error within the stream, `wait` one chunk and then nothing, `think` reasoning
before the answer; anything else is echoed character by character, a token each.
"""

import asyncio
import json
import queue
import threading
from typing import Any

from aiohttp import web

TIMEOUT_S = 30.0
DEEP = "[" * 100_000 + "]" * 100_000


class FakeOpenAI:
    """`requests` holds each (path, headers, body); `gone` is set when a client went away in a stream."""

    def __init__(self, *, key: str | None = None, metrics: str | None = None):
        self.requests: queue.Queue[tuple[str, dict[str, str], dict[str, Any]]] = queue.Queue()
        self.gone = threading.Event()
        self.healthy = True
        self.starting = 0  # how often the list of models is not there yet
        self.models: str | None = None  # the page, if it is not the usual one
        self._key = key
        self._metrics = metrics
        self._started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> "FakeOpenAI":
        self._thread.start()
        assert self._started.wait(TIMEOUT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(TIMEOUT_S)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.add_routes(
            [
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/metrics", self._page),
                web.post("/v1/completions", self._complete),
                web.post("/v1/chat/completions", self._complete),
            ]
        )
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    def _refused(self, request: web.Request) -> web.Response | None:
        if self._key is None or request.headers.get("Authorization") == f"Bearer {self._key}":
            return None
        return web.json_response({"error": {"message": "wrong key", "param": None}}, status=401)

    async def _models(self, request: web.Request) -> web.Response:
        if self.starting:
            self.starting -= 1
            return web.Response(status=503, text="starting")
        if self.models is not None:
            return web.Response(text=self.models)
        return self._refused(request) or web.json_response({"data": [{"id": "echo", "max_model_len": 4096}]})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503, text="" if self.healthy else "overheated")

    async def _page(self, _: web.Request) -> web.Response:
        return web.Response(status=404) if self._metrics is None else web.Response(text=self._metrics)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.put((request.path, dict(request.headers), body))
        if (refused := self._refused(request)) is not None:
            return refused
        chat = request.path.endswith("chat/completions")
        prompt = body["messages"][-1]["content"] if chat else body["prompt"]
        text = prompt if isinstance(prompt, str) else "t" * body.get("max_tokens", 16)
        if text == "refuse":
            error = {"message": "temperature is too high", "param": "temperature", "type": "invalid_request_error"}
            return web.json_response({"error": error}, status=400)
        if text == "overload":
            return web.json_response({"detail": "try later"}, status=429)
        if text == "deep" and not body.get("stream"):
            return web.Response(text=DEEP, content_type="application/json")
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(text), "prompt_tokens_details": None}
        if not body.get("stream"):
            said = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            answer = {"id": "x1", "choices": [{"index": 0, **said, "finish_reason": "stop"}], "usage": usage}
            return web.json_response(answer)
        return await self._stream(request, chat, text, usage, body)

    async def _stream(
        self, request: web.Request, chat: bool, text: str, usage: dict[str, Any], body: dict[str, Any]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(values: Any) -> None:
            data = values if isinstance(values, str) else json.dumps(values)
            await response.write(f"data: {data}\r\n\r\n".encode())

        def chunk(said: str | None, finish: str | None = None, **more: str) -> dict[str, Any]:
            own = {"delta": {**({} if said is None else {"content": said}), **more}} if chat else {"text": said or ""}
            scores = logprobs(chat, said) if said and body.get("logprobs") else None
            return {"choices": [{"index": 0, **own, "logprobs": scores, "finish_reason": finish}]}

        try:
            if chat:
                await send({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
            if text == "garbage":
                await send("{")
            elif text == "deep":
                await send(DEEP)
            elif text == "error":
                await send({"error": {"message": "out of memory", "code": 500}})
            elif text in ("cut", "wait"):
                await send(chunk("begun"))
                while text == "wait":
                    await asyncio.sleep(0.01)
                    await response.write(b": still here\n\n")
                assert request.transport is not None
                request.transport.abort()
            else:
                if text == "think":
                    await send(chunk(None, reasoning_content="hm"))
                    await send(chunk(None, reasoning_content="m"))
                for character in text[:-1]:
                    await send(chunk(character))
                await send(chunk(text[-1:], "length"))
                await send({"choices": [], "usage": usage})
                await send("[DONE]")
        except ConnectionError:
            self.gone.set()
        return response


def logprobs(chat: bool, token: str) -> dict[str, Any]:
    """Those of one token, and of a likelier one."""
    own, other = {"token": token, "logprob": -1.5}, {"token": "e", "logprob": -0.25}
    if chat:
        return {"content": [{**own, "top_logprobs": [other, own]}]}
    return {"tokens": [token], "token_logprobs": [-1.5], "top_logprobs": [{token: -1.5, "e": -0.25}], "text_offset": []}
