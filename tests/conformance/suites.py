"""How each public client is installed and run. A suite prints one line per check, PASS or FAIL first."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conformance.environments import node_modules, python_environment
from tests.conformance.reference import Reference

HERE = Path(__file__).parent
RUN_S = 300
TASKS = ("rhizome_choice", "rhizome_rolling", "rhizome_until")


@dataclass(frozen=True, slots=True)
class Server:
    """The gateway under test and a directory for environments and files. `url` has no path."""

    url: str
    key: str
    model: Path
    home: Path

    @property
    def name(self) -> str:
        return self.model.name


def report(passed: bool, client: str, title: str, note: str = "") -> bool:
    print(f"{'PASS' if passed else 'FAIL'}  {client}  {title}{': ' if note and not passed else ' ' * bool(note)}{note}")
    sys.stdout.flush()
    return passed


def run(command: list[Any], **more: str) -> subprocess.CompletedProcess[str]:
    """Run a client's program with what it finds in the environment, and no way to a model hub."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    environment = os.environ | offline | more
    arguments = [str(part) for part in command]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=RUN_S, env=environment, cwd=HERE)


def _script(server: Server, script: str, *packages: str) -> bool:
    """A script of `clients`, whose own lines are shown."""
    programs = python_environment(server.home / script, *packages)
    done = run([programs / "python", HERE / "clients" / f"{script}.py", f"{server.url}/v1", server.key, server.name])
    return _shown(done, script)


def _shown(done: subprocess.CompletedProcess[str], client: str) -> bool:
    print("\n".join(line for line in done.stdout.splitlines() if line.startswith(("PASS", "FAIL"))), flush=True)
    if done.returncode and "FAIL" not in done.stdout:
        return report(False, client, "ends without a verdict", done.stderr.strip()[-400:])
    return done.returncode == 0


def openai_sdk(server: Server) -> bool:
    return _script(server, "openai_sdk", "openai")


def litellm(server: Server) -> bool:
    return _script(server, "litellm_client", "litellm")


def langchain(server: Server) -> bool:
    return _script(server, "langchain_client", "langchain-openai")


def openai_node(server: Server) -> bool:
    package = node_modules(server.home / "node", "openai", "compatcanary") / "openai"
    script = HERE / "clients" / "openai_node.mjs"
    return _shown(run(["node", script, f"{server.url}/v1", server.key, server.name, package]), "openai-node")


def compatcanary(server: Server) -> bool:
    """Profiles chat and modern; a line per probe."""
    package = node_modules(server.home / "node", "openai", "compatcanary") / "compatcanary"
    client = f"compatcanary {json.loads((package / 'package.json').read_text())['version']}"
    passed = True
    for profile in ("chat", "modern"):
        done = run(
            ["node", package / "src/cli.js", "scan", "--base-url", f"{server.url}/v1", "--model", server.name,
             "--profile", profile, "--format", "json", "--fail-on", "never"],
            OPENAI_API_KEY=server.key,
        )  # fmt: skip
        if done.returncode:
            passed = report(False, client, f"profile {profile}", done.stderr.strip()[-400:])
            continue
        for probe in json.loads(done.stdout)["results"]:
            title = f"{profile}: {probe['name']}"
            passed &= report(probe["status"] == "pass", client, title, f"({probe['summary']})")
    return passed


def lm_eval(server: Server) -> bool:
    """local-completions on local tasks of its three kinds of requests, compared with transformers."""
    programs = python_environment(server.home / "lm_eval", "lm-eval[api]", "transformers")
    version = run([programs / "python", "-c", "from importlib.metadata import version; print(version('lm-eval'))"])
    client = f"lm-eval {version.stdout.strip()}"
    out = server.home / "lm_eval_out"
    arguments = {
        "model": server.name, "base_url": f"{server.url}/v1/completions", "tokenizer": server.model,
        "tokenizer_backend": "huggingface", "num_concurrent": 4, "max_length": 1024,
    }  # fmt: skip
    done = run(
        [programs / "lm_eval", "run", "--model", "local-completions", "--tasks", ",".join(TASKS), "--include_path",
         "lm_eval_tasks", "--batch_size", "2", "--log_samples", "--output_path", out,
         "--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())],
        OPENAI_API_KEY=server.key, HF_HOME=str(server.home / "huggingface"),
    )  # fmt: skip
    if done.returncode:
        return report(False, client, "runs", done.stderr.strip()[-400:])
    reference, passed = Reference(server.model), True
    for task in TASKS:
        (file,) = out.rglob(f"samples_{task}_*.jsonl")
        samples = [json.loads(line) for line in file.read_text().splitlines()]
        problems = [problem for sample in samples for problem in _differences(task, sample, reference)]
        title = f"{task}: {len(samples)} samples as transformers computes them"
        passed &= report(bool(samples) and not problems, client, title, "; ".join(problems)[:400])
    return passed


def _differences(task: str, sample: dict[str, Any], reference: Reference) -> list[str]:
    problems = []
    for arguments, answers in zip(sample["arguments"].values(), sample["resps"], strict=True):
        found = answers[0]
        if task == "rhizome_until":
            options = arguments["arg_1"]
            expected = reference.greedy(arguments["arg_0"], options["until"][0], options["max_gen_toks"])
            if found != expected:
                problems.append(f"{found!r}, expected {expected!r}")
            continue
        rolling = task == "rhizome_rolling"
        context, text = ("", arguments["arg_0"]) if rolling else (arguments["arg_0"], arguments["arg_1"])
        total, greedy = reference.loglikelihood(context, text)
        value = float(found if rolling else found[0])
        if abs(value - total) > 1e-3:
            problems.append(f"{text!r}: {value}, expected {total}")
        if not rolling and found[1] != str(greedy):
            problems.append(f"{text!r}: greedy {found[1]}, expected {greedy}")
    return problems


def aiperf(server: Server) -> bool:
    """A load generator: chats and completions, streamed, four at a time."""
    programs = python_environment(server.home / "aiperf", "aiperf")
    passed, count = True, 16
    for kind in ("chat", "completions"):
        out = server.home / f"aiperf_{kind}"
        done = run(
            [programs / "aiperf", "profile", "--model", server.name, "--url", server.url, "--endpoint-type", kind,
             "--streaming", "--tokenizer", server.model, "--concurrency", 4, "--request-count", count,
             "--synthetic-input-tokens-mean", 40, "--output-tokens-mean", 12, "--extra-inputs", "ignore_eos:true",
             "--api-key", server.key, "--ui", "none", "--artifact-dir", out],
        )  # fmt: skip
        results = out / "profile_export_aiperf.json"
        if done.returncode or not results.exists():
            passed = report(False, "aiperf", kind, (done.stdout + done.stderr).strip()[-400:])
            continue
        found = json.loads(results.read_text())
        fine = found["request_count"]["avg"] == count and not found["error_summary"]
        lengths = found["output_sequence_length"]["avg"]
        note = f"({count} requests, {lengths:g} tokens each)" if fine else f"{found['error_summary']}"
        passed &= report(fine, f"aiperf {found['aiperf_version']}", f"{kind}: every request answered", note)
    return passed


SUITES: dict[str, Callable[[Server], bool]] = {
    "openai": openai_sdk,
    "lm-eval": lm_eval,
    "litellm": litellm,
    "compatcanary": compatcanary,
    "openai-node": openai_node,
    "langchain": langchain,
    "aiperf": aiperf,
}
