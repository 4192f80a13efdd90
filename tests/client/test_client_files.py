"""client.py with a file of requests, and what a request in JSON may say."""

import dataclasses
import json
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from client_cli.complete import read_jsonl
from common.fields import FieldError
from common.json_request import PROMPT_FIELDS, REQUEST_FIELDS, parse_request
from common.messages import Abort, ChatMessage, ErrorCode, Finish, Generate, RequestError, ints
from common.sampling_params import SamplingParams
from tests.client.client_runs import run, start
from tests.unit.fake_frontend import TIMEOUT_S, FakeFrontend, choices_backwards, echo, rows, silent_after_one_row
from tests.unit.frontend_world import INFO


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


def test_jsonl_with_several_choices_and_the_flags_as_defaults(short_dir: Path) -> None:
    lines = [{"prompt": "a"}, {"prompt": "b", "n": 1, "priority": 7, "cache_salt": "own", "deadline_ms": 60_000}]
    with FakeFrontend(short_dir, choices_backwards) as cluster:
        source = write_lines(short_dir / "in", lines)
        flags = ("--n", "2", "--priority", "3", "--cache-salt", "all", "--deadline-ms", "5000")
        ended = run("--jsonl", source, *flags, "--run-dir", str(short_dir))
        sent = [cluster.next(Generate) for _ in lines]
    assert ended.returncode == 0, ended.stderr
    assert [(m.text, m.n, m.priority, m.cache_salt, m.deadline_ms) for m in sent] == [
        ("a", 2, 3, "all", 5000), ("b", 1, 7, "own", 60_000),
    ]  # fmt: skip
    two, one = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [(c["index"], c["text"]) for c in two["choices"]] == [(0, "choice 0!"), (1, "choice 1!")]
    assert (two["index"], two["text"]) == (0, "choice 0!") and one["text"] == "choice 0!" and "choices" not in one


def test_jsonl_counts_a_request_with_an_aborted_choice_as_failed(short_dir: Path) -> None:
    def answer(msg: Any) -> Iterable[Any]:
        yield rows(msg.rid, "", choice=1, finish=Finish.ABORT)
        yield rows(msg.rid, "fine", 5, choice=0, finish=Finish.LENGTH)

    with FakeFrontend(short_dir, answer):
        source = write_lines(short_dir / "in", [{"prompt": "a", "n": 2}])
        ended = run("--jsonl", source, "--run-dir", str(short_dir))
    assert ended.returncode == 1 and "1 of 1 requests failed" in ended.stderr
    assert [c["finish_reason"] for c in json.loads(ended.stdout)["choices"]] == ["length", "abort"]


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
    with FakeFrontend(short_dir, lambda msg: [rows(msg.rid, "", 5, finish=Finish.STOP)], info=INFO) as cluster:
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
        ({"prompt": "x", "n": 65}, "n: must be between 1 and 64"),
        ({"prompt": "x", "n": True}, "n: must be an integer"),
        ({"prompt": "x", "cache_salt": 5}, "cache_salt: must be text"),
        ({"prompt": "x", "priority": -1001}, "priority: must be between -1000"),
        ({"prompt": "x", "deadline_ms": 1.5}, "deadline_ms: must be an integer"),
        ({"prompt": "x", "stream": True}, "stream: is not known"),
    ],
)
def test_a_wrong_line_is_refused_by_line_and_field(tmp_path: Path, line: Any, said: str) -> None:
    text = line if isinstance(line, str) else json.dumps(line)
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "fine"}\n\n' + text + "\n")
    with path.open() as source, pytest.raises(click.UsageError) as caught:
        read_jsonl(source, {})
    assert f"{path}, line 3: " in caught.value.message and said in caught.value.message


def test_nothing_is_sent_when_a_line_is_wrong(short_dir: Path) -> None:
    with FakeFrontend(short_dir, echo) as cluster:
        source = write_lines(short_dir / "in", [{"prompt": "x"}, {"prompt": "x", "top_k": -1}])
        ended = run("--jsonl", source, "--run-dir", str(short_dir))
        assert ended.returncode == 2 and "line 2: top_k: must be between 0" in ended.stderr
        assert cluster.received.empty()


def test_nothing_is_sent_when_the_output_cannot_be_written(short_dir: Path) -> None:
    with FakeFrontend(short_dir, echo) as cluster:
        source = write_lines(short_dir / "in", [{"prompt": "x"}])
        ended = run("--jsonl", source, "--output", "/nowhere/x", "--run-dir", str(short_dir))
        assert ended.returncode == 2 and "--output: " in ended.stderr and "/nowhere/x" in ended.stderr
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
FIELDS = (*PROMPT_FIELDS, *REQUEST_FIELDS, *(f.name for f in dataclasses.fields(SamplingParams)))


@given(st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), json_values, max_size=4))
def test_any_json_object_is_a_request_or_refused_by_field(values: dict[str, Any]) -> None:
    try:
        request = parse_request(values)
    except FieldError as error:
        assert error.field
        return
    assert isinstance(request.params, SamplingParams)
