"""How each public client is installed and run. A suite prints one line per check, PASS or FAIL first."""

import json
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

from tests.conformance import fields, loads, router
from tests.conformance.environments import node_modules, python_environment
from tests.conformance.reference import Reference
from tests.conformance.server import HERE, Server, report, run, version_of

TASKS = ("rhizome_choice", "rhizome_rolling", "rhizome_until")


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


def anthropic(server: Server) -> bool:
    return _script(server, "anthropic_client", "anthropic")


def litellm(server: Server) -> bool:
    return _script(server, "litellm_client", "litellm")


def langchain(server: Server) -> bool:
    return _script(server, "langchain_client", "langchain-openai")


def agents(server: Server) -> bool:
    return _script(server, "agents_client", "openai-agents")


def pydantic_ai(server: Server) -> bool:
    return _script(server, "pydantic_ai_client", "pydantic-ai-slim[openai]")


def ai_sdk(server: Server) -> bool:
    packages = ("ai", "@ai-sdk/openai-compatible", "@ai-sdk/openai", "@ai-sdk/anthropic")
    modules = node_modules(server.home / "ai_sdk", *packages)
    script = HERE / "clients" / "ai_sdk.mjs"
    return _shown(run(["node", script, f"{server.url}/v1", server.key, server.name, modules]), "ai")


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
    client = version_of(programs, "lm-eval")
    out = server.home / "lm_eval_out"
    shutil.rmtree(out, ignore_errors=True)  # what a run before wrote there
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


def llm(server: Server) -> bool:
    """The command line tool of that name, told of the server by its file of further OpenAI-compatible models."""
    programs = python_environment(server.home / "llm", "llm")
    home = server.home / "llm_home"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    base = f"  model_name: {server.name}\n  api_base: {server.url}/v1\n  api_key_name: rhizome\n"
    chat = f"- model_id: chat\n{base}  supports_schema: true\n  supports_tools: true\n"
    (home / "extra-openai-models.yaml").write_text(f"{chat}- model_id: text\n{base}  completion: true\n")
    (home / "keys.json").write_text(json.dumps({"rhizome": server.key}))
    client = version_of(programs, "llm")

    def ask(*arguments: str) -> str:
        done = run([programs / "llm", *arguments], LLM_USER_PATH=str(home))
        if done.returncode:
            raise AssertionError(done.stderr.strip()[-400:])
        return done.stdout.strip()

    greedy = ("-o", "temperature", "0", "-o", "max_tokens", "12")
    streamed = ask("-m", "chat", "What does len do?", "-s", "Be brief.", *greedy)
    whole = ask("-m", "chat", "What does len do?", "-s", "Be brief.", *greedy, "--no-stream")
    passed = report(
        bool(whole) and streamed == whole, client, "chat: a stream says what the whole answer says", f"({whole!r})"
    )
    before = loads.counters(server)
    ask("-m", "chat", "What does sum do?", *greedy)
    after = loads.counters(server)
    logged = json.loads(ask("logs", "-n", "1", "--json"))[0]
    spent = [after[f"scheduler.{name}_tokens"] - before[f"scheduler.{name}_tokens"] for name in ("prompt", "output")]
    fine = spent == [logged["input_tokens"], logged["output_tokens"]]
    passed &= report(fine, client, "its log has the usage", f"({logged['input_tokens']} + {logged['output_tokens']})")
    passed &= report(bool(ask("-c", "And sum?", *greedy)), client, "a conversation goes on")
    text = ask("-m", "text", "Return a", *greedy)
    passed &= report(bool(text), client, "text completions", f"({text!r})")
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
              "additionalProperties": False}  # fmt: skip
    found = ask("-m", "chat", "Is it so?", "--schema", json.dumps(schema))
    passed &= report(isinstance(json.loads(found).get("ok"), bool), client, "a schema is kept", f"({found!r})")
    with_tool = ask("-m", "chat", "Which version?", "-T", "llm_version", *greedy)
    return passed & report(True, client, "a tool may be called", f"({with_tool!r})")


SUITES: dict[str, Callable[[Server], bool]] = {
    "fields": fields.check,
    "openai": openai_sdk,
    "anthropic": anthropic,
    "lm-eval": lm_eval,
    "litellm": litellm,
    "compatcanary": compatcanary,
    "openai-node": openai_node,
    "langchain": langchain,
    "agents": agents,
    "pydantic-ai": pydantic_ai,
    "ai-sdk": ai_sdk,
    "llm": llm,
    "aiperf": loads.aiperf,
    "guidellm": loads.guidellm,
    "evalscope": loads.evalscope,
    "sglang-bench": loads.sglang_bench,
    "smg": router.smg,
}
