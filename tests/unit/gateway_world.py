"""The gateway's application against a played cluster, asked through httpx in the same process."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from starlette.types import ASGIApp

from common.config import HttpConfig
from common.fields import FieldError
from common.messages import (
    Detokenize,
    ErrorCode,
    Finish,
    Generate,
    GetInfo,
    GetStats,
    Info,
    RequestError,
    Stats,
    Text,
    Tokenize,
    Tokens,
    ints,
)
from common.tracing import Traces
from gateway_proc.app import build
from gateway_proc.auth import Keys
from gateway_proc.backend import Backend
from gateway_proc.errors import ApiError
from gateway_proc.key_file import digest_of
from gateway_proc.main import Server, listen, server_config
from gateway_proc.metrics import Metrics, Scrape
from gateway_proc.requests import BodyReader
from gateway_proc.service import Service
from tests.unit.fake_frontend import TIMEOUT_S, FakeFrontend, rows
from tests.unit.frontend_world import INFO
from tokenizer_proc.chat_request import parse_messages, parse_template_args
from tokenizer_proc.chat_template import ChatTemplate
from tokenizer_proc.prompt import prompt_end

KEYS = {"alice": "sk-alice-0123456789", "bob": "sk-bob-0123456789"}
STATS = {
    "scheduler.running": 2, "scheduler.waiting": 1, "scheduler.total_pages": 8, "scheduler.free_pages": 5,
    "scheduler.evictable_pages": 1, "launcher.restarts.worker-0": 3,
}  # fmt: skip
Answer = Callable[[Any], Iterable[Any]]


def answering(generate: Callable[[Generate], Iterable[Any]], info: Info = INFO) -> Answer:
    """A cluster that says what it is, and answers Generate so."""

    def answer(msg: Any) -> Iterable[Any]:
        match msg:
            case Generate():
                yield from generate(msg)
            case GetInfo():
                template = ChatTemplate(info.chat_template, {}) if info.chat_template else None
                takes_tools = template is None or template.takes_tools
                yield replace(info, rid=msg.rid, prompt_end=prompt_end(template), takes_tools=takes_tools)
            case GetStats():
                yield Stats(msg.query, STATS)
            case Detokenize():
                yield Text(msg.rid, "".join(chr(t - 1000 if t >= 1000 else 96 + t) for t in msg.token_ids))
            case Tokenize():
                yield _tokens(msg, info)

    return answer


def _tokens(msg: Tokenize, info: Info) -> Tokens | RequestError:
    """A token for each character, of chats through the model's template."""
    text = msg.text
    if msg.chat is not None:
        template = ChatTemplate(info.chat_template, {})
        try:
            arguments = parse_template_args(msg.template_args, template.variables)
        except FieldError as error:
            return RequestError(msg.rid, ErrorCode.INVALID, str(error), error.field)
        text = template.render(parse_messages(msg.chat), 2**20, arguments=arguments)
    assert text is not None
    return Tokens(msg.rid, ints(*(1000 + ord(c) for c in text)))


def words(*texts: str, finish: Finish = Finish.STOP, cached: int = 1) -> Callable[[Generate], Iterable[Any]]:
    """Answer every choice with these texts, a row and a token for each; all in one row where no stream is wanted."""

    def generate(msg: Generate) -> Iterable[Any]:
        parts = list(texts) if msg.stream else ["".join(texts)]
        for choice in range(msg.n):
            for i, text in enumerate(parts):
                last = i == len(parts) - 1
                tokens = [20 + i] if msg.stream else [20 + j for j in range(len(texts))]
                ending = finish if last else Finish.NONE
                yield rows(msg.rid, text, *tokens, choice=choice, finish=ending, cached=cached)

    return generate


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
HELLO = answering(words("He", "llo"))


class World:
    """A running application: `client` asks it, `cluster` is what it asks."""

    def __init__(self, cluster: FakeFrontend, client: httpx.AsyncClient, service: Service):
        self.cluster = cluster
        self.client = client
        self.service = service

    async def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return await self.client.post(path, json=body, **options)

    async def generated(self) -> Generate:
        """The next Generate that the cluster got; other messages are passed over."""
        while True:
            msg = await asyncio.get_running_loop().run_in_executor(None, self.cluster.received.get, True, TIMEOUT_S)
            if isinstance(msg, Generate):
                return msg


def events(response: httpx.Response) -> list[Any]:
    """The data of a response's server-sent events; the last must be [DONE], which is left out."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    found = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert found[-1] == "[DONE]" and response.text.endswith("data: [DONE]\n\n")
    return [json.loads(data) for data in found[:-1]]


@asynccontextmanager
async def application(
    path: Path, answer: Answer, http: HttpConfig, *, keys: bool = False, started: bool = True,
    traces: Traces | None = None, alive: Callable[[], object] = lambda: None,
) -> AsyncIterator[tuple[ASGIApp, FakeFrontend, Service]]:  # fmt: skip
    """The application, connected to a played cluster unless it is not `started`."""
    with FakeFrontend(path, answer) as cluster:
        backend = Backend(cluster.address)
        service = Service(backend, BodyReader(http.max_body_bytes, http.strict_fields), http)
        names = {digest_of(key.encode()): name for name, key in KEYS.items()} if keys else {}

        async def scrape() -> Scrape:
            try:
                return Scrape(await backend.stats(), "tiny", {"gateway": 1})
            except ApiError:
                return Scrape(None, "", {})

        go: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        connecting = asyncio.create_task(backend.run(go, lambda info: None))
        try:
            if started:
                go.set_result(True)
                await backend.changed.wait()
            app = build(service, Metrics(), Keys(names, http.key_concurrency), http, scrape, traces, alive)
            yield app, cluster, service
        finally:
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)


def play(
    path: Path, answer: Answer, test: Callable[[World], Awaitable[None]], http: HttpConfig | None = None,
    *, keys: bool = False, started: bool = True, traces: Traces | None = None,
    alive: Callable[[], object] = lambda: None,
) -> None:  # fmt: skip
    """Run a test against an application, without sockets between them."""

    async def run() -> None:
        async with (
            asyncio.timeout(TIMEOUT_S),
            application(
                path, answer, http or HttpConfig(), keys=keys, started=started, traces=traces, alive=alive
            ) as world,
            httpx.AsyncClient(
                transport=httpx.ASGITransport(world[0], raise_app_exceptions=False), base_url="http://x"
            ) as client,
        ):
            await test(World(world[1], client, world[2]))

    asyncio.run(run())


def serve(path: Path, answer: Answer, test: Callable[[str, FakeFrontend], None]) -> None:
    """Run a test in a thread of its own against a served application, at a real address."""

    async def run() -> None:
        async with asyncio.timeout(TIMEOUT_S), application(path, answer, HttpConfig()) as (app, cluster, _):
            with listen(HttpConfig(port=0)) as listener:
                server = Server(server_config(app))
                serving = asyncio.create_task(server.serve([listener]))
                host, port = listener.getsockname()
                try:
                    await asyncio.to_thread(test, f"http://{host}:{port}", cluster)
                finally:
                    server.leave()
                    await serving

    asyncio.run(run())
