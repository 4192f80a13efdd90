"""Clients that disconnect without a word, in any phase of a request. For clusters with `--max-running 2`."""

import json
import socket
import time
from collections.abc import Callable
from urllib.request import urlopen

from bench.plain_http import dial_plain, head, post

PHASES = ("head", "upload", "queued", "prefill", "decode", "several choices")
HOLDERS = 2  # requests that keep the slots busy while another one waits


def leave(url: str, phase: str, *, stream: bool, seed: int) -> None:
    """Ask, and close the connection in the middle."""
    body = {"prompt": f"{seed} Return a copy", "max_tokens": 900, "ignore_eos": True, "stream": stream, "seed": seed}
    open_ones = [dial_plain(url)]
    match phase:
        case "head":
            open_ones[0].sendall(head("/v1/completions", 100)[:40])
        case "upload":
            whole = post("/v1/completions", body)
            open_ones[0].sendall(whole[: -len(whole) // 4])
        case "queued":
            before = _counters(url)["scheduler.requests"]
            open_ones += [dial_plain(url) for _ in range(HOLDERS)]
            for plain in open_ones:
                plain.sendall(post("/v1/completions", body))
            _wait(lambda: _counters(url)["scheduler.requests"] >= before + HOLDERS + 1)
        case "prefill":
            before = _counters(url)["scheduler.requests"]
            open_ones[0].sendall(post("/v1/completions", body | {"prompt": f"{seed} " + "a copy of it " * 150}))
            _wait(lambda: _counters(url)["scheduler.requests"] > before)
        case "decode" | "several choices":
            many = {"n": 4} if phase == "several choices" else {}
            before = _counters(url)["scheduler.output_tokens"]
            open_ones[0].sendall(post("/v1/completions", body | many))
            if stream:
                _until(open_ones[0], b"data:")
            else:
                _wait(lambda: _counters(url)["scheduler.output_tokens"] > before)
        case _:
            raise ValueError(phase)
    for plain in open_ones:
        plain.close()


def until_freed(url: str, patience_s: float) -> float:
    """Seconds until no request is left anywhere and every page is free or cached. Raises TimeoutError."""
    began = time.monotonic()
    while not _idle(values := _counters(url)):
        if time.monotonic() - began > patience_s:
            raise TimeoutError(f"something is left: {values}")
    return time.monotonic() - began


def _idle(values: dict[str, int]) -> bool:
    free = values["scheduler.free_pages"] + values["scheduler.evictable_pages"]
    live = ("scheduler.running", "scheduler.waiting", "tokenizer.live_requests", "detokenizer.streams")
    return not any(values[name] for name in live) and free == values["scheduler.total_pages"]


def _counters(url: str) -> dict[str, int]:
    with urlopen(f"{url}/server_info", timeout=30) as answer:
        values: dict[str, int] = json.load(answer)["stats"]
    return values


def _wait(condition: Callable[[], bool], patience_s: float = 30.0) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the request did not come so far")


def _until(plain: socket.socket, mark: bytes) -> None:
    found = b""
    while mark not in found:
        data = plain.recv(65536)
        if not data:
            raise ConnectionError(found)
        found += data
