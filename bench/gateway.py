"""What HTTP costs: tokens per second of streamed answers through the gateway and over the cluster's own socket, one
after the other on the same cluster, the gateway's CPU time per streamed chunk, and its memory per idle connection.

    python -m bench.gateway                   # the demo model, 1, 32 and 256 requests at once
"""

import asyncio
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import click
import psutil
import uvloop

from bench.clusters import started
from common.async_connection import AsyncConnection
from common.sampling_params import SamplingParams

PROMPT = "Return a copy"
IDLE = 800


async def over_ipc(address: str, concurrency: int, requests: int, tokens: int) -> float:
    """Tokens per second."""
    slots, got = asyncio.Semaphore(concurrency), 0
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    async with AsyncConnection(address) as connection:

        async def one() -> None:
            nonlocal got
            async with slots:
                stream = connection.submit(PROMPT, params)
                while rows := await stream.take():
                    got += sum(len(row.token_ids) for row in rows)

        begin = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(requests)))
        return got / (time.perf_counter() - begin)


async def over_http(url: str, concurrency: int, requests: int, tokens: int) -> float:
    """Tokens per second: chunks are counted and not read, as the other side's work is not the question."""
    slots, got = asyncio.Semaphore(concurrency), 0
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one() -> None:
            nonlocal got
            async with slots, session.post(f"{url}/v1/completions", json=body) as response:
                async for data in response.content.iter_any():
                    got += data.count(b'"text":')

        begin = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(requests)))
        return got / (time.perf_counter() - begin)


def cpu_seconds(pid: int) -> float:
    """What a process has used so far."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


async def idle_bytes(url: str, pid: int) -> float:
    """Memory of the gateway per open connection that does nothing, after a request on it."""
    gateway = psutil.Process(pid)
    before = gateway.memory_info().rss
    host, port = url.removeprefix("http://").split(":")
    writers = []
    for _ in range(IDLE):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"}")
        writers.append(writer)
    after = gateway.memory_info().rss
    for writer in writers:
        writer.close()
    return (after - before) / IDLE


@click.command(context_settings={"show_default": True})
@click.option("--model", type=click.Path(path_type=Path), default=None, help="A checkpoint.  [default: the demo model]")
@click.option("--concurrency", type=int, multiple=True, default=(1, 32, 256), help="Requests at once; repeatable.")
@click.option("--tokens", type=int, default=64, help="Tokens of an answer.")
@click.option("--repeats", type=int, default=5, help="Rounds, ipc and HTTP in turn; the median counts.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(model: Path | None, concurrency: tuple[int, ...], tokens: int, repeats: int, as_json: bool) -> None:
    """Compare the gateway with the cluster's own socket."""
    flags = ["--port", "0", *([] if model is None else ["--model", str(model)])]
    with started(*flags) as info:
        ipc, url = info["addresses"]["frontend"], info["addresses"]["http"]
        gateway = info["pids"]["gateway"]
        rows: list[dict[str, Any]] = []
        for at_once in concurrency:
            requests = max(8, 2 * at_once)
            rates: dict[str, list[float]] = {"ipc": [], "http": []}
            busy: list[float] = []
            for _ in range(repeats):
                rates["ipc"].append(uvloop.run(over_ipc(ipc, at_once, requests, tokens)))
                before = cpu_seconds(gateway)
                rates["http"].append(uvloop.run(over_http(url, at_once, requests, tokens)))
                busy.append((cpu_seconds(gateway) - before) / (requests * tokens))
            own, through = median(rates["ipc"]), median(rates["http"])
            # what a token costs more: on one busy core this is the gateway's and the HTTP client's work for a chunk
            cost = (1 / through - 1 / own) * 1e6
            found = {"concurrency": at_once, "ipc": own, "http": through, "us_per_chunk": cost}
            rows.append(found | {"gateway_cpu_us": median(busy) * 1e6})
        idle = uvloop.run(idle_bytes(url, gateway))
    if as_json:
        click.echo(json.dumps({"rows": rows, "bytes_per_idle_connection": idle}))
        return
    click.echo("requests at once   ipc tokens/s   http tokens/s   ratio   us per chunk   us of gateway CPU per chunk")
    for row in rows:
        rates = f"{row['ipc']:>14,.0f} {row['http']:>15,.0f} {row['http'] / row['ipc']:>7.2f}"
        click.echo(f"{row['concurrency']:>16} {rates} {row['us_per_chunk']:>14.1f} {row['gateway_cpu_us']:>29.1f}")
    click.echo(f"memory per idle connection: {idle / 1024:.1f} KiB")


if __name__ == "__main__":
    main()
