"""Real clusters through launch.py: exact outputs, requests that end early, what is private."""

import json
import random
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from common.answer import Answer
from common.messages import ErrorCode, Finish, RequestError
from common.rows import Row
from common.sampling_params import SamplingParams
from tests.helpers_models import make_checkpoint
from tests.integration.cluster import ROOT, running

DEMO = ROOT / "demo_model"
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def collect(connection, rids, timeout_s=120):
    """The whole answers of submitted requests, by id."""
    answers = {rid: Answer() for rid in rids}
    open_rids = set(rids)
    deadline = time.monotonic() + timeout_s
    while open_rids:
        assert time.monotonic() < deadline, f"{len(open_rids)} answers are missing"
        for row in connection.poll(1):
            assert isinstance(row, Row), row
            answers[row.rid].add(row)
            if row.finish is not Finish.NONE:
                open_rids.remove(row.rid)
    return answers


def reference(path, prompts, lengths):
    """Greedy continuations by transformers, in float32, one request at a time."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    outputs = []
    for prompt, length in zip(prompts, lengths, strict=True):
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, min_new_tokens=length, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs


def crowd(vocab, count=32, seed=1):
    """Prompts of mixed lengths, shorter and longer than a chunk, some sharing a prefix."""
    rng = random.Random(seed)
    common = [rng.randrange(3, vocab) for _ in range(40)]
    prompts = []
    for i in range(count):
        own = [rng.randrange(3, vocab) for _ in range(rng.choice([1, 3, 15, 16, 17, 60]))]
        prompts.append(common + own if i % 3 == 0 else own)
    return prompts, [rng.choice([1, 2, 8, 20]) for _ in range(count)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_checkpoint("llama", tmp_path_factory.mktemp("m") / "llama")


@pytest.fixture(scope="module")
def shared(llama):
    """For tests that can do with any cluster, and leave it idle."""
    flags = ("--tp", "2", "--dtype", "float32", "--kv-tokens", "8192", "--page-size", "1")
    with running(llama, *flags) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def demo():
    with running(DEMO, "--tp", "2", "--dtype", "float32") as cluster:
        yield cluster


CASES = [  # steps in flight: 2 unless it is said
    ("llama", ("--tp", "1", "--page-size", "1")),
    ("llama", ("--tp", "2", "--page-size", "16")),
    ("qwen2", ("--tp", "2", "--page-size", "1")),
    ("qwen3", ("--tp", "1", "--page-size", "16")),
    ("mistral", ("--tp", "1", "--page-size", "16", "--steps-in-flight", "1")),
    ("gpt2", ("--tp", "2", "--page-size", "16")),
    ("gptneox", ("--tp", "1", "--page-size", "16")),  # through the transformers backend
]


@pytest.mark.parametrize(
    ("kind", "flags"), CASES, ids=lambda value: value if isinstance(value, str) else " ".join(value)
)
def test_a_crowd_gets_exactly_what_transformers_generates(kind, flags, tmp_path):
    """Greedy, float32: alone and in a crowd, with a cold and a warm prefix cache, prompts longer than a chunk."""
    path = make_checkpoint(kind, tmp_path / kind)
    vocab = json.loads((path / "config.json").read_text())["vocab_size"]
    prompts, lengths = crowd(vocab)
    expected = reference(path, prompts, lengths)
    small = ("--max-batch-tokens", "64", "--chunk-tokens", "16", "--kv-tokens", "4096", "--max-running", "20")
    with running(path, "--dtype", "float32", *small, *flags) as cluster, cluster.connect() as connection:
        for i in (0, 3, 9):
            rid = connection.submit(prompts[i], SamplingParams(max_tokens=lengths[i], **GREEDY))
            assert collect(connection, [rid])[rid].token_ids == expected[i], "alone"
        for temperature_of_the_cache in ("cold", "warm"):
            rids = [
                connection.submit(p, SamplingParams(max_tokens=n, **GREEDY), stream=i % 2 == 0)
                for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))
            ]
            answers = collect(connection, rids)
            got = [answers[rid].token_ids for rid in rids]
            assert got == expected, f"in a crowd, {temperature_of_the_cache} cache"
        cached = [answers[rid].cached_tokens for rid in rids]
        assert cached == [len(p) - 1 for p in prompts], "the second round finds every token but the last"


def test_under_pressure_all_get_what_they_have_alone(llama):
    """A pool for a few of 32 requests, greedy and seeded; preemption must show, and must not show in the output."""
    prompts, _ = crowd(300)
    params = [
        SamplingParams(temperature=0.0 if i % 2 else 0.8, seed=i, max_tokens=60, ignore_eos=True) for i in range(32)
    ]
    batch = ("--max-batch-tokens", "64", "--chunk-tokens", "16", "--max-running", "32")
    flags = ("--dtype", "float32", "--page-size", "4", *batch)
    outputs = {}
    for name, tokens in (("roomy", "8192"), ("tight", "320")):
        with running(llama, *flags, "--kv-tokens", tokens) as cluster, cluster.connect() as connection:
            rids = [connection.submit(p, param) for p, param in zip(prompts, params, strict=True)]
            answers = collect(connection, rids)
            outputs[name] = [answers[rid].token_ids for rid in rids]
            preempted = connection.stats()["scheduler.preempted"]
            assert (preempted > 0) == (name == "tight")
    assert outputs["tight"] == outputs["roomy"]


def test_seeded_requests_draw_the_same_tokens_alone_and_in_a_crowd(shared):
    params = [SamplingParams(temperature=0.9, top_p=0.95, seed=s, max_tokens=12, ignore_eos=True) for s in range(16)]
    prompts, _ = crowd(300, count=16, seed=5)
    with shared.connect() as connection:
        alone = []
        for prompt, param in zip(prompts, params, strict=True):
            rid = connection.submit(prompt, param)
            alone.append(collect(connection, [rid])[rid].token_ids)
        rids = [connection.submit(p, param) for p, param in zip(prompts, params, strict=True)]
        together = collect(connection, rids)
        assert [together[rid].token_ids for rid in rids] == alone
        rids = [connection.submit(prompts[0], SamplingParams(temperature=1.0, max_tokens=12)) for _ in range(4)]
        unseeded = collect(connection, rids)
        assert len({tuple(unseeded[rid].token_ids) for rid in rids}) > 1, "without a seed every request has its own"


def test_the_demo_model_streams_the_text_that_transformers_generates(demo):
    from transformers import AutoTokenizer

    prompts = ["The with statement is used to", "Return a copy of the string", "Raise ValueError if"]
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    expected = reference(DEMO, ids, [40] * 3)
    for prompt, tokens in zip(prompts, expected, strict=True):
        flags = ("--max-tokens", "40", "--temperature", "0", "--seed", "1", "--ignore-eos", "--json")
        done = demo.client(prompt, *flags)
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert answer["token_ids"] == tokens
        assert answer["text"] == tokenizer.decode(tokens, skip_special_tokens=True)
        assert answer["finish_reason"] == "length" and 0 < answer["ttft_ms"] <= answer["e2e_ms"]
    streamed = demo.client(prompts[0], "--max-tokens", "40", "--temperature", "0", "--ignore-eos")
    assert tokenizer.decode(expected[0], skip_special_tokens=True) in streamed.stdout


def test_stop_strings_end_the_text_before_them_and_free_the_request(demo):
    with demo.connect() as connection:
        params = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True}
        rid = connection.submit("The with statement is used to", SamplingParams(**params))
        whole = "".join(collect(connection, [rid])[rid].texts)
        stop = whole[20:25]
        rid = connection.submit("The with statement is used to", SamplingParams(stop=(stop,), **params))
        answer = collect(connection, [rid])[rid]
        assert "".join(answer.texts) == whole[: whole.index(stop)]
        assert answer.finish is Finish.STOP
    demo.check_idle()


def test_bad_requests_are_refused_by_name_and_the_rest_goes_on(llama):
    with running(llama, "--kv-tokens", "64", "--page-size", "16") as cluster, cluster.connect() as connection:
        good = connection.submit([5, 6, 7], SamplingParams(max_tokens=40, **GREEDY))
        bad = {
            connection.submit(list(range(3, 70)), SamplingParams()): (ErrorCode.TOO_LONG, "64"),
            connection.submit([5, 10**6], SamplingParams()): (ErrorCode.INVALID, "1000000"),
            connection.submit([5], SamplingParams(temperature=-1.0)): (ErrorCode.INVALID, "temperature"),
            connection.submit([5], SamplingParams(top_p=0.0)): (ErrorCode.INVALID, "top_p"),
            connection.submit([], SamplingParams()): (ErrorCode.INVALID, "prompt"),
        }
        tokens, errors = 0, {}
        while len(errors) < len(bad) or tokens < 40:
            for row in connection.poll(10):
                if isinstance(row, RequestError):
                    errors[row.rid] = row
                else:
                    assert row.rid == good
                    tokens += len(row.token_ids)
        for rid, (code, word) in bad.items():
            assert errors[rid].code == code
            assert word in f"{errors[rid].field} {errors[rid].problem} {errors[rid].limit}"


def test_an_abort_and_a_dead_client_free_their_pages(shared):
    with shared.connect() as connection:
        rids = [connection.submit([5, 6, i], SamplingParams(max_tokens=100, **GREEDY)) for i in range(8)]
        connection.poll(10)
        for rid in rids:
            connection.abort(rid)
        answers = collect(connection, rids)
        assert any(a.finish is Finish.ABORT for a in answers.values())
    shared.check_idle()
    with shared.connect() as connection:  # goes away without a word
        for i in range(8):
            connection.submit([9, 9, i], SamplingParams(max_tokens=100, **GREEDY))
        connection.poll(10)
    shared.check_idle()


def test_ctrl_c_in_the_client_aborts_on_the_server(shared):
    client = subprocess.Popen(
        [
            sys.executable, str(ROOT / "client.py"), "--token-ids", "5,6,7", "--max-tokens", "100", "--ignore-eos",
            "--run-dir", str(shared.run_dir),
        ],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert client.stdout is not None and client.stderr is not None
    client.stdout.read(1)
    client.send_signal(signal.SIGINT)
    client.communicate(timeout=20)
    assert client.returncode in (0, 130)
    shared.check_idle()


def test_a_second_cluster_does_not_take_a_living_ones_directory(llama, shared):
    second = subprocess.run(
        [sys.executable, str(ROOT / "launch.py"), "--model", str(llama), "--run-dir", str(shared.run_dir)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert second.returncode == 1 and "a living cluster uses" in second.stderr
    assert shared.client("--token-ids", "5,6", "--max-tokens", "3").returncode == 0


def test_sockets_are_private_and_no_port_is_open_beyond_loopback(shared):
    assert shared.run_dir.stat().st_mode & 0o777 == 0o700
    for process in [psutil.Process(shared.process.pid), *shared.seen.values()]:
        for link in process.net_connections("inet"):
            assert link.laddr.ip in ("127.0.0.1", "::1"), f"{process} listens on {link.laddr}"
