"""The client over HTTP, against a real server that speaks OpenAI's format: a link's rows, and the commands."""

import json
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from client_cli.batch_http import HttpRunner
from client_cli.http_link import HttpLink, _Answer
from client_cli.http_loop import Server
from client_cli.openai_logprobs import logprobs_of, prompt_logprobs_of
from client_cli.status import _look
from client_cli.target import Target
from client_cli.watch import Watcher
from common.answer import Answer, result_of, tokens_of
from common.connection import ConnectionLost, Unreachable
from common.logprobs import TokenLogprobs, TopLogprob
from common.messages import ChatMessage, ErrorCode, Finish, RequestError, ints
from common.rows import Row
from common.sampling_params import Grammar, SamplingParams
from tests.client.client_runs import run, start
from tests.client.fake_openai import TIMEOUT_S, FakeOpenAI

PARAMS = SamplingParams(max_tokens=5)


@pytest.fixture
def server() -> Iterator[FakeOpenAI]:
    with FakeOpenAI() as fake:
        yield fake


def collect(link: HttpLink) -> list[Row | RequestError]:
    found: list[Row | RequestError] = []
    deadline = time.monotonic() + TIMEOUT_S
    while link.live:
        assert time.monotonic() < deadline
        found += link.poll(1.0)
    return found + link.poll(0.0)


def asked(server: FakeOpenAI, prompt: Any, params: SamplingParams = PARAMS, **options: Any) -> tuple[Any, list[Any]]:
    """What a submitted prompt sends, and its rows."""
    link = HttpLink(Server(server.url))
    try:
        link.submit(prompt, params, **options)
        found = collect(link)
    finally:
        link.close()
    return server.requests.get(timeout=TIMEOUT_S), found


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt", ["hello", [ChatMessage("user", "hello")]])
def test_rows_add_up_to_the_answer(server: FakeOpenAI, prompt: Any, stream: bool) -> None:
    (path, _, body), rows = asked(server, prompt, stream=stream)
    assert path == ("/v1/completions" if prompt == "hello" else "/v1/chat/completions")
    assert body["model"] == "echo" and body["max_tokens"] == 5 and body.get("stream", False) == stream
    answer = Answer()
    for row in rows:
        answer.add(row)
    assert "".join(answer.texts) == "hello" and tokens_of([answer]) == 5
    assert (len(rows), rows[-1].finish) == ((5, Finish.LENGTH) if stream else (1, Finish.STOP))
    assert answer.prompt_tokens == 5 and 0 < answer.first_ns <= answer.last_ns


def test_token_ids_and_every_field_that_is_not_the_default(server: FakeOpenAI) -> None:
    params = SamplingParams(
        0.5, 3, 0.9, 0.1, 42, 7, ("END",), ints(5), True, False, 1.5, 0.25, -0.5, {7: -100.0}, 3,
        grammar=Grammar("json_schema", '{"type": "object"}'),
    )  # fmt: skip
    (_, _, body), _ = asked(server, [5, 6, 7], params, n=1, cache_salt="s", priority=2, deadline_ms=9000)
    assert body == {
        "model": "echo", "prompt": [5, 6, 7], "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": 42,
        "max_tokens": 7, "stop": ["END"], "stop_token_ids": [5], "ignore_eos": True, "skip_special_tokens": False,
        "repetition_penalty": 1.5, "presence_penalty": 0.25, "frequency_penalty": -0.5, "logit_bias": {"7": -100.0},
        "min_tokens": 3, "cache_salt": "s", "priority": 2, "deadline_ms": 9000, "stream": True,
        "stream_options": {"include_usage": True},
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}},
    }  # fmt: skip
    (_, _, body), _ = asked(server, "x", SamplingParams(grammar=Grammar("json_schema", "{")))
    assert body["response_format"]["json_schema"]["schema"] == "{", "the server says what is wrong with it"
    (_, _, body), _ = asked(server, "x", SamplingParams())
    assert set(body) == {"model", "prompt", "stream", "stream_options"}
    chat = [ChatMessage("user", "x"), ChatMessage("tool", "5", '{"tool_call_id": "a"}')]
    options = {"template_args": '{"thinking": true}', "add_generation_prompt": False, "continue_final_message": True}
    (_, _, body), _ = asked(server, chat, SamplingParams(), **options)
    assert body["messages"] == [
        {"role": "user", "content": "x"}, {"role": "tool", "content": "5", "tool_call_id": "a"},
    ]  # fmt: skip
    assert body["chat_template_kwargs"] == {"thinking": True} and "template_args" not in body
    assert body["continue_final_message"] and not body["add_generation_prompt"]


@pytest.mark.parametrize(
    ("prompt", "code", "said"),
    [
        ("refuse", ErrorCode.INVALID, "HTTP 400: temperature is too high"),
        ("overload", ErrorCode.OVERLOADED, "HTTP 429: try later"),
        ("garbage", ErrorCode.INTERNAL, "cannot be read"),
        ("deep", ErrorCode.INTERNAL, "cannot be read"),
        ("error", ErrorCode.INTERNAL, "out of memory"),
        ("cut", ErrorCode.INTERNAL, ""),
    ],
)
def test_what_goes_wrong_ends_the_request_and_no_other(
    server: FakeOpenAI, prompt: str, code: ErrorCode, said: str
) -> None:
    link = HttpLink(Server(server.url))
    bad, good = link.submit(prompt, PARAMS), link.submit("fine", PARAMS)
    rows = collect(link)
    link.close()
    (error,) = [row for row in rows if isinstance(row, RequestError)]
    assert (error.rid, error.code) == (bad, code) and said in error.problem
    assert error.field == ("temperature" if prompt == "refuse" else "")
    assert "".join(row.text for row in rows if isinstance(row, Row) and row.rid == good) == "fine"


def test_an_abort_reaches_the_server_and_ends_the_choice(server: FakeOpenAI) -> None:
    link = HttpLink(Server(server.url))
    rid = link.submit("wait", PARAMS)
    (first,) = link.poll(TIMEOUT_S)
    assert isinstance(first, Row) and first.text == "begun"
    link.abort(rid)
    (last,) = collect(link)
    assert isinstance(last, Row) and last.finish is Finish.ABORT
    assert server.gone.wait(TIMEOUT_S)
    early = link.submit("wait", PARAMS)  # before anybody polled
    link.abort(early)
    (row,) = collect(link)
    assert isinstance(row, Row) and (row.rid, row.finish) == (early, Finish.ABORT)
    link.close()


def test_reasoning_is_apart(server: FakeOpenAI) -> None:
    _, rows = asked(server, [ChatMessage("user", "think")])
    assert "".join(row.reasoning for row in rows) == "hmm" and "".join(row.text for row in rows) == "think"


@pytest.mark.parametrize("prompt", ["ab", [ChatMessage("user", "ab")]])
def test_log_probabilities_are_read_in_both_formats(server: FakeOpenAI, prompt: Any) -> None:
    (_, _, body), rows = asked(server, prompt, SamplingParams(logprobs=1))
    assert (body["logprobs"], body.get("top_logprobs")) == ((1, None) if isinstance(prompt, str) else (True, 1))
    first, second = (row.logprobs for row in rows)
    likeliest = TopLogprob(-1, b"e", -0.25)
    assert first == (TokenLogprobs(-1, b"a", -1.5, -1, (likeliest,)),), (
        "the drawn token behind the likeliest has no rank"
    )
    assert second is not None and second[0].token == b"b"
    assert first[0].as_dict() == {"token": "a", "logprob": -1.5, "top": [{"token": "e", "logprob": -0.25}]}
    _, rows = asked(server, prompt, SamplingParams(logprobs=2))
    assert [row.logprobs[0].rank for row in rows] == [2, 2] and len(rows[0].logprobs[0].top) == 2


def test_tokens_by_number_and_by_bytes() -> None:
    top = {"token": "token_id:7", "logprob": -1.0, "bytes": None}
    entry = {"token": "\ufffd", "logprob": -2.0, "bytes": [0xF0, 0x9F], "top_logprobs": [top]}
    (found,) = logprobs_of({"logprobs": {"content": [entry]}}, 1) or ()
    assert (found.token, found.rank, found.top) == (b"\xf0\x9f", -1, (TopLogprob(7, b"token_id:7", -1.0),))
    for nothing in ({}, {"logprobs": None}, {"logprobs": {"content": None}}):
        assert logprobs_of(nothing, 1) is None
    for wrong in ({"logprobs": {"content": [{}]}}, {"logprobs": {"tokens": ["a"], "token_logprobs": []}}):
        with pytest.raises((LookupError, ValueError)):
            logprobs_of(wrong, 1)


@pytest.mark.parametrize(("usage", "total"), [({"prompt_tokens": 3, "completion_tokens": 9}, 9), (None, None)])
def test_the_tokens_of_several_choices_are_those_of_the_usage(usage: Any, total: int | None) -> None:
    answer = _Answer(1, 2, None, None)
    answers = [Answer(), Answer()]
    for index in (1, 0):
        choice = {"index": index, "text": "text", "finish_reason": "length"}
        assert answer.take({"choices": [choice]}, index) == []
    answer.take({"choices": [], "usage": usage}, 3)
    for row in answer.end():
        assert isinstance(row, Row)
        answers[row.choice].add(row)
    found = result_of(answers)
    assert (found["completion_tokens"], found["itl_ms"]) == (total, None), "nobody tells those of one choice"


def test_the_key_is_sent_and_its_lack_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeOpenAI(key="secret") as server:
        with pytest.raises(ConnectionLost, match="wrong key") as caught:
            HttpLink(Server(server.url), wait_s=60)
        assert not isinstance(caught.value, Unreachable), "it is there, and refuses"
        assert run("x", "--url", server.url).returncode == run("status", "--url", server.url).returncode == 1
        assert "secret" not in repr(Server(server.url, "secret"))
        ended = run("hi", "--url", server.url + "/v1/", "--api-key-env", "SOME_KEY", SOME_KEY="secret")
        assert (ended.stdout, ended.returncode) == ("hi\n", 0), ended.stderr
    ended = run("hi", "--url", "http://127.0.0.1:1", "--api-key-env", "NOT_SET_ANYWHERE")
    assert ended.returncode == 2 and "NOT_SET_ANYWHERE is not set" in ended.stderr


# ---- commands ------------------------------------------------------------------------------------------------------


def test_complete(server: FakeOpenAI) -> None:
    assert run("Hëllo", "--url", server.url).stdout == "Hëllo\n"
    answer = json.loads(run("hello", "--chat", "--json", "--url", server.url).stdout)
    assert (answer["text"], answer["completion_tokens"], answer["finish_reason"]) == ("hello", 5, "length")
    assert 0 < answer["ttft_ms"] <= answer["e2e_ms"]
    lines = "\n".join(json.dumps({"prompt": p}) for p in ("one", "refuse", "three"))
    ended = run("--jsonl", "-", "--url", server.url, "--model", "own", stdin=lines)
    results = [json.loads(line) for line in ended.stdout.splitlines()]
    assert ended.returncode == 1 and [r.get("text") for r in results] == ["one", None, "three"]
    assert server.requests.get()[2]["model"] == "echo"


def test_ctrl_c_cuts_the_connection(server: FakeOpenAI) -> None:
    process = start("wait", "--url", server.url)
    assert process.stdout is not None
    assert process.stdout.read(5) == "begun"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130 and "requests aborted: 1" in errors
    assert server.gone.wait(TIMEOUT_S)


def test_prompt_logprobs_of_vllm_are_read() -> None:
    def said(logprob: float, rank: int, text: str) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": text}

    found = prompt_logprobs_of(
        [None, {"7": said(-3.0, 3, "c"), "5": said(-0.5, 1, "a"), "6": said(-1.0, 2, "b")},
         {"6": said(-1.0, 2, "b"), "5": said(-0.5, 1, "a")}],
        2,
    )  # fmt: skip
    a, b = TopLogprob(5, b"a", -0.5), TopLogprob(6, b"b", -1.0)
    assert found == (None, TokenLogprobs(7, b"c", -3.0, 3, (a, b)), TokenLogprobs(6, b"b", -1.0, 2, (a, b)))
    assert prompt_logprobs_of([{"7": said(-3.0, 3, "c")}], 0) == (TokenLogprobs(7, b"c", -3.0, 3, ()),)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["x", "--url", "127.0.0.1:8000"], "must begin with http"),
        (["x", "--url", "http://"], "--url must name a host"),
        (["x", "--url", "http://h:99999"], "--url must name a host"),
        (["x", "--url", "http://h:x"], "--url must name a host"),
        (["x", "--url", "http://[::1"], "--url must name a host"),
        (["x", "--url", "http://a b"], "--url must name a host"),
        (["x", "--address", "tcp://127.0.0.1"], "--address must be tcp://HOST:PORT or ipc://PATH"),
        (["x", "--address", "tcp://h:99999"], "--address must be tcp://HOST:PORT or ipc://PATH"),
        (["x", "--address", "ipc://"], "--address must be tcp://HOST:PORT or ipc://PATH"),
        (["x", "--address", "http://127.0.0.1:8000"], "got 'http://127.0.0.1:8000'; HTTP is --url"),
        (
            ["--url", "http://h", "status"],
            "'status' is a command; `client.py complete ...` takes it for a prompt; a comm",
        ),
        (["x", "--json-schema", sys.executable], "--json-schema: "),
        (["x", "--lark", sys.executable], "is not UTF-8"),
        (["x", "--json-schema", __file__], "--json-schema: not JSON"),
        (["x", "--url", "http://h", "--run-dir", "d"], "--run-dir and --url exclude each other"),
        (["x", "--model", "m"], "--model belongs to --url"),
        (["x", "--api-key-env", "K"], "--api-key-env belongs to --url"),
        (["--stats", "--url", "http://h"], "--stats does not work over HTTP"),
        (["x", "--logprobs", "2"], "are shown by --json"),
        (["x", "--regex", "a", "--json-object"], "Give one of --json-object"),
        (["--max-tokens", "5", "chat", "x"], "a command comes before its options: client.py chat ..."),
        (["x", "--logit-bias", "a:1"], "TOKEN_ID:VALUE expected"),
        (["Once", "upon", "a time"], "Unexpected arguments (upon a time); a prompt of several words stands in quotes"),
    ],
)
def test_options_that_do_not_go_together(args: list[str], said: str) -> None:
    ended = run(*args)
    assert ended.returncode == 2 and said in ended.stderr, ended.stderr


def test_nobody_answers() -> None:
    ended = run("x", "--url", "http://127.0.0.1:1")
    assert ended.returncode == 2 and "no answer at http://127.0.0.1:1" in ended.stderr


@pytest.mark.parametrize("model", [None, "own"])
def test_a_server_that_is_starting_is_waited_for(server: FakeOpenAI, model: str | None) -> None:
    server.starting = 2
    link = HttpLink(Server(server.url), model, wait_s=60)
    link.close()
    assert (link.model, server.starting) == (model or "echo", 0)
    server.starting = 2
    HttpRunner(Server(server.url), model, wait_s=60).close()
    assert server.starting == 0
    server.starting = 2
    Watcher(Target(url=server.url, model=model, wait_s=60)).close()
    assert server.starting == 0


@pytest.mark.parametrize(
    "page", ["<html>", "[]", "null", '{"data": []}', '{"data": null}', '{"data": [{}]}', '{"data": 5}']
)
def test_a_page_that_is_no_list_of_models(server: FakeOpenAI, page: str) -> None:
    server.models = page
    with pytest.raises(Unreachable, match="list of models cannot be read"):
        HttpLink(Server(server.url))
    state, code = _look(Target(url=server.url), 5.0)
    assert (state["problem"], code) == ("/v1/models is not a list of models", 1)
