"""Load generators. Each sends `COUNT` requests for `TOKENS` tokens, `AT_ONCE` at a time; none may fail, and the tokens
that it counted must be those that the cluster counted."""

import json
import shutil
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conformance.environments import python_environment
from tests.conformance.server import Server, report, run, version_of

COUNT = 16
AT_ONCE = 4
TOKENS = 12
PROMPT_TOKENS = 40
# the last release whose load generator does not import the whole engine, and with it CUDA's libraries
SGLANG = "sglang==0.5.9"
SGLANG_IMPORTS = ("aiohttp", "datasets", "ipython", "numpy", "pillow", "psutil", "pybase64", "requests", "tqdm",
                  "transformers")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Load:
    """What a generator says it has done. `prompt_tokens` is None for one that does not know how its texts are read."""

    requests: int
    prompt_tokens: int | None
    output_tokens: int
    warm_up: int = 0  # further requests of the same kind, which it does not count


def counters(server: Server) -> dict[str, int]:
    """The cluster's own counters."""
    request = urllib.request.Request(f"{server.url}/server_info", headers={"Authorization": f"Bearer {server.key}"})
    with urllib.request.urlopen(request, timeout=30) as response:
        stats: dict[str, int] = json.load(response)["stats"]
    return stats


def _checked(server: Server, client: str, title: str, go: Callable[[], Load | str]) -> bool:
    """Run a generator between two looks at the cluster's counters; a text is what went wrong."""
    before = counters(server)
    load = go()
    if isinstance(load, str):
        return report(False, client, title, load[-400:])
    after = counters(server)
    moved = {name.removeprefix("scheduler."): value - before[name] for name, value in after.items()}
    requests = COUNT + load.warm_up
    expected = {"requests": requests, "finished": requests, "output_tokens": load.output_tokens + load.warm_up * TOKENS,
                "aborted": 0, "failed": 0, "refused": 0}  # fmt: skip
    if load.prompt_tokens is not None:
        expected["prompt_tokens"] = load.prompt_tokens
    wrong = [f"{name}: {moved[name]} here, {value} there" for name, value in expected.items() if moved[name] != value]
    if load.requests != COUNT or load.output_tokens != COUNT * TOKENS:
        wrong.append(f"{load.requests} requests, {load.output_tokens} tokens")
    prompts = f"{load.prompt_tokens:,} prompt and " if load.prompt_tokens is not None else ""
    note = f"({load.requests} requests, {prompts}{load.output_tokens:,} output tokens, as the cluster counts them)"
    return report(not wrong, client, f"{title}: every request answered", "; ".join(wrong) or note)


def aiperf(server: Server) -> bool:
    """Chats and completions, streamed."""
    programs = python_environment(server.home / "aiperf", "aiperf")
    client, passed = version_of(programs, "aiperf"), True
    for kind in ("chat", "completions"):
        out = _emptied(server.home / f"aiperf_{kind}")

        def go(kind: str = kind, out: Path = out) -> Load | str:
            # with the hub switched off it does not find a tokenizer in a directory either
            done = run(
                [programs / "aiperf", "profile", "--model", server.name, "--url", server.url, "--endpoint-type", kind,
                 "--streaming", "--tokenizer", server.model, "--concurrency", AT_ONCE, "--request-count", COUNT,
                 "--synthetic-input-tokens-mean", PROMPT_TOKENS, "--output-tokens-mean", TOKENS,
                 "--extra-inputs", "ignore_eos:true", "--use-server-token-count", "--api-key", server.key,
                 "--ui", "none", "--artifact-dir", out],
                offline=False,
            )  # fmt: skip
            results = out / "profile_export_aiperf.json"
            if done.returncode or not results.exists():
                return (done.stdout + done.stderr).strip()
            found = json.loads(results.read_text())
            if found["error_summary"]:
                return str(found["error_summary"])
            requests = int(found["request_count"]["avg"])
            prompts, answers = (
                round(found[f"{side}_sequence_length"]["avg"] * requests) for side in ("input", "output")
            )
            return Load(requests, prompts, answers)

        passed &= _checked(server, client, f"{kind}, streamed", go)
    return passed


def guidellm(server: Server) -> bool:
    """Chats and completions; it counts by `usage`."""
    programs = python_environment(server.home / "guidellm", "guidellm", torch=True)
    client, passed = version_of(programs, "guidellm"), True
    for path in ("/v1/chat/completions", "/v1/completions"):
        out = _emptied(server.home / "guidellm_out") / "results.json"

        def go(path: str = path, out: Path = out) -> Load | str:
            backend = {"kind": "openai_http", "target": server.url, "model": server.name, "request_format": path,
                       "api_key": server.key}  # fmt: skip
            done = run(
                [programs / "guidellm", "run", "--backend", json.dumps(backend),
                 "--profile", f"kind=concurrent,streams={AT_ONCE}",
                 "--constraint", f"kind=max_requests,count={COUNT}",
                 "--tokenizer", f"kind=huggingface_auto,model={server.model}",
                 "--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={TOKENS}",
                 "--output", f"kind=json,path={out}", "--disable-console"],
            )  # fmt: skip
            if done.returncode or not out.exists():
                return (done.stdout + done.stderr).strip()
            metrics = json.loads(out.read_text())["benchmarks"][0]["metrics"]
            totals = metrics["request_totals"]
            if totals["successful"] != totals["total"]:
                return str(totals)
            prompts = int(metrics["prompt_token_count"]["successful"]["total_sum"])
            return Load(totals["successful"], prompts, int(metrics["output_token_count"]["successful"]["total_sum"]))

        passed &= _checked(server, client, path, go)
    return passed


def evalscope(server: Server) -> bool:
    """`evalscope perf`: chats and completions, streamed; it counts by `usage`."""
    programs = python_environment(server.home / "evalscope", "evalscope[perf]")
    client, passed = version_of(programs, "evalscope"), True
    for path in ("/v1/chat/completions", "/v1/completions"):
        out = _emptied(server.home / "evalscope_out")

        def go(path: str = path, out: Path = out) -> Load | str:
            done = run(
                [programs / "evalscope", "perf", "--url", server.url + path, "--api", "openai", "--api-key", server.key,
                 "--model", server.name, "--tokenizer-path", server.model, "--dataset", "random",
                 "--min-prompt-length", PROMPT_TOKENS, "--max-prompt-length", PROMPT_TOKENS,
                 "--min-tokens", TOKENS, "--max-tokens", TOKENS, "--extra-args", '{"ignore_eos": true}',
                 "--parallel", AT_ONCE, "--number", COUNT, "--stream", "--no-test-connection",
                 "--outputs-dir", out, "--no-timestamp"],
            )  # fmt: skip
            found = list(out.rglob("benchmark_summary.json"))
            if done.returncode or len(found) != 1:
                return (done.stdout + done.stderr).strip()
            summary = json.loads(found[0].read_text())
            if summary["Failed Requests"]:
                return f"{summary['Failed Requests']} requests failed"
            count = summary["Success Requests"]
            prompts = round(summary["Avg Input Tokens"] * count)
            return Load(count, prompts, round(summary["Avg Output Tokens"] * count))

        passed &= _checked(server, client, path, go)
    return passed


def sglang_bench(server: Server) -> bool:
    """SGLang's `bench_serving`: its native endpoint with token ids, completions and chats."""
    programs = python_environment(server.home / "sglang", *SGLANG_IMPORTS, alone=SGLANG)
    client, passed = version_of(programs, "sglang"), True
    native = ("--tokenize-prompt",)
    for backend, more in (("sglang", native), ("sglang-oai", ()), ("vllm", ()), ("sglang-oai-chat", ())):
        out = _emptied(server.home / "sglang_out") / "results.jsonl"

        def go(backend: str = backend, more: tuple[str, ...] = more, out: Path = out) -> Load | str:
            done = run(
                [programs / "python", "-m", "sglang.bench_serving", "--backend", backend, "--base-url", server.url,
                 "--model", server.name, "--tokenizer", server.model, "--dataset-name", "random-ids",
                 "--random-input-len", PROMPT_TOKENS, "--random-output-len", TOKENS, "--random-range-ratio", "1",
                 "--num-prompts", COUNT, "--max-concurrency", AT_ONCE, "--warmup-requests", 1, "--output-file", out,
                 *more],
                OPENAI_API_KEY=server.key,
            )  # fmt: skip
            if done.returncode or not out.exists():
                return (done.stdout + done.stderr).strip()
            found: dict[str, Any] = json.loads(out.read_text())
            # texts made of random ids are read as other ids
            prompts = COUNT * PROMPT_TOKENS + PROMPT_TOKENS if more else None
            return Load(found["completed"], prompts, found["total_output_tokens"], warm_up=1)

        passed &= _checked(server, client, f"--backend {backend}", go)
    return passed


def _emptied(directory: Path) -> Path:
    """A new directory: results of a run before must not be taken for those of this one."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory
