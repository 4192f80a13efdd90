"""smg, SGLang's former sglang-router, in front of two clusters: where requests go, and what happens when one dies."""

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conformance.environments import python_environment
from tests.conformance.loads import counters
from tests.conformance.server import Server, report, version_of
from tests.integration.cluster import Cluster, wait_until

ANSWER_S = 60
READY_S = 60
FAMILIES = 8  # groups of prompts with a common beginning
TURNS = 3
LONG = " ".join(["Return a copy of the string with leading and trailing characters removed."] * 4)


@dataclass(frozen=True, slots=True)
class Client:
    """Plain HTTP with a key."""

    url: str
    key: str

    def get(self, path: str) -> str:
        return self._ask(urllib.request.Request(self.url + path))

    def post(self, path: str, body: dict[str, Any]) -> str:
        return self._ask(urllib.request.Request(self.url + path, json.dumps(body).encode()))

    def _ask(self, request: urllib.request.Request) -> str:
        request.add_header("Authorization", f"Bearer {self.key}")
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
            text: str = response.read().decode()
        return text

    def complete(self, model: str, prompt: str) -> dict[str, Any]:
        body = {"model": model, "prompt": prompt, "max_tokens": 4, "temperature": 0}
        answer: dict[str, Any] = json.loads(self.post("/v1/completions", body))
        return answer

    def workers(self) -> dict[str, bool]:
        """The router's workers, and whether it finds them healthy."""
        return {worker["url"]: worker["is_healthy"] for worker in json.loads(self.get("/workers"))["workers"]}


def smg(server: Server) -> bool:
    """The cache-aware policy, health checks, and a cluster that is killed and comes back."""
    programs = python_environment(server.home / "smg", "smg")
    name = version_of(programs, "smg")
    with ExitStack() as stack:
        clusters = [_cluster(stack, server) for _ in range(2)]
        behind = [_behind(server, cluster) for cluster in clusters]
        client = stack.enter_context(_router(programs, server, [one.url for one in behind]))
        passed = _routes(name, client, behind)
        return passed & _survives(name, client, clusters, behind, stack)


def _cluster(stack: ExitStack, server: Server, port: str = "0") -> Cluster:
    cluster = Cluster(server.model, "--port", port, "--api-key-file", str(server.key_file), "--dtype", "float32")
    stack.callback(cluster.destroy)
    return cluster.wait_ready()


def _behind(server: Server, cluster: Cluster) -> Server:
    return Server(cluster.info["addresses"]["http"], server.key, server.key_file, server.model, server.home)


@contextmanager
def _router(programs: Path, server: Server, urls: list[str]) -> Iterator[Client]:
    """smg, which gets its workers' key on its command line because it has no other place for it."""
    port, metrics = _free_ports(2)
    log = server.home / "smg.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [programs / "smg", "launch", "--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware",
             "--worker-urls", *urls, "--api-key", server.key, "--health-check-interval-secs", "1",
             "--health-failure-threshold", "1", "--health-success-threshold", "1", "--health-check-timeout-secs", "2",
             "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)],
            stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    client = Client(f"http://127.0.0.1:{port}", server.key)

    def ready() -> bool:
        try:
            return sorted(client.workers()) == sorted(urls) and all(client.workers().values())
        except (urllib.error.URLError, ConnectionError):
            return False

    try:
        wait_until(ready, READY_S, lambda: log.read_text(errors="replace")[-2000:])
        yield client
    finally:
        process.kill()
        process.wait()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def _routes(name: str, client: Client, behind: list[Server]) -> bool:
    model = behind[0].name
    before = [counters(one) for one in behind]
    prompts = [[f"{family}: {LONG} {'Why? ' * turn}" for turn in range(TURNS)] for family in range(FAMILIES)]
    cached = [[client.complete(model, prompt)["usage"]["prompt_tokens_details"]["cached_tokens"] for prompt in family]
              for family in prompts]  # fmt: skip
    shares = [counters(one)["scheduler.requests"] - was["scheduler.requests"]
              for one, was in zip(behind, before, strict=True)]  # fmt: skip
    fine = sum(shares) == FAMILIES * TURNS and min(shares) >= TURNS
    passed = report(fine, name, "both clusters get requests", f"({shares[0]} and {shares[1]})")
    again = [tokens for family in cached for tokens in family[1:]]
    title = "cache-aware: a prompt goes where its beginning is cached"
    passed &= report(min(again) >= 32, name, title, f"({min(again)} to {max(again)} tokens from the cache)")

    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "temperature": 0}
    through, direct = (json.loads(one.post("/v1/chat/completions", body))["choices"][0]["message"]["content"]
                       for one in (client, Client(behind[0].url, behind[0].key)))  # fmt: skip
    events = client.post("/v1/chat/completions", {**body, "stream": True}).split("\n\n")
    chunks = [json.loads(event[6:]) for event in events if event.startswith("data: {")]
    streamed = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    fine = through == direct == streamed and "data: [DONE]" in events
    passed &= report(fine, name, "chats, whole and streamed, are those of a cluster", f"({through!r})")

    native = json.loads(client.post("/generate", {"text": "Return a", "sampling_params": {"max_new_tokens": 3}}))
    passed &= report(native["meta_info"]["completion_tokens"] == 3, name, "/generate", f"({native['text']!r})")
    seen = [_health_checks(one) for one in behind]
    wait_until(lambda: all(_health_checks(one) > was for one, was in zip(behind, seen, strict=True)), READY_S)
    return passed & report(min(seen) > 0, name, "health checks reach both clusters")


def _health_checks(server: Server) -> int:
    """How many a cluster has answered with 200."""
    for line in Client(server.url, server.key).get("/metrics").splitlines():
        if line.startswith("rhizome_http_requests_total") and 'route="/health"' in line and 'status="200"' in line:
            return int(float(line.rsplit(" ", 1)[1]))
    return 0


def _survives(name: str, client: Client, clusters: list[Cluster], behind: list[Server], stack: ExitStack) -> bool:
    model, dead = behind[0].name, behind[1].url
    clusters[1].destroy()  # SIGKILL
    killed = time.monotonic()
    answered = [client.complete(model, f"{number}: {LONG}")["usage"]["completion_tokens"] for number in range(12)]
    title = "a cluster is killed: every request is answered by the other"
    passed = report(answered == [4] * 12, name, title, f"({len(answered)} of them)")
    wait_until(lambda: not client.workers().get(dead, False), READY_S, lambda: str(client.workers()))
    passed &= report(client.workers()[behind[0].url], name, "the dead one is found to be unhealthy",
                     f"(after {time.monotonic() - killed:.1f} s)")  # fmt: skip

    _cluster(stack, behind[1], port=dead.rsplit(":", 1)[1])
    wait_until(lambda: client.workers().get(dead, False), READY_S, lambda: str(client.workers()))
    was = counters(behind[1])["scheduler.requests"]
    for number in range(FAMILIES):
        client.complete(model, f"again {number}: {LONG}")
    got = counters(behind[1])["scheduler.requests"] - was
    return passed & report(got > 0, name, "a cluster on its address gets requests again", f"({got} of {FAMILIES})")
