"""A client of the HTTP gateway: one connection per request, which it may also break."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from common.messages import Finish
from tests.faults.catalog import CATALOG
from tests.faults.judge import CONDEMNED, Choice, Ending, Outcome
from tests.faults.plan import Ask, Conduct
from tests.faults.progress import Progress

PATH = "/v1/completions"
_FINISH = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORT}
_ENDINGS = {
    "overloaded": Ending.OVERLOADED,
    "slow_reader": Ending.OVERLOADED,
    "deadline_exceeded": Ending.DEADLINE,
    "shutting_down": Ending.STOPPING,
    "draining": Ending.STOPPING,
    "not_ready": Ending.NOT_SERVED,
}
_BROKEN = (aiohttp.ClientError, ConnectionError, asyncio.IncompleteReadError, TimeoutError)


class HttpClient:
    """Asks the gateway at `address` (http://host:port)."""

    def __init__(self, address: str, progress: Progress):
        self._address = address
        self._progress = progress
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "HttpClient":
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def play(self, ask: Ask) -> Outcome:
        """Do what `ask` says; returns at its end."""
        outcome = Outcome([Choice() for _ in range(CATALOG[ask.request].n)])
        body = CATALOG[ask.request].body(stream=ask.stream)
        if ask.conduct is Conduct.HALF:
            return await self._leave_in_the_middle(json.dumps(body).encode(), outcome)
        if ask.conduct is Conduct.DEADLINE:
            body["deadline_ms"] = ask.after_ms
        reading = self._read(ask, body, outcome)
        try:
            if ask.conduct is Conduct.DISCONNECT:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(ask.after_ms / 1e3):
                        await reading
                        return outcome
                outcome.ending = Ending.LEFT
            else:
                await reading
        except _BROKEN as error:
            outcome.ending, outcome.problem = Ending.DISCONNECTED, f"{type(error).__name__}: {error}"
        except asyncio.CancelledError:
            pass  # the driver has given it up: it is silent
        return outcome

    async def healthy(self) -> bool:
        assert self._session is not None
        try:
            async with self._session.get(f"{self._address}/health", timeout=aiohttp.ClientTimeout(total=5)) as answer:
                return answer.status == 200
        except _BROKEN:
            return False

    async def _read(self, ask: Ask, body: dict[str, Any], outcome: Outcome) -> None:
        assert self._session is not None
        async with self._session.post(f"{self._address}{PATH}", json=body) as answer:
            if answer.status != 200:
                self._fail(outcome, await answer.json())
            elif not ask.stream:
                self._take(outcome, await answer.json())
                outcome.ending = Ending.FINISHED
            else:
                if ask.conduct is Conduct.SLOW:
                    _shrink(answer)
                await self._read_events(ask, answer, outcome)

    async def _read_events(self, ask: Ask, answer: aiohttp.ClientResponse, outcome: Outcome) -> None:
        rested = ask.conduct is not Conduct.SLOW
        async for event in _events(answer):
            if event == "[DONE]":
                if outcome.ending is Ending.SILENT:
                    outcome.ending = Ending.FINISHED
                continue
            if outcome.ending is not Ending.SILENT:
                outcome.stray_rows += 1
            elif "error" in (values := json.loads(event)):
                self._fail(outcome, values)
            else:
                self._take(outcome, values)
                if not rested:
                    rested = True
                    await asyncio.sleep(ask.after_ms / 1e3)
        if outcome.ending is Ending.SILENT:
            outcome.ending, outcome.problem = Ending.DISCONNECTED, "the stream ended without [DONE]"
        elif outcome.ending is Ending.FINISHED and any(c.finish is Finish.NONE for c in outcome.choices):
            outcome.ending, outcome.problem = Ending.OTHER_ERROR, "[DONE] without a finish reason"

    def _take(self, outcome: Outcome, values: dict[str, Any]) -> None:
        for part in values["choices"]:
            choice = outcome.choices[part["index"]]
            if choice.finish is not Finish.NONE:
                outcome.stray_rows += 1
            choice.text += part["text"]
            choice.tokens.extend(part["token_ids"])
            logprobs = part.get("logprobs") or {}
            choice.scored.extend(int(name.removeprefix("token_id:")) for name in logprobs.get("tokens", ()))
            choice.finish = _FINISH.get(part["finish_reason"], Finish.NONE)
            self._progress.tokens(len(part["token_ids"]))

    def _fail(self, outcome: Outcome, values: dict[str, Any]) -> None:
        error = values["error"]
        outcome.ending = _ENDINGS.get(error["code"], Ending.OTHER_ERROR)
        outcome.problem = f"{error['code']}: {error['message']}"
        if error["message"].startswith(CONDEMNED):
            outcome.ending = Ending.CONDEMNED

    async def _leave_in_the_middle(self, body: bytes, outcome: Outcome) -> Outcome:
        """Half of the body, then nobody."""
        parts = urlsplit(self._address)
        lines = (f"POST {PATH} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}")
        head = "\r\n".join((*lines, "", ""))
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port)
            writer.write(head.encode() + body[: len(body) // 2])
            await writer.drain()
            writer.close()
        outcome.ending = Ending.LEFT
        return outcome


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """The data of server-sent events, one line each."""
    async for line in answer.content:
        if line.startswith(b"data: "):
            yield line[6:].strip().decode()


def _shrink(answer: aiohttp.ClientResponse) -> None:
    """Let the sender wait early."""
    connection = answer.connection
    if connection is not None and connection.transport is not None:
        connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
