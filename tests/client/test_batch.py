"""The batch command: its files, resuming, and both transports."""

import fcntl
import json
import resource
import signal
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client_cli.batch_file import BatchError, Line, Outcome, read_earlier, read_lines, without
from client_cli.batch_http import HttpRunner
from client_cli.batch_local import to_request, to_response
from client_cli.http_loop import Server
from common.answer import Answer
from common.fields import FieldError
from common.logprobs import TokenLogprobs, TopLogprob
from common.messages import Abort, ErrorCode, Finish, Generate, RequestError, ints
from common.openai_logprobs import CompletionLogprobs, chat_logprobs
from common.sampling_params import Grammar
from tests.client.client_runs import CLIENT, run, start
from tests.client.fake_openai import FakeOpenAI
from tests.unit.fake_frontend import TIMEOUT_S, FakeFrontend, rows
from tests.unit.frontend_world import INFO

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "m", **body}}


def write(path: Path, lines: Iterable[Any]) -> str:
    path.write_text("".join((text if isinstance(text, str) else json.dumps(text)) + "\n" for text in lines))
    return str(path)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("{", "not JSON"),
        ("[]", "must be a JSON object"),
        ({"custom_id": "b"}, "body: is missing"),
        (line("b") | {"more": 1}, "more: is not known"),
        (line(""), "custom_id: must be text of 1 to 512"),
        (line("b") | {"custom_id": 5}, "custom_id: must be text"),
        (line("b") | {"method": "GET"}, "method: must be POST"),
        (line("b", "/v1/embeddings"), "url: must be one of /v1/chat/completions"),
        (line("b") | {"body": []}, "body: must be an object"),
        (line("b", stream=True), "body.stream"),
        (line("a"), "custom_id 'a' is that of line 1 too"),
    ],
)
def test_a_wrong_line_is_refused_by_line_and_field(tmp_path: Path, wrong: Any, said: str) -> None:
    source = write(tmp_path / "in", [line("a"), "", wrong])
    ended = run("batch", source, str(tmp_path / "out"))
    assert ended.returncode == 2 and "line 3: " in ended.stderr and said in ended.stderr, ended.stderr
    assert not (tmp_path / "out").exists()


OUTCOMES = [
    Outcome("good", 200, {"id": "1"}),
    Outcome("bad", 400, {"error": {}}),
    Outcome("lost", 0, None, {"code": "x"}),
]


@given(st.lists(st.sampled_from(OUTCOMES), unique_by=lambda o: o.custom_id), st.integers(0, 400))
def test_an_output_cut_anywhere_is_read_up_to_its_last_whole_line(outcomes: list[Outcome], cut: int) -> None:
    lines = [outcome.as_line().encode() for outcome in outcomes]
    data = b"".join(lines)[:cut]
    whole = data.count(b"\n")
    earlier = read_earlier(data, "out")
    assert earlier.whole == sum(map(len, lines[:whole]))
    assert earlier.done | earlier.failed == {o.custom_id for o in outcomes[:whole]}
    assert earlier.failed == {o.custom_id for o in outcomes[:whole] if o.failed}
    kept = without(data[: earlier.whole], earlier.failed)
    assert read_earlier(kept, "out").done == earlier.done and not read_earlier(kept, "out").failed


def test_another_file_is_not_taken_for_an_output(tmp_path: Path) -> None:
    source, other = write(tmp_path / "in", [line("a")]), tmp_path / "notes"
    other.write_text("precious\nnotes")
    ended = run("batch", source, str(other))
    assert ended.returncode == 2 and "not the output of a batch" in ended.stderr
    assert other.read_text() == "precious\nnotes"


def local(custom_id: str = "a", url: str = COMPLETIONS, **body: Any) -> Line:
    (found,) = read_lines([json.dumps(line(custom_id, url, **body))], "in")
    return found


def test_bodies_become_requests() -> None:
    request = to_request(local(prompt=[5, 6], stop="x", seed=None, user="me"), frozenset({"m"}))
    assert (request.prompt, request.params.stop, request.params.max_tokens) == ([5, 6], ("x",), 16)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = {"role": "user", "content": parts}
    request = to_request(local(url=CHAT, messages=[message], max_completion_tokens=9, n=2), frozenset())
    assert request.params.max_tokens == 9 and request.n == 2
    assert [(m.role, m.content) for m in request.prompt if not isinstance(m, int | str)] == [("user", "a\nb")], (
        "as over HTTP"
    )
    assert to_request(local(url=CHAT, messages=[message]), frozenset()).params.max_tokens is None
    assert to_request(local(model=None, prompt="x"), frozenset({"m"})).prompt == "x", "HTTP servers need no name either"


def test_what_asks_for_nothing_is_no_unknown_field() -> None:
    body = {"metadata": {"a": "b"}, "echo": False, "best_of": 1, "suffix": "", "store": False, "tools": []}
    assert to_request(local(prompt="x", **body), frozenset()) == to_request(local(prompt="x"), frozenset())
    chat: dict[str, Any] = {"url": CHAT, "messages": [{"role": "user", "content": "x"}]}
    body = {"logprobs": False, "top_logprobs": 0, "response_format": {"type": "text"}, "tool_choice": "none"}
    assert to_request(local(**chat, **body), frozenset()) == to_request(local(**chat), frozenset())


def test_formats_and_log_probabilities_are_those_of_the_cluster() -> None:
    chat: dict[str, Any] = {"url": CHAT, "messages": [{"role": "user", "content": "x"}]}
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    params = to_request(local(**chat, logprobs=True, response_format=schema), frozenset()).params
    assert (params.logprobs, params.grammar) == (0, Grammar("json_schema", '{"type": "object"}'))
    json_object = {"type": "json_object"}
    params = to_request(local(**chat, logprobs=True, top_logprobs=3, response_format=json_object), frozenset()).params
    assert (params.logprobs, params.grammar) == (3, Grammar("json_object"))
    assert to_request(local(prompt="x", logprobs=2), frozenset()).params.logprobs == 2
    with pytest.raises(FieldError, match="top_logprobs: needs logprobs"):
        to_request(local(**chat, top_logprobs=3), frozenset())


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
def test_log_probabilities_are_written_as_the_gateway_writes_them(url: str) -> None:
    top = (TopLogprob(5, b"a", -0.5), TopLogprob(6, b"\xc3", -1.0), TopLogprob(8, b"\xff", -1.5))
    entries = [TokenLogprobs(7, b"bc", -3.0, 9, top), TokenLogprobs(5, b"a", -0.5, 1, top)]
    line = local(url=url, prompt="x", messages=[])
    body = to_response(line, [Answer(finish=Finish.LENGTH, logprobs=entries)], "m")
    theirs: Any = CompletionLogprobs(3, False).take(entries)
    if url == CHAT:
        theirs = chat_logprobs(entries, 3, False)
    assert body["choices"][0]["logprobs"] == theirs


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"model": 5, "prompt": "x"}, "model"),
        ({"model": "other", "prompt": "x"}, "model"),
        ({"prompt": ["x", "y"]}, "prompt"),
        ({"prompt": "x", "messages": []}, "messages"),
        ({"prompt": "x", "prompt_logprobs": 2}, "prompt_logprobs"),
        ({"prompt": "x", "tools": [{"function": {"name": "f"}}]}, "tools"),
        ({"prompt": "x", "logprobs": True}, "logprobs"),
        ({"prompt": "x", "response_format": {"type": "xml"}}, "response_format"),
        ({"prompt": "x", "response_format": {"type": "json_schema"}}, "response_format"),
        ({"prompt": "x", "response_format": {"type": "text"}, "grammar": {"kind": "json_object"}}, "grammar"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": "x", "echo": True}, "echo"),
        ({"prompt": "x", "temperature": 1000}, "temperature"),
        ({}, "prompt"),
    ],
)
def test_what_ipc_cannot_do_is_refused_by_field(body: dict[str, Any], field: str) -> None:
    with pytest.raises(FieldError) as caught:
        to_request(local(**body), frozenset({"m"}))
    assert caught.value.field == field


@pytest.mark.parametrize(
    "messages", [[{"role": "user", "content": [{"type": "image_url"}]}], [{"role": "user", "content": [5]}]]
)
def test_parts_that_are_not_text_are_refused(messages: Any) -> None:
    with pytest.raises(FieldError, match="parts must be of type text"):
        to_request(local(url=CHAT, messages=messages), frozenset())


def serve(msg: Any) -> Iterable[Any]:
    """Echo prompts; refuse `bad`."""
    if isinstance(msg, Generate):
        text = msg.text if msg.text is not None else (msg.chat or ())[-1].content
        if text == "bad":
            yield RequestError(msg.rid, ErrorCode.TOO_LONG, "is too long", "prompt", 9)
        else:
            for choice in range(msg.n):
                yield rows(msg.rid, f"to {text}", 5, 6, choice=choice, finish=Finish.LENGTH)


def test_a_batch_over_ipc(short_dir: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    lines = [line("a", prompt="x", n=2), line("b", CHAT, messages=chat), line("c", prompt="bad"), line("d", zzz=1)]
    output = short_dir / "out"
    with FakeFrontend(short_dir / "run", serve, info=INFO) as cluster:
        ended = run("batch", write(short_dir / "in", lines), str(output), "--run-dir", str(short_dir / "run"))
        assert not cluster.next(Generate).stream
    assert ended.returncode == 1 and "2 of 4 requests failed" in ended.stderr
    results = {result["custom_id"]: result for result in read(output)}
    assert len(results) == 4 and all(r["error"] is None and r["id"] for r in results.values())
    a, b, c, d = (results[name]["response"] for name in "abcd")
    assert (a["status_code"], [x["text"] for x in a["body"]["choices"]]) == (200, ["to x", "to x"])
    assert a["body"]["object"] == "text_completion" and a["body"]["usage"]["total_tokens"] == 3 + 4
    assert a["request_id"] == a["body"]["id"]
    assert b["body"]["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "to hi"}, "logprobs": None, "finish_reason": "length"}
    ]
    assert (c["status_code"], c["body"]["error"]["message"]) == (400, "prompt: is too long (limit 9)")
    assert (d["status_code"], d["body"]["error"]["param"]) == (400, "zzz")


def test_a_file_may_begin_with_a_byte_order_mark(short_dir: Path) -> None:
    """As editors of Windows write it."""
    source = short_dir / "in"
    with FakeFrontend(short_dir / "run", serve, info=INFO):
        source.write_text(json.dumps(line("a", prompt="x")), encoding="utf-8-sig")
        ended = run("batch", str(source), str(short_dir / "out"), "--run-dir", str(short_dir / "run"))
        assert ended.returncode == 0, ended.stderr
        source.write_text('{"prompt": "x"}', encoding="utf-8-sig")
        ended = run("complete", "--jsonl", str(source), "--run-dir", str(short_dir / "run"))
        assert ended.returncode == 0, ended.stderr


def test_an_interrupted_batch_goes_on_with_what_is_missing(short_dir: Path) -> None:
    """Every line is in the output once, whatever was in work or half written when the first run ended."""
    answered = []

    def first_three(msg: Any) -> Iterable[Any]:
        if isinstance(msg, Abort):
            yield rows(msg.rid, "", finish=Finish.ABORT)
        elif len(answered) < 3:
            answered.append(msg.text)
            yield from serve(msg)

    lines = [line(str(i), prompt=f"prompt {i}") for i in range(10)]
    source, output = write(short_dir / "in", lines), short_dir / "out"
    args = ("batch", source, str(output), "--concurrency", "4", "--run-dir", str(short_dir / "run"))
    with FakeFrontend(short_dir / "run", first_three) as cluster:
        process = start(*args)
        for _ in range(7):  # three that end, and four that do not
            cluster.next(Generate)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130 and "goes on with what is missing" in errors
    assert sorted(r["custom_id"] for r in read(output)) == ["0", "1", "2"]
    with output.open("a") as file:
        file.write('{"id": "batch_req_1", "custom_id": "3", "resp')  # as a crash leaves it
    with FakeFrontend(short_dir / "run", serve) as cluster:
        ended = run(*args)
        assert {cluster.next(Generate).text for _ in range(7)} == {f"prompt {i}" for i in range(3, 10)}
        assert cluster.received.empty()
    assert ended.returncode == 0 and "3 of 10 requests are in" in ended.stderr, ended.stderr
    assert sorted(r["custom_id"] for r in read(output)) == [str(i) for i in range(10)]
    assert run(*args).returncode == 0, "nothing to do needs no cluster"


def test_failed_lines_are_run_again_when_asked(short_dir: Path) -> None:
    source, output = write(short_dir / "in", [line("a", prompt="x"), line("b", prompt="bad")]), short_dir / "out"
    args = ("batch", source, str(output), "--run-dir", str(short_dir / "run"))
    with FakeFrontend(short_dir / "run", serve) as cluster:
        assert run(*args).returncode == 1
        assert run(*args).returncode == 1, "a failed line stays one"
        assert [cluster.next(Generate).text for _ in range(2)] and cluster.received.empty()
    with FakeFrontend(short_dir / "run", lambda msg: [rows(msg.rid, "better", 5, finish=Finish.STOP)]):
        assert run(*args, "--retry-failed").returncode == 0
    assert [(r["custom_id"], r["response"]["status_code"]) for r in read(output)] == [("a", 200), ("b", 200)]
    assert not output.with_name("out.tmp").exists()


def test_a_link_stays_one_and_the_mode_as_it_was(short_dir: Path) -> None:
    source, real, output = write(short_dir / "in", [line("a", prompt="bad")]), short_dir / "real", short_dir / "out"
    real.touch(mode=0o600)
    output.symlink_to(real)
    args = ("batch", source, str(output), "--run-dir", str(short_dir / "run"))
    with FakeFrontend(short_dir / "run", serve):
        run(*args)
    with FakeFrontend(short_dir / "run", lambda msg: [rows(msg.rid, "better", 5, finish=Finish.STOP)]):
        assert run(*args, "--retry-failed").returncode == 0
    assert output.is_symlink() and real.stat().st_mode & 0o777 == 0o600
    assert [r["response"]["status_code"] for r in read(real)] == [200]


def test_what_utf_8_cannot_say_does_not_end_the_batch() -> None:
    odd, plain = Outcome("\ud800", 200, {"text": "\udfff"}), Outcome("ä", 200, {"text": "ö"})
    assert "ö" in plain.as_line()
    data = odd.as_line().encode() + plain.as_line().encode()
    assert read_earlier(data, "out").done == {"\ud800", "ä"}


@pytest.mark.parametrize("output", ["/dev/full", "/dev/null", "/dev/stdout"])
def test_what_cannot_be_read_again_is_no_output(tmp_path: Path, output: str) -> None:
    ended = run("batch", write(tmp_path / "in", [line("a", prompt="x")]), output)
    assert ended.returncode == 2 and f"{output} is not a file" in ended.stderr


def test_two_batches_do_not_write_to_one_file(short_dir: Path) -> None:
    source, output = write(short_dir / "in", [line("a", prompt="x")]), short_dir / "out"
    with output.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        ended = run("batch", source, str(output))
    assert ended.returncode == 2 and "another batch writes to" in ended.stderr


def test_a_batch_over_http(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    lines = [line("a", prompt="x", anything=[1]), line("b", CHAT, messages=chat), line("c", prompt="refuse")]
    output = tmp_path / "out"
    with FakeOpenAI() as server:
        ended = run("batch", write(tmp_path / "in", lines), str(output), "--url", server.url)
        bodies = [server.requests.get(timeout=TIMEOUT_S)[2] for _ in lines]
    assert ended.returncode == 1 and "1 of 3 requests failed" in ended.stderr
    assert {"model": "m", "prompt": "x", "anything": [1]} in bodies, "bodies go as they are"
    results = {result["custom_id"]: result["response"] for result in read(output)}
    assert results["a"]["body"]["choices"][0]["text"] == "x" and results["a"]["request_id"] == "x1"
    assert results["b"]["body"]["choices"][0]["message"]["content"] == "hi"
    assert (results["c"]["status_code"], results["c"]["body"]["error"]["param"]) == (400, "temperature")


def test_a_server_that_is_not_there_costs_no_line(tmp_path: Path) -> None:
    args = ("batch", write(tmp_path / "in", [line("a", prompt="x")]), str(tmp_path / "out"), "--url")
    ended = run(*args, "http://127.0.0.1:1")
    assert ended.returncode == 2 and "no answer at" in ended.stderr and read(tmp_path / "out") == []
    with FakeOpenAI(key="k") as server:
        ended = run(*args, server.url)
        assert ended.returncode == 1 and "wrong key; --api-key-env NAME says" in ended.stderr
        assert read(tmp_path / "out") == []


def test_a_server_that_goes_away_costs_the_lines_in_work(tmp_path: Path) -> None:
    with FakeOpenAI() as server:
        runner = HttpRunner(Server(server.url), None, 0.0)
    runner.start(local(prompt="x"))
    (outcome,) = runner.poll(TIMEOUT_S)
    runner.close()
    assert outcome.body is None and outcome.error is not None and outcome.error["code"] == "connection_error"


def test_an_answer_that_no_stack_holds_costs_its_line(tmp_path: Path) -> None:
    with FakeOpenAI() as server:
        runner = HttpRunner(Server(server.url), None, 0.0)
        runner.start(local(prompt="deep"))
        (outcome,) = runner.poll(TIMEOUT_S)
        runner.close()
    assert outcome.error is not None and outcome.error["code"] == "invalid_response"


def test_a_full_disk_is_a_failure_after_which_the_batch_goes_on(short_dir: Path) -> None:
    source, output = write(short_dir / "in", [line(str(i), prompt="x") for i in range(5)]), short_dir / "out"
    args = ("batch", source, str(output), "--concurrency", "1", "--run-dir", str(short_dir / "run"))
    with FakeFrontend(short_dir / "run", serve):
        ended = subprocess.run(
            [*CLIENT, *args], capture_output=True, text=True, timeout=TIMEOUT_S,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)),
        )  # fmt: skip
        assert ended.returncode == 1 and "cannot be written: File too large; the same command goes on" in ended.stderr
        whole = output.read_bytes().count(b"\n")
        assert 0 < whole < 5
        assert run(*args).returncode == 0
    assert sorted(r["custom_id"] for r in read(output)) == list("01234")


def test_a_model_of_the_command_line_replaces_those_of_the_file(tmp_path: Path) -> None:
    with FakeOpenAI() as server:
        source = write(tmp_path / "in", [line("a", prompt="x")])
        assert run("batch", source, str(tmp_path / "out"), "--url", server.url, "--model", "own").returncode == 0
        assert server.requests.get(timeout=TIMEOUT_S)[2]["model"] == "own"


def test_token_ids_reach_the_cluster(short_dir: Path) -> None:
    with FakeFrontend(short_dir / "run", lambda msg: [rows(msg.rid, "", 5, finish=Finish.STOP)]) as cluster:
        source = write(short_dir / "in", [line("a", prompt=[1, 2])])
        assert run("batch", source, str(short_dir / "out"), "--run-dir", str(short_dir / "run")).returncode == 0
        assert cluster.next(Generate).token_ids == ints(1, 2)


def test_errors_name_the_line() -> None:
    with pytest.raises(BatchError, match="in, line 1"):
        read_lines(["{"], "in")
