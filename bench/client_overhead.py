"""What the benchmark client itself costs: processor time per request and per streamed chunk, over HTTP and ipc.

    python -m bench.client_overhead

The servers are as empty as they can be, in a process of their own: they send a token every 2 ms to each request (over
ipc one batch for all, as a cluster does). The client's processor time is divided by what it received.
"""

import asyncio
import json
import multiprocessing
import random
import tempfile
import time
from array import array
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import click
import zmq

from bench.clusters import machine
from client_cli.bench_load import Length, Tokens, single
from client_cli.bench_run import Bench
from client_cli.http_link import HttpLink
from client_cli.http_loop import Server
from client_cli.link import Link
from common.codec import decode, encode
from common.connection import Connection
from common.messages import Finish, Generate, TextBatch, ints
from common.sampling_params import SamplingParams
from common.sockets import open_socket

PAUSE_S = 0.002  # between chunks, so that each comes by itself
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def _event(values: object) -> bytes:
    data = b"data: " + (values if isinstance(values, bytes) else json.dumps(values).encode()) + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


class _Http(asyncio.Protocol):
    """Answers every POST with `tokens` chunks in vLLM's format, a write each."""

    def __init__(self, tokens: int):
        base = {"id": "cmpl-0123456789abcdef", "object": "text_completion", "created": 1_700_000_000, "model": "m"}

        def chunk(finish: str | None) -> bytes:
            choice = {"index": 0, "text": " token", "logprobs": None, "finish_reason": finish, "stop_reason": None}
            return _event({**base, "choices": [choice], "usage": None})

        usage = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1}
        last = _event({**base, "choices": [], "usage": usage}) + _event(b"[DONE]") + b"0\r\n\r\n"
        self._writes = [HEAD, *[chunk(None)] * (tokens - 1), chunk("length"), last]
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._rest += data
        while b"\r\n\r\n" in self._rest:
            head, _, body = self._rest.partition(b"\r\n\r\n")
            lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            length = int(lengths[0].split(b":")[1]) if lengths else 0
            if len(body) < length:
                return
            self._rest = body[length:]
            asyncio.get_running_loop().create_task(self._answer())

    async def _answer(self) -> None:
        for write in self._writes:
            self._transport.write(write)
            await asyncio.sleep(PAUSE_S)


def serve_http(pipe: Pipe, tokens: int) -> None:
    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(lambda: _Http(tokens), "127.0.0.1", 0)
        pipe.send(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await server.serve_forever()

    asyncio.run(run())


def serve_ipc(pipe: Pipe, tokens: int, directory: str) -> None:
    """Steps of all live requests, as a cluster sends them: one batch with a row each."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    address = f"ipc://{directory}/s"
    router = open_socket(context, zmq.ROUTER, bind=address)
    pipe.send(address)
    live: dict[int, int] = {}
    owner = b""
    while True:
        while not live or router.poll(int(PAUSE_S * 1000)):
            owner, frame = router.recv_multipart()
            msg = decode(frame, {Generate})
            live[msg.rid] = tokens
        count = len(live)
        live = {rid: left - 1 for rid, left in live.items()}
        finish = bytes(Finish.NONE if left else Finish.LENGTH for left in live.values())
        same, none = ints(*[1] * count), ints(*[0] * count)
        batch = TextBatch(
            ints(*live), none, same, ints(*[700] * count), (" token",) * count, finish, same, none, array("q", [1] * 8)
        )
        router.send_multipart([owner, encode(batch)])
        live = {rid: left for rid, left in live.items() if left}


def measure(link: Link, requests: int, tokens: int, concurrency: int) -> float:
    """Processor seconds of a run."""
    work = single(requests, Length(16, 16), Length(tokens, tokens), Tokens(1000, random.Random(1)))
    bench = Bench(link, as_text=False, params=lambda n: SamplingParams(max_tokens=n, ignore_eos=True))
    bench.run(work[:concurrency], concurrency, lambda: None)
    cpu = time.process_time()
    records, _ = bench.run(work, concurrency, lambda: None)
    cpu = time.process_time() - cpu
    assert all(r.error is None and r.output_tokens == tokens for r in records), records[0]
    return cpu


@click.command(context_settings={"show_default": True})
@click.option("--tokens", type=int, default=100, help="Chunks of an answer.")
@click.option("--requests", type=int, default=200)
@click.option("--concurrency", type=int, multiple=True, default=(1, 32, 256))
def main(tokens: int, requests: int, concurrency: tuple[int, ...]) -> None:
    """Print a table."""
    click.echo(machine() + "\n\n| over | concurrency | µs of processor per chunk | µs per request beside |")
    click.echo("|---|---|---|---|")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="rhz-") as directory:
        for kind in ("http", "ipc"):
            for at_once in concurrency:
                cost = {}
                for length in (1, tokens):
                    ours, theirs = context.Pipe()
                    target, own = (serve_http, ()) if kind == "http" else (serve_ipc, (directory,))
                    server = context.Process(target=target, args=(theirs, length, *own), daemon=True)
                    server.start()
                    address = ours.recv()
                    link: Link = HttpLink(Server(address), "m") if kind == "http" else Connection(address)
                    try:
                        cost[length] = measure(link, max(requests, at_once), length, at_once)
                    finally:
                        link.close()
                        server.terminate()
                        server.join()
                    Path(directory, "s").unlink(missing_ok=True)
                count = max(requests, at_once)
                chunk = (cost[tokens] - cost[1]) / count / (tokens - 1)
                request = cost[1] / count - chunk
                click.echo(f"| {kind} | {at_once} | {chunk * 1e6:.1f} | {request * 1e6:.0f} |")


if __name__ == "__main__":
    main()
