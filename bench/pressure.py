"""A cluster under pressure: `python -m bench.pressure crowd|slow|leave|bad`. Each starts a cluster of the demo model.

crowd   5,000 connections at once against a queue of 100: how they are answered, and what is left behind
slow    the inter-token latency of other streams while clients do not read, over HTTP and the cluster's own socket
leave   clients that disconnect in any phase, one after the other: how long until nothing of them is left
bad     every field of every body with wrong values (bad_bodies.py): how fast they are refused, and whether by name

The exit code is 1 when something is not as it should be, whatever the machine's speed.
"""

import asyncio
import itertools
import json
import random
import resource
import socket
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any
from urllib.request import urlopen

import click
import psutil
import zmq

from bench.bad_bodies import bad_bodies, bodies
from bench.clusters import machine, started
from bench.leaving import PHASES, leave, until_freed
from bench.plain_http import Answer, dial, dial_plain, exchange, post, read_answer
from common.codec import decode, encode
from common.connection import Connection
from common.messages import Beat, Generate, RequestError, TextBatch
from common.prompts import prompt_fields
from common.sampling_params import SamplingParams
from common.sockets import open_socket

PROMPT = "Return a copy of the string"
PROBES = ("/health/live", "/health/ready")


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def in_ms(seconds: Sequence[float]) -> str:
    each = (statistics.median(seconds), quantile(seconds, 0.99), max(seconds))
    return "median {:.1f} ms, p99 {:.1f} ms, longest {:.1f} ms".format(*(1000 * s for s in each))


def descriptors(info: dict[str, Any]) -> dict[str, int]:
    """Open file descriptors by process."""
    return {name: psutil.Process(pid).num_fds() for name, pid in info["pids"].items()}


def stats(url: str) -> dict[str, int]:
    with urlopen(f"{url}/server_info", timeout=30) as answer:
        values: dict[str, int] = json.load(answer)["stats"]
    return values


def healthy(info: dict[str, Any]) -> list[str]:
    """What is wrong with a cluster that should be idle and have lost nothing."""
    values = stats(info["addresses"]["http"])
    problems = [name for name in ("scheduler.running", "scheduler.waiting", "tokenizer.live_requests") if values[name]]
    if values["scheduler.free_pages"] + values["scheduler.evictable_pages"] != values["scheduler.total_pages"]:
        problems.append("pages are missing")
    return problems + [name for name, n in values.items() if name.startswith("launcher.restarts") and n]


@click.group()
def cli() -> None:
    """See the module's docstring."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    click.echo(f"{machine()}; {hard} file descriptors")


# ---- crowd --------------------------------------------------------------------------------------------------------


@cli.command(context_settings={"show_default": True})
@click.option("--connections", default=5000)
@click.option("--waiting", default=100, help="--max-waiting of the cluster.")
def crowd(connections: int, waiting: int) -> None:
    """Many connections at once against a short queue."""
    with started("--port", "0", "--max-waiting", str(waiting), "--max-running", "16") as info:
        url = info["addresses"]["http"]
        asyncio.run(_ask(url))
        before = descriptors(info)
        began = time.monotonic()
        answers, probes = asyncio.run(_crowd(url, connections))
        took = time.monotonic() - began
        until_freed(url, 30)
        deadline = time.monotonic() + 10
        while (after := descriptors(info)) != before and time.monotonic() < deadline:
            time.sleep(0.1)
        problems = healthy(info)
    by_status = Counter(answer.status for answer in answers)
    without = sum(answer.status == 429 and "retry-after" not in answer.headers for answer in answers)
    click.echo(f"{connections} connections in {took:.1f} s: {dict(by_status)}, {without} of 429 without Retry-After")
    for path, taken in probes.items():
        click.echo(f"{path} beside them, {len(taken)} times: {in_ms(taken)}")
    grown = {name: (before[name], after[name]) for name in before if after[name] > before[name]}
    click.echo(f"file descriptors afterwards: {grown or 'as before'}; {problems or 'idle, nothing restarted'}")
    if without or problems or grown or set(by_status) - {200, 429} or not by_status[200]:
        sys.exit(1)


async def _ask(url: str) -> Answer:
    body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    return await exchange(url, post("/v1/completions", body))


async def _crowd(url: str, connections: int) -> tuple[list[Answer], dict[str, list[float]]]:
    """All connections are open before the first one asks. Also the seconds that probes took meanwhile, by path; they
    come from a thread, so that it is not the crowd's own loop that keeps them waiting."""
    opened = [await dial(url) for _ in range(connections)]
    done = threading.Event()
    watching = asyncio.create_task(asyncio.to_thread(_probe, url, done))
    body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "ignore_eos": True}

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Answer:
        writer.write(post("/v1/completions", body))
        answer = await asyncio.wait_for(read_answer(reader), 120)
        writer.close()
        return answer

    answers = await asyncio.gather(*(one(*pair) for pair in opened))
    done.set()
    return answers, await watching


def _probe(url: str, done: threading.Event) -> dict[str, list[float]]:
    """Ask each of PROBES again and again, on a new connection each time, as probes do."""
    times: dict[str, list[float]] = {path: [] for path in PROBES}
    while not done.is_set():
        for path, taken in times.items():
            began = time.monotonic()
            with urlopen(url + path, timeout=30) as answer:
                assert answer.status == 200, answer.status
            taken.append(time.monotonic() - began)
        done.wait(0.05)
    return times


# ---- slow ---------------------------------------------------------------------------------------------------------


@cli.command(context_settings={"show_default": True})
@click.option("--streams", default=4, help="Streams that are measured.")
@click.option("--slow", "deaf", default=4, help="Clients of each kind that do not read.")
@click.option("--tokens", default=300)
def slow(streams: int, deaf: int, tokens: int) -> None:
    """Clients that do not read, beside others that do."""
    with started("--port", "0", "--max-running", "64") as info:
        url, address = info["addresses"]["http"], info["addresses"]["frontend"]
        _gaps(address, streams, tokens)
        readers = {"nobody else": _gaps(address, streams, tokens)}
        with Connection(address) as reading:  # as many that do read: the same work for the model
            load = [reading.submit(PROMPT, _endless(i)) for i in range(2 * deaf)]
            readers["beside clients that read"] = _gaps(address, streams, tokens, reading)
            for rid in load:
                reading.abort(rid)
        until_freed(url, 30)
        http = [_deaf_http(url, i) for i in range(deaf)]
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        own = [Deaf(context, address) for _ in range(deaf)]
        for i, client in enumerate(own):
            client.ask(_endless(i))
        readers["beside clients that do not read"] = _gaps(address, streams, tokens)
        ended = 0
        for client in own:  # they go on asking and never read: in the end each is told so
            ended += client.until_cut_off(url)
            client.socket.close()
        context.term()
        for plain in http:
            plain.close()
        until_freed(url, 30)
        problems = healthy(info)
        memory = {n: psutil.Process(info["pids"][n]).memory_info().rss // 2**20 for n in ("gateway", "tokenizer")}
    for name, gaps in readers.items():
        click.echo(f"{name}: ITL {in_ms(gaps)}, p95 {1000 * quantile(gaps, 0.95):.1f} ms")
    same = quantile(readers["beside clients that read"], 0.95)
    ratio = quantile(readers["beside clients that do not read"], 0.95) / same
    click.echo(f"p95 beside clients that do not read, over that beside as many that read: {ratio:.2f}")
    click.echo(
        f"{ended} of {deaf} ipc clients were cut off with an error; MiB afterwards: {memory}; {problems or 'idle'}"
    )
    if problems or ended < deaf:
        sys.exit(1)


def _endless(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=900, ignore_eos=True, logprobs=20)


def _deaf_http(url: str, seed: int) -> socket.socket:
    """A client that asks for a long stream and never reads it."""
    plain = dial_plain(url, receive_buffer=4096)
    body = {"prompt": PROMPT, "max_tokens": 900, "seed": seed, "ignore_eos": True, "stream": True, "logprobs": 20}
    plain.sendall(post("/v1/completions", body))
    return plain


def _gaps(address: str, streams: int, tokens: int, other: Connection | None = None) -> list[float]:
    """Times between the rows of each of some streams (seconds). The rows of `other` are read too."""
    last: dict[int, float] = {}
    gaps: list[float] = []
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=tokens, ignore_eos=True) for i in range(streams)]
    with Connection(address) as connection:
        for p in params:
            connection.submit(PROMPT, p)
        while connection.live:
            for row in connection.poll(0.5):
                assert not isinstance(row, RequestError), row
                now = row.received_ns / 1e9
                if row.rid in last and now > last[row.rid]:
                    gaps.append(now - last[row.rid])
                last[row.rid] = now
            if other is not None:
                other.poll(0)
    return gaps


class Deaf:
    """A client of the cluster's own socket that asks and never reads, until it is asked what it was told."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str):
        self.socket = open_socket(context, zmq.DEALER, connect=address)
        self.socket.linger = 0
        self._numbers = itertools.count(1)

    def ask(self, params: SamplingParams) -> None:
        text, token_ids, chat = prompt_fields(PROMPT)
        self.socket.send(encode(Generate(next(self._numbers), text, token_ids, chat, params)))

    def until_cut_off(self, url: str) -> int:
        """Go on asking until the tokenizer refuses because nobody reads; 1 if the client then reads that reason."""
        wrong = SamplingParams(max_tokens=1, min_tokens=2)
        before, deadline = stats(url)["tokenizer.errors_overloaded"], time.monotonic() + 60
        while stats(url)["tokenizer.errors_overloaded"] == before:
            if time.monotonic() > deadline:
                return 0
            for _ in range(1000):  # each is refused, and each refusal lies unread
                self.ask(wrong)
        while time.monotonic() < deadline and self.socket.poll(1000):
            msg = decode(self.socket.recv(), {TextBatch, RequestError, Beat})
            if isinstance(msg, RequestError) and "does not read" in msg.problem:
                return 1
        return 0


# ---- leave --------------------------------------------------------------------------------------------------------


@cli.command(name="leave", context_settings={"show_default": True})
@click.option("--times", default=1000)
@click.option("--seed", default=1)
def leaving(times: int, seed: int) -> None:
    """Disconnects in any phase, one after the other."""
    chance = random.Random(seed)
    freed: dict[str, list[float]] = {phase: [] for phase in PHASES}
    with started("--port", "0", "--max-running", "2", "--chunk-tokens", "16", "--max-batch-tokens", "64") as info:
        url = info["addresses"]["http"]
        pages = stats(url)["scheduler.total_pages"]
        before = descriptors(info)
        for number in range(times):
            phase = PHASES[number % len(PHASES)]
            leave(url, phase, stream=chance.random() < 0.5, seed=chance.randrange(2**31))
            freed[phase].append(until_freed(url, 30))
        problems = healthy(info)
        after = stats(url)
        grown = {n: (c, before[n]) for n, c in descriptors(info).items() if c > before[n]}
    for phase, seconds in freed.items():
        click.echo(f"{phase}: {len(seconds)} times, nothing left after {in_ms(seconds)}")
    late = sum(s > 1 for each in freed.values() for s in each)
    click.echo(f"{times} disconnects, {late} took longer than a second; {pages} pages, "
               f"{after['scheduler.free_pages'] + after['scheduler.evictable_pages']} of them free or cached; "
               f"file descriptors {grown or 'as before'}; {problems or 'idle, nothing restarted'}")  # fmt: skip
    if problems or grown:
        sys.exit(1)


# ---- bad ----------------------------------------------------------------------------------------------------------


@cli.command(context_settings={"show_default": True})
def bad() -> None:
    """Wrong values in every field of every body."""
    with started("--port", "0") as info:
        results = asyncio.run(_bad(info["addresses"]["http"]))
        until_freed(info["addresses"]["http"], 30)
        problems = healthy(info)
    wrong = [seconds for seconds, status, as_it_should in results if as_it_should is not None]
    unnamed = sum(as_it_should is False for _, _, as_it_should in results)
    failures = sum(status >= 500 and status != 504 for _, status, _ in results)  # short deadlines are right, and pass
    click.echo(f"{len(results)} bodies, {len(wrong)} with a value that its field does not take: {in_ms(wrong)}")
    click.echo(f"{sum(s > 0.1 for s in wrong)} of them took longer than 100 ms; {unnamed} without the field's name; "
               f"{failures} answers 5xx; {problems or 'idle, nothing restarted'}")  # fmt: skip
    if unnamed or failures or problems:
        sys.exit(1)


async def _bad(url: str) -> list[tuple[float, int, bool | None]]:
    """(seconds, status, whether a wrong value was refused by name) of each body of the table."""
    results: list[tuple[float, int, bool | None]] = []
    reader, writer = await dial(url)
    for path in bodies():
        for case in bad_bodies(path):
            began = time.monotonic()
            writer.write(post(path, case.body))
            answer = await asyncio.wait_for(read_answer(reader), 60)
            named = None
            if case.wrong:
                param = json.loads(answer.body)["error"]["param"] or "" if answer.status >= 400 else ""
                found = not case.field or (
                    bool(param) and (param.startswith(case.field) or case.field.startswith(param))
                )
                named = 400 <= answer.status < 500 and found
            results.append((time.monotonic() - began, answer.status, named))
    writer.close()
    return results


if __name__ == "__main__":
    cli()
