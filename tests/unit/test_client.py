"""client.py as its users run it: a real process against a played cluster on a real socket."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import client
from common.fields import FieldError
from common.json_request import parse_request
from common.messages import Abort, ChatMessage, ErrorCode, Finish, Generate, GetStats, RequestError, Stats, ints
from common.run_dir import RunDir
from common.sampling_params import SamplingParams
from tests.unit.fake_frontend import TIMEOUT_S, FakeFrontend, echo, refuse, rows, silent_after_one_row

ROOT = Path(__file__).parents[2]
CLIENT = [sys.executable, str(ROOT / "client.py")]
Ended = subprocess.CompletedProcess[str]


def run(*args: str, stdin: str = "", **env: str) -> Ended:
    """Run the client to its end."""
    return subprocess.run(
        [*CLIENT, *args], input=stdin, capture_output=True, text=True, timeout=TIMEOUT_S, env={**os.environ, **env}
    )


def start(*args: str) -> "subprocess.Popen[str]":
    """Start the client for tests that interrupt it."""
    pipe = subprocess.PIPE
    return subprocess.Popen([*CLIENT, *args], stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)


# ---- one prompt ---------------------------------------------------------------------------------------------------


def test_streams_the_answer(short_dir: Path) -> None:
    with FakeFrontend(short_dir, echo) as cluster:
        ended = run("Hëllo \N{GRINNING FACE}", "--run-dir", str(short_dir))
        sent = cluster.next(Generate)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("Hëllo \N{GRINNING FACE}\n", "", 0)
    assert sent.params == SamplingParams(max_tokens=256)


def test_text_appears_when_it_is_generated(short_dir: Path) -> None:
    with FakeFrontend(short_dir, silent_after_one_row):
        process = start("x", "--run-dir", str(short_dir))
        assert process.stdout is not None
        assert process.stdout.read(len("begun")) == "begun"  # while the request goes on
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=TIMEOUT_S)


def test_finds_the_only_cluster(short_dir: Path) -> None:
    home = short_dir / "rhizome"
    home.mkdir(mode=0o700)
    with FakeFrontend(home / "one", echo):
        assert run("hello", XDG_RUNTIME_DIR=str(short_dir)).stdout == "hello\n"


def test_takes_an_address(short_dir: Path) -> None:
    with FakeFrontend(short_dir, echo, address="tcp://127.0.0.1:*") as cluster:
        assert run("hello", "--address", cluster.address).stdout == "hello\n"


@pytest.mark.parametrize(("stdin", "prompt"), [("a\nb\n", "a\nb"), ("no newline", "no newline"), ("x\n\n", "x\n")])
def test_reads_the_prompt_from_stdin(short_dir: Path, stdin: str, prompt: str) -> None:
    with FakeFrontend(short_dir, echo) as cluster:
        assert run("--run-dir", str(short_dir), stdin=stdin).returncode == 0
        assert cluster.next(Generate).text == prompt


def test_every_sampling_flag_arrives(short_dir: Path) -> None:
    flags = (
        "--max-tokens=7 --temperature=0.5 --top-k=3 --top-p=0.9 --min-p=0.1 --seed=42 --stop=END --stop=."
        " --stop-token-id=5 --stop-token-id=6 --ignore-eos --keep-special-tokens"
    )
    with FakeFrontend(short_dir, echo) as cluster:
        assert run("x", *flags.split(), "--run-dir", str(short_dir)).returncode == 0
        params = cluster.next(Generate).params
    assert params == SamplingParams(0.5, 3, 0.9, 0.1, 42, 7, ("END", "."), ints(5, 6), True, False)
    default = SamplingParams()
    for field in dataclasses.fields(SamplingParams):
        assert getattr(params, field.name) != getattr(default, field.name), f"no flag for {field.name}"


@pytest.mark.parametrize(
    ("args", "chat"),
    [
        (["hi", "--chat"], (ChatMessage("user", "hi"),)),
        (["hi", "--system", "be brief"], (ChatMessage("system", "be brief"), ChatMessage("user", "hi"))),
    ],
)
def test_chat(short_dir: Path, args: list[str], chat: tuple[ChatMessage, ...]) -> None:
    with FakeFrontend(short_dir, echo) as cluster:
        assert run(*args, "--run-dir", str(short_dir)).returncode == 0
        assert cluster.next(Generate).chat == chat


@pytest.mark.parametrize("ids", ["1,2,3", "1, 2, 3", "1 2 3"])
def test_token_ids(short_dir: Path, ids: str) -> None:
    with FakeFrontend(short_dir, echo) as cluster:
        assert run("--token-ids", ids, "--run-dir", str(short_dir)).returncode == 0
        assert cluster.next(Generate).token_ids == ints(1, 2, 3)


def test_json(short_dir: Path) -> None:
    with FakeFrontend(short_dir, echo):
        ended = run("hello", "--json", "--run-dir", str(short_dir))
    answer = json.loads(ended.stdout)
    times = {name: answer.pop(name) for name in ("ttft_ms", "itl_ms", "e2e_ms")}
    assert answer == {
        "text": "hello", "token_ids": [11, 12, 13], "prompt_tokens": 3, "completion_tokens": 3, "cached_tokens": 2,
        "finish_reason": "stop",
    }  # fmt: skip
    assert 0 < times["ttft_ms"] <= times["e2e_ms"] and times["itl_ms"] >= 0


@pytest.mark.parametrize(("flags", "shown"), [([], "a.x 1\nb.y 22\n"), (["--json"], '{"b.y": 22, "a.x": 1}\n')])
def test_stats(short_dir: Path, flags: list[str], shown: str) -> None:
    def answer(msg: Any) -> Iterable[Any]:
        assert isinstance(msg, GetStats)
        yield Stats(msg.query, {"b.y": 22, "a.x": 1})

    with FakeFrontend(short_dir, answer):
        assert run("--stats", *flags, "--run-dir", str(short_dir)).stdout == shown


# ---- what can go wrong --------------------------------------------------------------------------------------------


def test_no_cluster(short_dir: Path) -> None:
    for args in ([], ["--run-dir", str(short_dir)], ["--wait", "0.01"]):
        ended = run("hello", *args, XDG_RUNTIME_DIR=str(short_dir))
        assert (ended.returncode, ended.stdout) == (2, "")
        assert "no cluster is running" in ended.stderr and "python launch.py" in ended.stderr


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "nonsense"])
def test_nobody_at_the_address(address: str) -> None:
    ended = run("hello", "--address", address)
    assert ended.returncode == 2 and address in ended.stderr and "Traceback" not in ended.stderr


def test_a_cluster_file_of_another_version(short_dir: Path) -> None:
    held = RunDir(short_dir)
    held.write_cluster({"version": 99, "addresses": []})
    ended = run("hello", "--run-dir", str(short_dir))
    assert ended.returncode == 2 and "another version" in ended.stderr
    held.close()


def test_waits_for_the_cluster(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cluster becomes ready while the client waits between two looks."""
    held = RunDir(short_dir)
    info = {"addresses": {"frontend": "ipc://there"}}
    monkeypatch.setattr(client.time, "sleep", lambda _: held.write_cluster(info))
    assert client.find_address(short_dir, None, wait_s=60) == "ipc://there"
    held.close()


def test_a_refusal_names_field_and_limit(short_dir: Path) -> None:
    answer = refuse(lambda rid: RequestError(rid, ErrorCode.TOO_LONG, "does not fit the context", "prompt", 512))
    with FakeFrontend(short_dir, answer):
        ended = run("hello", "--run-dir", str(short_dir))
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "prompt: does not fit the context (limit 512)" in ended.stderr


def test_a_cluster_that_dies(short_dir: Path) -> None:
    with FakeFrontend(short_dir, silent_after_one_row) as cluster:
        process = start("x", "--run-dir", str(short_dir))
        assert process.stdout is not None
        assert process.stdout.read(len("begun")) == "begun"
        cluster.close()
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1 and "the cluster has ended" in errors and "Traceback" not in errors


def test_an_abort_by_the_cluster_is_a_failure(short_dir: Path) -> None:
    with FakeFrontend(short_dir, lambda msg: [rows(msg.rid, "", finish=Finish.ABORT)]):
        ended = run("x", "--run-dir", str(short_dir))
    assert ended.returncode == 1 and "aborted" in ended.stderr


@pytest.mark.parametrize("answers_abort", [True, False])
def test_ctrl_c_aborts_on_the_server(short_dir: Path, answers_abort: bool) -> None:
    def answer(msg: Any) -> Iterable[Any]:
        return silent_after_one_row(msg) if answers_abort or isinstance(msg, Generate) else ()

    with FakeFrontend(short_dir, answer) as cluster:
        process = start("x", "--run-dir", str(short_dir))
        assert process.stdout is not None
        process.stdout.read(len("begun"))
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=TIMEOUT_S)
        rid = cluster.next(Generate).rid
        assert cluster.next(Abort).rid == rid
    assert process.returncode == 130 and errors.strip() == "interrupted, requests aborted: 1"


def test_a_closed_pipe_ends_quietly(short_dir: Path) -> None:
    """As in `client.py ... | head -c 1`: the next write fails, and the request is aborted."""
    started = threading.Event()

    def answer(msg: Any) -> Iterable[Any]:
        if isinstance(msg, Abort):
            yield rows(msg.rid, "", finish=Finish.ABORT)
            return
        yield rows(msg.rid, "x" * 10, 11)
        assert started.wait(TIMEOUT_S) and process.stdout is not None
        process.stdout.read(10)
        process.stdout.close()
        for token in range(100):
            yield rows(msg.rid, "y" * 1000, token)

    with FakeFrontend(short_dir, answer) as cluster:
        process = subprocess.Popen(
            [*CLIENT, "x", "--run-dir", str(short_dir)], bufsize=0, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        started.set()
        assert process.stderr is not None
        errors = process.stderr.read()
        process.wait(TIMEOUT_S)
        cluster.next(Generate)
        cluster.next(Abort)
    assert (process.returncode, errors) == (141, b"")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["x", "--temperature", "200"], "temperature: must be at least 0 and at most 100"),
        (["x", "--temperature", "nan"], "temperature: must be at least 0"),
        (["x", "--max-tokens", "0"], "max-tokens: must be between 1 and"),
        (["x", "--top-p", "0"], "top-p: must be more than 0"),
        (["x", "--min-p", "1.5"], "min-p: must be at least 0 and at most 1"),
        (["x", "--top-k", "-1"], "top-k: must be between 0"),
        (["x", "--seed", "-1"], "seed: must be between 0"),
        (["x", "--seed", str(2**63)], "seed: must be between 0"),
        (["x", "--stop", ""], "stop[0]: must have 1 to 512 characters"),
        (["x", *["--stop=a"] * 17], "stop: must have 0 to 16 entries"),
        (["x", "--stop-token-id", "-1"], "stop-token-ids: entries must be between 0"),
        (["x", "--stop-token-id", str(2**40)], "stop-token-ids: entries must be between 0"),
        (["--token-ids", "1,x"], "integers separated by commas"),
        (["--token-ids", "1,-2"], "token-ids: entries must be between 0"),
        (["x", "--token-ids", "1"], "Give one of"),
        (["x", "--stats"], "Give one of"),
        (["--token-ids", "1", "--chat"], "need a text prompt"),
        (["x", "--output", "never-written"], "--output belongs to --jsonl"),
        (["x", "--run-dir", "d", "--address", "tcp://127.0.0.1:5"], "exclude each other"),
        (["x", "--concurrency", "0"], "--concurrency"),
        (["x", "--frobnicate"], "No such option"),
        (["\udcff"], "prompt: must be valid Unicode text"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_sent(args: list[str], said: str) -> None:
    """No cluster is needed to hear of them, and none is looked for."""
    ended = run(*args)
    assert ended.returncode == 2 and said in ended.stderr, ended.stderr
    assert not Path("never-written").exists()


# ---- many prompts -------------------------------------------------------------------------------------------------


def write_lines(path: Path, lines: Iterable[Any]) -> str:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_jsonl_keeps_the_order_and_its_bound(short_dir: Path) -> None:
    """The first request is answered last; the results still come in input order, and no more than three run at once."""
    live: dict[int, Generate] = {}
    most = 0

    def done(msg: Generate) -> Any:
        del live[msg.rid]
        return rows(msg.rid, f"to {msg.text}", 5, finish=Finish.LENGTH)

    def answer(msg: Any) -> Iterable[Any]:
        nonlocal most
        live[msg.rid] = msg
        most = max(most, len(live))
        if len(live) == 3:
            yield done(live[max(live)])
        if msg.text == "prompt 9":
            yield from [done(live[rid]) for rid in sorted(live, reverse=True)]

    lines = [{"prompt": f"prompt {i}", "seed": i} for i in range(10)]
    with FakeFrontend(short_dir, answer) as cluster:
        source = write_lines(short_dir / "in.jsonl", [*lines[:5], "\n", *lines[5:]])
        flags = ["--concurrency", "3", "--temperature", "0.5", "--run-dir", str(short_dir)]
        ended = run("--jsonl", source, *flags)
        sent = [cluster.next(Generate) for _ in lines]
    assert ended.returncode == 0, ended.stderr
    results = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [(r["index"], r["text"]) for r in results] == [(i, f"to prompt {i}") for i in range(10)]
    assert {"token_ids", "prompt_tokens", "cached_tokens", "finish_reason", "ttft_ms", "itl_ms", "e2e_ms"} <= set(
        results[0]
    )
    assert most == 3
    assert [m.params for m in sent] == [SamplingParams(0.5, seed=i, max_tokens=256) for i in range(10)]
    assert "10/10" in ended.stderr


def test_jsonl_goes_on_after_a_refused_request(short_dir: Path) -> None:
    def answer(msg: Any) -> Iterable[Any]:
        if msg.text == "bad":
            return [RequestError(msg.rid, ErrorCode.TOO_LONG, "is too long", "prompt", 9)]
        return [rows(msg.rid, "fine", 5, finish=Finish.LENGTH)]

    with FakeFrontend(short_dir, answer):
        source = write_lines(short_dir / "in", [{"prompt": p} for p in ("good", "bad", "good")])
        output = short_dir / "out"
        ended = run("--jsonl", source, "--output", str(output), "--run-dir", str(short_dir))
    assert ended.returncode == 1 and "1 of 3 requests failed" in ended.stderr and ended.stdout == ""
    good, bad, last = [json.loads(line) for line in output.read_text().splitlines()]
    assert good["text"] == last["text"] == "fine"
    assert bad == {"index": 1, "error": {"code": "too_long", "message": "prompt: is too long (limit 9)"}}


def test_jsonl_from_stdin_and_every_kind_of_prompt(short_dir: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    lines = [{"token_ids": [1, 2], "stop": "x"}, {"messages": chat, "stop": ["y"], "max_tokens": None}, {"prompt": ""}]
    with FakeFrontend(short_dir, lambda msg: [rows(msg.rid, "", 5, finish=Finish.STOP)]) as cluster:
        stdin = "\n".join(map(json.dumps, lines))
        assert run("--jsonl", "-", "--run-dir", str(short_dir), stdin=stdin).returncode == 0
        first, second, third = (cluster.next(Generate) for _ in lines)
    assert (first.token_ids, first.params.stop) == (ints(1, 2), ("x",))
    assert (second.chat, second.params.stop, second.params.max_tokens) == ((ChatMessage("user", "hi"),), ("y",), None)
    assert third.text == ""


def test_ctrl_c_aborts_all_requests_of_a_file(short_dir: Path) -> None:
    with FakeFrontend(short_dir, silent_after_one_row) as cluster:
        source = write_lines(short_dir / "in", [{"prompt": "x"}] * 5)
        process = start("--jsonl", source, "--concurrency", "3", "--run-dir", str(short_dir))
        rids = {cluster.next(Generate).rid for _ in range(3)}
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=TIMEOUT_S)
        assert {cluster.next(Abort).rid for _ in range(3)} == rids
    assert process.returncode == 130 and "requests aborted: 3" in errors and "Traceback" not in errors


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not JSON"),
        ("[1]", "must be a JSON object"),
        ("[" * 100_000, "not JSON"),
        ({"prompt": "x", "temprature": 1}, "temprature: is not known; known are prompt"),
        ({"prompt": "x", "TAG": 1}, "TAG: is not known"),
        ({}, "exactly one of prompt, token_ids, messages"),
        ({"prompt": "x", "token_ids": [1]}, "exactly one of prompt, token_ids, messages"),
        ({"prompt": 5}, "prompt: must be text"),
        ({"prompt": "\ud800"}, "prompt: must be valid Unicode text"),
        ({"token_ids": "1,2"}, "token_ids: must be a list of integers"),
        ({"token_ids": [1, True]}, "token_ids: must be a list of integers"),
        ({"token_ids": [1.0]}, "token_ids: must be a list of integers"),
        ({"token_ids": [-1]}, "token_ids: entries must be between 0"),
        ({"token_ids": [2**31 - 1]}, "token_ids: entries must be between 0"),
        ({"token_ids": [2**70]}, "token_ids: entries must be between 0"),
        ({"messages": "hi"}, "messages: must be a list"),
        ({"messages": []}, "messages: must have 1 to"),
        ({"messages": ["hi"]}, "messages[0]: must be an object with role and content"),
        ({"messages": [{"role": "user"}]}, "messages[0]: must be an object with role and content"),
        ({"messages": [{"role": "", "content": "x"}]}, "messages[0].role: must have 1 to 64"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content: must be text"),
        ({"prompt": "x", "max_tokens": "5"}, "max_tokens: must be an integer"),
        ({"prompt": "x", "max_tokens": True}, "max_tokens: must be an integer"),
        ({"prompt": "x", "temperature": None}, "temperature: must be a number"),
        ('{"prompt": "x", "temperature": NaN}', "temperature: must be at least 0"),
        ('{"prompt": "x", "temperature": Infinity}', "temperature: must be at least 0"),
        ({"prompt": "x", "top_p": 0}, "top_p: must be more than 0"),
        ({"prompt": "x", "stop": 5}, "stop: must be a list"),
        ({"prompt": "x", "stop": [""]}, "stop[0]: must have 1 to 512"),
        ({"prompt": "x", "stop_token_ids": 5}, "stop_token_ids: must be a list of integers"),
        ({"prompt": "x", "ignore_eos": 1}, "ignore_eos: must be true or false"),
    ],
)
def test_a_wrong_line_is_refused_by_line_and_field(tmp_path: Path, line: Any, said: str) -> None:
    text = line if isinstance(line, str) else json.dumps(line)
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "fine"}\n\n' + text + "\n")
    with path.open() as source, pytest.raises(client.click.UsageError) as caught:
        client.read_jsonl(source, {})
    assert f"{path}, line 3: " in caught.value.message and said in caught.value.message


def test_nothing_is_sent_when_a_line_is_wrong(short_dir: Path) -> None:
    with FakeFrontend(short_dir, echo) as cluster:
        source = write_lines(short_dir / "in", [{"prompt": "x"}, {"prompt": "x", "top_k": -1}])
        ended = run("--jsonl", source, "--run-dir", str(short_dir))
        assert ended.returncode == 2 and "line 2: top_k: must be between 0" in ended.stderr
        assert cluster.received.empty()


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b'{"prompt": "\xff"}')
    ended = run("--jsonl", str(tmp_path / "in"))
    assert ended.returncode == 2 and "not UTF-8" in ended.stderr and "Traceback" not in ended.stderr


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = ("prompt", "token_ids", "messages", *(f.name for f in dataclasses.fields(SamplingParams)))


@given(st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), json_values, max_size=4))
def test_any_json_object_is_a_request_or_refused_by_field(values: dict[str, Any]) -> None:
    try:
        request = parse_request(values)
    except FieldError as error:
        assert error.field
        return
    assert isinstance(request.params, SamplingParams)


def test_help_names_every_option() -> None:
    shown = run("--help").stdout
    for parameter in client.main.params:
        if isinstance(parameter, client.click.Option):
            assert parameter.help and parameter.opts[0] in shown
