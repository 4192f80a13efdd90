"""The client's commands over HTTP on the real gateway: what they give over ipc."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.client.test_chat_command import Terminal
from tests.integration.cluster import ROOT, running, wait_until

DEMO = ROOT / "demo_model"
COUNTED = ("prompt_tokens", "cached_tokens", "output_tokens")


@pytest.fixture(scope="module")
def cluster():
    with running(DEMO, "--dtype", "float32", "--kv-tokens", "32768", "--port", "0") as found:
        yield found


def remote(cluster, *args, **options):
    """Run client.py over HTTP to its end."""
    command = [sys.executable, str(ROOT / "client.py"), *args, "--url", cluster.info["addresses"]["http"]]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


@pytest.mark.parametrize(
    "flags",
    [
        ("Return a copy of", "--temperature", "0"),
        ("Return a copy of", "--temperature", "0.9", "--seed", "5", "--top-k", "50", "--min-p", "0.01", "--n", "2"),
        ("What does str.join do?", "--chat", "--seed", "1", "--repetition-penalty", "1.2", "--logit-bias", "5:-100"),
        ("Say", "--chat", "--system", "Be brief.", "--seed", "2", "--ignore-eos", "--min-tokens", "5"),
    ],
    ids=" ".join,
)
def test_complete_gives_what_it_gives_over_ipc(cluster, flags):
    same = ("text", "prompt_tokens", "finish_reason")
    args = (*flags, "--max-tokens", "20", "--json")
    over_http, over_ipc = remote(cluster, *args), cluster.client(*args)
    assert over_http.returncode == over_ipc.returncode == 0, over_http.stderr + over_ipc.stderr
    theirs, ours = json.loads(over_http.stdout), json.loads(over_ipc.stdout)
    assert {name: theirs[name] for name in same} == {name: ours[name] for name in same}
    if "--n" in flags:
        assert [c["text"] for c in theirs["choices"]] == [c["text"] for c in ours["choices"]]
    else:
        assert theirs["completion_tokens"] == ours["completion_tokens"]
    assert 0 < theirs["ttft_ms"] <= theirs["e2e_ms"]


@pytest.mark.parametrize("chat", [(), ("--chat",)], ids=["text", "chat"])
def test_prompt_logprobs_are_those_over_ipc(cluster, chat):
    args = ("Return a copy of", *chat, "--temperature", "0", "--max-tokens", "3", "--prompt-logprobs", "2", "--json")
    over_http, over_ipc = remote(cluster, *args), cluster.client(*args)
    assert over_http.returncode == over_ipc.returncode == 0, over_http.stderr + over_ipc.stderr
    theirs, ours = json.loads(over_http.stdout), json.loads(over_ipc.stdout)
    assert (theirs["text"], theirs["prompt_tokens"]) == (ours["text"], ours["prompt_tokens"])
    assert len(ours["prompt_logprobs"]) == ours["prompt_tokens"]
    assert theirs["prompt_logprobs"][0] is ours["prompt_logprobs"][0] is None
    for their, our in zip(theirs["prompt_logprobs"][1:], ours["prompt_logprobs"][1:], strict=True):
        assert (their["token_id"], their["rank"]) == (our["token_id"], our["rank"])
        assert their["logprob"] == pytest.approx(our["logprob"], abs=1e-4)
        assert [t["token_id"] for t in their["top"]] == [t["token_id"] for t in our["top"]]


@pytest.mark.parametrize(
    "flags", [("--choice", "one", "--choice", "two"), ("--regex", "[ab]{3,5}"), ("--json-object",)]
)
def test_grammars_do_over_http_what_they_do_over_ipc(cluster, flags):
    """The same answer, or for a model that has none, the same refusal."""
    args = ("Say", *flags, "--seed", "4", "--max-tokens", "20")
    over_http, over_ipc = remote(cluster, *args), cluster.client(*args)
    assert (over_http.returncode, over_http.stdout) == (over_ipc.returncode, over_ipc.stdout), over_http.stderr
    if over_ipc.returncode:
        assert over_http.stderr.partition(": ")[2].partition(": ")[2].split(": ")[-1] in over_ipc.stderr


def test_refusals_have_the_servers_words(cluster):
    done = remote(cluster, "x " * 3000)
    assert done.returncode == 1 and "HTTP 400" in done.stderr and "maximum context length is 1024 tokens" in done.stderr
    done = remote(cluster, "x", "--model", "gpt-4")
    assert done.returncode == 1 and "HTTP 404" in done.stderr and "gpt-4" in done.stderr


def test_chat_on_a_terminal_with_ctrl_c(cluster):
    url = cluster.info["addresses"]["http"]
    terminal = Terminal("chat", "--max-tokens", "900", "--ignore-eos", "--temperature", "0", "--url", url)
    terminal.wait_for("> ")
    terminal.type("What does str.join do?\n")
    wait_until(lambda: cluster.stats()["scheduler.running"] == 1, 20)
    terminal.type("\x03")
    terminal.wait_for("(stopped)")
    cluster.check_idle()
    terminal.wait_for("> ")
    terminal.type("/exit\n")
    assert terminal.close() == 0


def test_an_interrupted_client_frees_its_request(cluster):
    command = [sys.executable, str(ROOT / "client.py"), "Say", "--max-tokens", "900", "--ignore-eos"]
    client = subprocess.Popen(
        [*command, "--url", cluster.info["addresses"]["http"]], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    wait_until(lambda: cluster.stats()["scheduler.running"] == 1, 20)
    client.send_signal(signal.SIGINT)
    client.communicate(timeout=20)
    assert client.returncode == 130
    cluster.check_idle()


def test_a_batch_has_the_same_answers_over_both(cluster, tmp_path):
    body = {"model": "demo_model", "max_tokens": 10, "temperature": 0, "ignore_eos": True}
    chat = [{"role": "user", "content": [{"type": "text", "text": "Say a"}]}]
    lines = [
        {"custom_id": "p", "method": "POST", "url": "/v1/completions", "body": {**body, "prompt": "Return a"}},
        {"custom_id": "i", "method": "POST", "url": "/v1/completions", "body": {**body, "prompt": [5, 6, 7]}},
        {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": {**body, "messages": chat}},
        {"custom_id": "e", "method": "POST", "url": "/v1/completions", "body": {**body, "prompt": "x", "top_p": 7}},
    ]
    source = tmp_path / "in"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    results = []
    for name, run in (("http", remote), ("ipc", lambda c, *args: c.client(*args))):
        done = run(cluster, "batch", str(source), str(tmp_path / name))
        assert done.returncode == 1 and "1 of 4 requests failed" in done.stderr, done.stderr
        found = {r["custom_id"]: r for r in map(json.loads, (tmp_path / name).read_text().splitlines())}
        assert set(found) == set("pice") and all(r["error"] is None for r in found.values())
        status = {name: r["response"]["status_code"] for name, r in found.items()}
        assert status == {"p": 200, "i": 200, "c": 200, "e": 400}
        bodies = {name: r["response"]["body"] for name, r in found.items()}
        assert bodies["e"]["error"]["param"] == "top_p"
        results.append(
            {
                "p": bodies["p"]["choices"][0]["text"], "i": bodies["i"]["choices"][0]["text"],
                "c": bodies["c"]["choices"][0]["message"]["content"],
                **{f"{n} tokens": bodies[n]["usage"]["total_tokens"] for n in "pic"},
            }
        )  # fmt: skip
    assert results[0] == results[1]


@pytest.mark.parametrize(
    "flags",
    [
        ("--concurrency=4", "--input-len=10:30"),
        ("--request-rate=40", "--prompts=text"),
        ("--dataset=shared-prefix", "--prefix-len=64", "--concurrency=3"),
        ("--dataset=multi-turn", "--turns=3", "--concurrency=2", "--input-len=12"),
    ],
    ids=" ".join,
)
def test_the_counts_of_a_benchmark_are_those_of_the_cluster(cluster, tmp_path, flags):
    out = tmp_path / "out.json"
    before = cluster.stats()
    done = remote(cluster, "bench", "--requests=12", "--input-len=20", "--output-len=6", *flags, "--warm-up=0",
                  f"--json={out}")  # fmt: skip
    assert done.returncode == 0, done.stderr
    after = cluster.stats()
    summary = json.loads(out.read_text())["summary"]
    grown = {name: after[f"scheduler.{name}"] - before[f"scheduler.{name}"] for name in COUNTED}
    assert {name: summary[name] for name in COUNTED} == grown
    assert summary["completed"] == 12 and summary["output_tokens"] == 72 and summary["short_answers"] == 0
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        assert 0 < summary[name]["p50"] <= summary[name]["p99"]
    assert 0 <= summary["itl_ms"]["p50"] <= summary["itl_ms"]["p99"]  # tokens that share a chunk have 0 between them


def test_status_and_top(cluster):
    state = json.loads(remote(cluster, "status", "--json").stdout)
    assert (state["status"], state["model"], state["context_len"]) == ("healthy", "demo_model", 1024)
    shown = json.loads(remote(cluster, "top", "--once", "--json").stdout)
    local = json.loads(cluster.client("top", "--once", "--json").stdout)
    same = ("pages", "prompt_tokens", "output_tokens", "cached_tokens", "preempted", "hit_rate", "running")
    assert {name: shown[name] for name in same} == {name: local[name] for name in same}


def test_a_key(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("me:sesame-0123456789abcdef\n")
    keys.chmod(0o600)
    with running(DEMO, "--kv-tokens", "1024", "--port", "0", "--api-key-file", str(keys)) as cluster:
        done = remote(cluster, "x")
        assert done.returncode == 1 and "HTTP 401" in done.stderr
        env = {**os.environ, "MY_KEY": "sesame-0123456789abcdef"}
        done = remote(cluster, "x", "--max-tokens", "3", "--api-key-env", "MY_KEY", env=env)
        assert done.returncode == 0, done.stderr
