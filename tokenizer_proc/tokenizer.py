"""The tokenizer process: the clients' socket on one side, scheduler and detokenizer on the other.

    clients ── ROUTER endpoints.frontend (and config.listen) ── Frontend ── PUSH ──► scheduler, detokenizer
                                                                   ▲
                                         detokenizer ── PULL endpoints.tokenizer

Prompts are tokenized in a few threads beside the event loop, which therefore never waits.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

import click
import uvloop
import zmq

from common.async_reader import AsyncReader
from common.child import Child, child_options, run_child, until_next
from common.codec import Message, checked
from common.messages import MAX_TEMPLATE_CHARS, Drained, Go, Info, RequestError, Stats, TextBatch
from common.sockets import AT_ONCE, MORE, Inbox, Outbox, allow_version_6, open_socket
from common.stamps import Lost, Stamper
from common.tracing import to_collector
from tokenizer_proc.chat_template import ChatTemplate, ChatTemplateError
from tokenizer_proc.clients import Clients, Sent
from tokenizer_proc.frontend import Frontend
from tokenizer_proc.grammar_check import GrammarCheck
from tokenizer_proc.ledger import Ledger, Owner
from tokenizer_proc.limits import Limits
from tokenizer_proc.prompt import PromptEncoder, prompt_end
from tokenizer_proc.stories import Stories
from tokenizer_proc.tokenizer_files import load_chat_template, load_special_tokens, load_tokenizer, longest_token

log = logging.getLogger(__name__)

Socket: TypeAlias = "zmq.Socket[bytes]"

TOKENIZING_THREADS = 4  # a long prompt keeps one busy, and short ones pass it by
COMPILING_THREADS = 2  # for grammars
FLUSH_S = 0.02  # how often backlogs are tried again
BEAT_S = 0.5
STOP_S = 0.5  # how long the last answers may take at the end


class Links:
    """The sockets to and from scheduler and detokenizer, which live as long as a term (see Go, common/messages)."""

    def __init__(self, child: Child, term: int):
        self._child = child
        queue = child.config.scheduler
        self._most = 4 * (queue.max_waiting + queue.max_running) + 1024  # beginnings and ends of all live requests
        self.open(term)

    def open(self, term: int) -> None:
        child, endpoints = self._child, self._child.endpoints
        here = endpoints.tokenizer(term)
        answers = open_socket(child.context, zmq.PULL, bind=here)
        self.inbox = Inbox(
            answers, TextBatch, RequestError, Stats, refused=child.refused, senders=("detokenizer",), address=here
        )
        self.scheduler = self._outbox(endpoints.scheduler(term), "the scheduler")
        self.detokenizer = self._outbox(endpoints.detokenizer(term), "the detokenizer")

    def _outbox(self, address: str, name: str) -> Outbox:
        socket = open_socket(self._child.context, zmq.PUSH, connect=address)
        return Outbox(socket, name, self._most, stamper=Stamper(self._child.name, address))

    def close(self) -> None:
        self.inbox.socket.close(0)
        self.scheduler.close()
        self.detokenizer.close()

    @property
    def backlog(self) -> int:
        """Messages that the others have not taken yet."""
        return self.scheduler.backlog + self.detokenizer.backlog

    def flush(self) -> None:
        self.scheduler.flush()
        self.detokenizer.flush()


def main(child: Child) -> None:
    """Load, say ready, serve until told to stop."""
    model = Path(child.config.model.path)
    tokenizer = load_tokenizer(model)
    longest, template = longest_token(tokenizer), _load_template(model)
    end = prompt_end(template)  # now: it may take long, and nobody minds before all are ready
    router = open_socket(child.context, zmq.ROUTER, bind=child.endpoints.frontend)
    if child.config.listen is not None:
        allow_version_6(router, child.config.listen)
        router.bind(child.config.listen)
    go = child.ready()
    if go is None:
        return
    _warn_of_vocabulary(tokenizer.get_vocab_size(), go)
    limits = Limits.of_cluster(go, child.config.scheduler, longest)
    encoder = PromptEncoder(tokenizer, template, limits)
    pool = ThreadPoolExecutor(TOKENIZING_THREADS, "tokenize")
    grammar_pool = ThreadPoolExecutor(COMPILING_THREADS, "grammars")
    grammars = GrammarCheck(tokenizer, go.eos_token_ids, grammar_pool)
    try:
        uvloop.run(_serve(child, go, limits, encoder, end, grammars, router, pool))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        grammar_pool.shutdown(wait=False, cancel_futures=True)


async def _serve(
    child: Child,
    go: Go,
    limits: Limits,
    encoder: PromptEncoder,
    end: str,
    grammars: GrammarCheck,
    router: Socket,
    pool: ThreadPoolExecutor,
) -> None:
    links = Links(child, go.term)
    http, traces = child.config.http, None
    if http.otlp_endpoint is not None:
        traces = to_collector(http.otlp_endpoint)
    stories = Stories(http.names(child.config.model.path)[0], time.monotonic_ns, traces)

    def from_client(parts: list[bytes]) -> None:
        if len(parts) == 2:
            frontend.on_client(*parts)
        else:
            frontend.refused.by_cause["malformed"] += 1

    clients = AsyncReader(router, from_client, parts=True)
    slow_clients, news = asyncio.Event(), asyncio.Event()  # timers alone would take a core from the model more often

    def send(owner: Owner, frame: bytes) -> Sent:
        sent = _send_now(router, owner, frame)
        clients.look()
        if sent is Sent.FULL:
            slow_clients.set()
        return sent

    def pass_on(outbox: Outbox, msg: Message) -> None:
        outbox.send(msg)
        if outbox.backlog:
            news.set()

    frontend = Frontend(
        limits=limits,
        encoder=encoder,
        grammars=grammars,
        eos_token_ids=go.eos_token_ids,
        ledger=Ledger(lambda: secrets.randbits(63), stories.ended),
        clients=Clients(send),
        send_scheduler=lambda msg: pass_on(links.scheduler, msg),
        send_detokenizer=lambda msg: pass_on(links.detokenizer, msg),
        clock=time.monotonic_ns,
        pool=pool,
        info=_info(child, go, limits, encoder, end),
        stories=stories,
    )
    frontend.refused = child.refused
    stop = asyncio.Event()
    asyncio.get_running_loop().add_reader(child.wake_fd, stop.set)
    asyncio.get_running_loop().add_reader(child.control.fileno(), news.set)
    loops = [
        asyncio.create_task(clients.run()),
        asyncio.create_task(_keep_links(child, go, links, frontend, news)),
        asyncio.create_task(_tick(frontend, slow_clients)),
    ]
    stopped = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait([*loops, stopped], return_when=asyncio.FIRST_COMPLETED)
    asyncio.get_running_loop().remove_reader(child.control.fileno())  # nobody takes what comes any more
    frontend.shut_down()
    for task in done - {stopped}:
        task.result()  # a loop never ends by itself: this raises what ended it
    await _last_answers(frontend, loops[0])
    if traces is not None:
        await asyncio.get_running_loop().run_in_executor(None, traces.close)


async def _keep_links(child: Child, go: Go, links: Links, frontend: Frontend, news: asyncio.Event) -> None:
    """Speak with detokenizer and scheduler, term by term; tell the launcher that this loop lives, and hear its news.
    `news` is set when there are some, or something to be sent again."""

    def from_detokenizer(frame: bytes) -> None:
        msg = links.inbox.parse(frame)
        if isinstance(msg, Lost):
            frontend.on_lost(msg)
            child.resync(msg)
        elif msg is not None:
            frontend.on_detokenizer(msg)

    drained = False
    while True:
        term = go.term
        answers = AsyncReader(links.inbox.socket, from_detokenizer)
        receiving = asyncio.create_task(answers.run())
        receiving.add_done_callback(lambda _: news.set())
        try:
            while go.term == term:
                frontend.restarts, frontend.refused_elsewhere = go.restarts, go.refused
                if go.draining:
                    frontend.drain()
                until_pulse = child.pulse()
                await _set(news, FLUSH_S if links.backlog or go.draining else until_pulse)
                if receiving.done():
                    receiving.result()
                links.flush()
                if frontend.drained and not drained:
                    child.tell(Drained(child.name))
                    drained = True
                go = child.news() or go
        finally:
            receiving.cancel()
            answers.stop()
        links.close()
        links.open(go.term)
        frontend.resume()


def _info(child: Child, go: Go, limits: Limits, encoder: PromptEncoder, end: str) -> Info:
    config = child.config
    info = Info(
        rid=0,
        model=config.model.path,
        names=config.http.names(config.model.path),
        **{name: go.labels.get(name, "") for name in ("architecture", "dtype", "device", "version")},
        tp=config.model.tp,
        context_len=go.context_len,
        max_prompt=limits.max_prompt,
        kv_tokens=limits.pool_tokens,
        page_size=go.page_size,
        vocab_size=go.vocab_size,
        eos_token_ids=go.eos_token_ids,
        chat_template=encoder.chat_template_source[:MAX_TEMPLATE_CHARS],
        started_at=int(time.time()),
        prompt_end=end,
        takes_tools=encoder.takes_tools,
    )
    return checked(info)  # the gateway waits for it


async def _last_answers(frontend: Frontend, receiving: "asyncio.Task[None]") -> None:
    """Refuse what is still arriving, and give slow clients a last chance."""
    deadline = time.monotonic() + STOP_S
    while True:
        await asyncio.sleep(FLUSH_S)
        frontend.flush()
        if receiving.done() or time.monotonic() > deadline or not frontend.has_backlog:
            return


def _next_beat() -> float:
    """At the time of a pulse, if these are as frequent."""
    now = time.monotonic()
    return now + until_next(BEAT_S, now)


async def _set(event: asyncio.Event, timeout_s: float) -> None:
    """Waits until the event is set, so long at most, and clears it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    event.clear()


async def _tick(frontend: Frontend, slow_clients: asyncio.Event) -> None:
    """Beats, and what could not be sent at once to `slow_clients`."""
    next_beat = _next_beat()
    while True:
        if frontend.has_backlog:
            await asyncio.sleep(FLUSH_S)
        else:
            await _set(slow_clients, next_beat - time.monotonic())
        frontend.flush()
        if time.monotonic() >= next_beat:
            next_beat = _next_beat()
            frontend.beat()


def _send_now(router: Socket, owner: Owner, frame: bytes) -> Sent:
    """Send without waiting."""
    try:
        router.send(owner, AT_ONCE | MORE)
        router.send(frame, AT_ONCE)  # of a message that has begun every part is taken
    except zmq.Again:
        return Sent.FULL
    except zmq.ZMQError as error:
        if error.errno == zmq.EHOSTUNREACH:
            return Sent.GONE
        raise
    return Sent.YES


def _load_template(model: Path) -> ChatTemplate | str | None:
    source = load_chat_template(model)
    if source is None:
        return None
    try:
        return ChatTemplate(source, load_special_tokens(model))
    except ChatTemplateError as error:  # prompts without a chat can still be served
        log.warning("%s", error)
        return str(error)


def _warn_of_vocabulary(tokens: int, go: Go) -> None:
    if tokens > go.vocab_size:
        log.warning("the tokenizer has %d tokens, the model %d: prompts with others are refused", tokens, go.vocab_size)


@click.command()
@child_options
def cli(run_dir: Path, life_fd: int) -> None:
    """Run the tokenizer process (started by launch.py)."""
    run_child("tokenizer", run_dir, life_fd, main)
    os._exit(0)  # a thread that still tokenizes would keep the process


if __name__ == "__main__":
    cli()
