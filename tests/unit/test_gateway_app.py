"""The gateway's answers: chats, completions, SGLang's /generate, and errors of the cluster."""

import asyncio
from array import array
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.logprobs import LogprobRows, Logprobs, TokenLogprobs
from common.messages import ChatMessage, ErrorCode, Finish, Generate, RequestError, Stopped, Tokenize, Tokens, ints
from common.rows import Row
from gateway_proc.generation import Choice, Usage, _without_answer
from tests.unit.fake_frontend import rows
from tests.unit.gateway_world import CHAT, HELLO, World, answering, events, play


def test_a_chat(short_dir: Path) -> None:
    async def test(world: World) -> None:
        response = await world.post("/v1/chat/completions", CHAT | {"model": "tiny", "max_tokens": 7})
        assert response.status_code == 200, response.text
        answer = response.json()
        assert answer["id"] == f"chatcmpl-{response.headers['x-request-id']}"
        assert (answer["object"], answer["model"]) == ("chat.completion", "tiny")
        (choice,) = answer["choices"]
        assert choice["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
        assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
        assert answer["usage"] == {
            "prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 1},
        }  # fmt: skip
        asked = await world.generated()
        assert asked.chat == (ChatMessage("user", "hi"),) and not asked.stream and asked.params.max_tokens == 7

    play(short_dir, HELLO, test)


def test_a_streamed_chat(short_dir: Path) -> None:
    async def test(world: World) -> None:
        options = {"stream": True, "n": 2, "stream_options": {"include_usage": True}}
        found = events(await world.post("/v1/chat/completions", CHAT | options))
        assert {chunk["object"] for chunk in found} == {"chat.completion.chunk"} and len({c["id"] for c in found}) == 1
        assert found[-1]["choices"] == [] and found[-1]["usage"]["completion_tokens"] == 4
        assert found[-1]["usage"]["prompt_tokens"] == 3  # once, not for each choice
        assert all(chunk["usage"] is None for chunk in found[:-1])
        for index in range(2):
            deltas = [c["choices"][0] for c in found[:-1] if c["choices"][0]["index"] == index]
            assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
            assert [d["delta"] for d in deltas[1:-1]] == [{"content": "He"}, {"content": "llo"}]
            assert deltas[-1]["delta"] == {} and deltas[-1]["finish_reason"] == "stop"
            assert all(d["finish_reason"] is None for d in deltas[:-1])

    play(short_dir, HELLO, test)


def test_ids_of_a_chats_prompt_are_those_that_are_generated_from(short_dir: Path) -> None:
    def answer(msg: Any) -> Iterable[Any]:
        if isinstance(msg, Tokenize):
            assert msg.chat is not None and not msg.add_special_tokens
            asked.append({name: getattr(msg, name) for name in template})
            yield Tokens(msg.rid, ints(7, 8, 9))
        else:
            yield from HELLO(msg)

    template = {
        "chat": (ChatMessage("user", "hi"), ChatMessage("assistant", "He")), "tools": "",
        "template_args": '{"a": 1}', "add_generation_prompt": False, "continue_final_message": True,
    }  # fmt: skip
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "He"}]
    more = {"messages": messages, "chat_template_kwargs": {"a": 1}, "continue_final_message": True, "n": 2}
    asked: list[dict[str, Any]] = []

    async def test(world: World) -> None:
        body = CHAT | more | {"return_token_ids": True}
        whole = (await world.post("/v1/chat/completions", body)).json()
        assert whole["prompt_token_ids"] == [7, 8, 9] and [c["token_ids"] for c in whole["choices"]] == [[20, 21]] * 2
        found = events(await world.post("/v1/chat/completions", body | {"stream": True}))
        begun = [chunk for chunk in found if "prompt_token_ids" in chunk]
        assert [(c["choices"][0]["index"], c["prompt_token_ids"]) for c in begun] == [(0, [7, 8, 9]), (1, [7, 8, 9])]
        assert all("role" in chunk["choices"][0]["delta"] for chunk in begun)
        generated = await world.generated()
        assert asked == [{name: getattr(generated, name) for name in template}] * 2 == [template] * 2
        assert "prompt_token_ids" not in (await world.post("/v1/chat/completions", CHAT)).json() and len(asked) == 2

    play(short_dir, answer, test)


def test_continuous_usage(short_dir: Path) -> None:
    async def test(world: World) -> None:
        options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        found = events(await world.post("/v1/completions", {"prompt": "x", **options}))
        assert [chunk["usage"]["completion_tokens"] for chunk in found] == [1, 2, 2]

    play(short_dir, HELLO, test)


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        ("ab", [("ab", None)]),
        (["ab", "c"], [("ab", None), ("c", None)]),
        ([1, 2], [(None, ints(1, 2))]),
        ([[1, 2], [3]], [(None, ints(1, 2)), (None, ints(3))]),
    ],
)
def test_completions_take_prompts_of_every_kind(short_dir: Path, prompt: Any, asked: list[Any]) -> None:
    async def test(world: World) -> None:
        response = await world.post("/v1/completions", {"prompt": prompt, "n": 2, "echo": True})
        assert response.status_code == 200, response.text
        answer = response.json()
        assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(asked)))
        echoes = [text or "".join(chr(96 + t) for t in ids) for text, ids in asked]
        assert [choice["text"] for choice in answer["choices"]] == [e + "Hello" for e in echoes for _ in range(2)]
        assert answer["usage"]["prompt_tokens"] == 3 * len(asked) and answer["usage"]["completion_tokens"] == 4 * len(
            asked
        )
        got = [await world.generated() for _ in asked]
        assert [(m.text, m.token_ids) for m in got] == asked and all(m.params.max_tokens == 16 for m in got)

    play(short_dir, HELLO, test)


def test_a_prompt_counts_once_and_its_first_choice_says_what_was_cached() -> None:
    usage = Usage()
    for prompt, choice, cached in ((0, 1, 8), (0, 0, 2), (0, 1, 8), (1, 0, 3), (1, 1, 9), (2, 1, 7)):
        usage.add(prompt, Row(prompt, choice, "x", [7, 8], Finish.NONE, 9, cached, (), 0))
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (27, 2 + 3 + 7, 12)
    assert usage.as_dict()["total_tokens"] == 39


def test_log_probabilities_of_a_chat(short_dir: Path) -> None:
    def generate(msg: Generate) -> Iterable[Any]:
        scores = Logprobs(ints(7), array("f", [-0.5]), ints(2), ints(2), ints(8, 7), array("f", [-0.25, -0.5]))
        told = LogprobRows.of({0: scores})
        row = replace(rows(msg.rid, "a", 7, finish=Finish.STOP), token_bytes={7: b"a", 8: b"\xff"})
        wanted = msg.params.logprobs is not None, msg.params.prompt_logprobs is not None
        yield replace(row, logprobs=told if wanted[0] else None, prompt_logprobs=told if wanted[1] else None)

    async def test(world: World) -> None:
        for more, asked_for in (
            ({}, (None, None)),
            ({"logprobs": True}, (0, None)),
            ({"logprobs": True, "top_logprobs": 1, "prompt_logprobs": 2}, (1, 2)),
        ):
            answer = (await world.post("/v1/chat/completions", CHAT | more)).json()
            asked = await world.generated()
            assert (asked.params.logprobs, asked.params.prompt_logprobs) == asked_for
            (choice,) = answer["choices"]
            assert (choice["logprobs"] is None) == (not more) and ("prompt_logprobs" in answer) == (len(more) == 3)
        other = {"token": "\ufffd", "logprob": -0.25, "bytes": [255]}
        own = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": [other]}
        assert choice["logprobs"] == {"content": [own], "refusal": None}
        assert [prompt and set(prompt) for prompt in answer["prompt_logprobs"]] == [None, {"7", "8"}]
        for field, more in (("top_logprobs", {}), ("prompt_logprobs", {"stream": True})):
            refused = await world.post("/v1/chat/completions", CHAT | {field: 1} | more)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)

    play(short_dir, answering(generate), test)


def test_what_ended_an_answer_is_told(short_dir: Path) -> None:
    def generate(msg: Generate) -> Iterable[Any]:
        yield replace(rows(msg.rid, "a", 7, finish=Finish.STOP), stopped=(Stopped(0, None, "END"),))

    async def test(world: World) -> None:
        for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", CHAT)):
            (whole,) = (await world.post(path, body)).json()["choices"]
            (last,) = events(await world.post(path, body | {"stream": True}))[-1]["choices"]
            for choice in (whole, last):
                assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "END")

    play(short_dir, answering(generate), test)


def test_the_best_of_several_completions(short_dir: Path) -> None:
    def generate(msg: Generate) -> Iterable[Any]:
        for choice, value in zip(range(msg.n), (-2.0, -0.5, -1.0), strict=False):
            scores = Logprobs(ints(7), array("f", [value]), ints(1), ints(0), ints(), array("f"))
            row = rows(msg.rid, f"{choice}", 7, choice=choice, finish=Finish.STOP)
            yield replace(row, logprobs=LogprobRows.of({0: scores}), token_bytes={7: b"x"})

    async def test(world: World) -> None:
        body = {"prompt": "a", "n": 2, "best_of": 2, "stream": True}
        assert (await world.post("/v1/completions", body)).status_code == 200, "as many as are shown"
        await world.generated()
        for more, asked_for in (({}, 0), ({"logprobs": 3}, 3)):
            body = {"prompt": "a", "n": 2, "best_of": 3} | more
            answer = (await world.post("/v1/completions", body)).json()
            asked = await world.generated()
            assert (asked.n, asked.params.logprobs, answer["usage"]["completion_tokens"]) == (3, asked_for, 3)
            assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "1"), (1, "2")]
            scores = [c["logprobs"] and c["logprobs"]["token_logprobs"] for c in answer["choices"]]
            assert scores == ([[-0.5], [-1.0]] if more else [None, None])

    play(short_dir, answering(generate), test)


def test_a_choice_keeps_its_prompts_scores_and_why_it_ended() -> None:
    scores = (None, TokenLogprobs(5, b"x", -1.0, 1, ()))
    choice = Choice()
    choice.add(Row(1, 0, "a", [7], Finish.NONE, 9, 8, (), 0, scores[1:], scores))
    choice.add(Row(1, 0, "b", [8], Finish.STOP, 9, 8, (), 0, scores[1:], stop_reason="b"))
    assert (choice.text, choice.token_ids, choice.finish, choice.stop_reason) == ("ab", [7, 8], Finish.STOP, "b")
    assert choice.prompt_logprobs == scores and choice.logprobs == [scores[1]] * 2


@pytest.mark.parametrize(
    ("finish", "shown"), [(Finish.STOP, Finish.LENGTH), (Finish.LENGTH, Finish.LENGTH), (Finish.ABORT, Finish.ABORT)]
)
def test_of_an_answer_that_nobody_asked_for_nothing_is_shown(finish: Finish, shown: Finish) -> None:
    """The cluster always generates a token."""
    for logprobs in (None, (TokenLogprobs(5, b"x", -1.0, 1, ()),)):
        row = Row(1, 0, "a", [7], finish, 9, 8, (), 0, logprobs, stop_reason=7)
        assert _without_answer(row) == Row(1, 0, "", (), shown, 9, 8, (), 0, None if logprobs is None else ())


def test_completions_that_say_null_for_max_tokens_get_the_default(short_dir: Path) -> None:
    async def test(world: World) -> None:
        for fields in ({}, {"max_tokens": None}):
            response = await world.post("/v1/completions", {"prompt": "x", **fields})
            assert response.status_code == 200, response.text
            assert (await world.generated()).params.max_tokens == 16
        response = await world.post("/v1/completions", {"prompt": "x", "max_tokens": None, "min_tokens": 17})
        assert response.status_code == 400 and response.json()["error"]["param"] == "min_tokens"

    play(short_dir, HELLO, test)


def test_streamed_completions_of_several_prompts(short_dir: Path) -> None:
    async def test(world: World) -> None:
        found = events(
            await world.post("/v1/completions", {"prompt": ["a", "b"], "n": 2, "stream": True, "echo": True})
        )
        for index in range(4):
            chunks = [c["choices"][0] for c in found if c["choices"][0]["index"] == index]
            assert [c["text"] for c in chunks] == ["ab"[index // 2] + "He", "llo"]
            assert [c["finish_reason"] for c in chunks] == [None, "stop"]

    play(short_dir, HELLO, test)


def test_an_echo_without_an_answer(short_dir: Path) -> None:
    async def test(world: World) -> None:
        response = await world.post("/v1/completions", {"prompt": "ab", "max_tokens": 0, "echo": True})
        answer = response.json()
        assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("ab", "length")
        assert answer["usage"]["completion_tokens"] == 0
        assert (await world.generated()).params.max_tokens == 1
        refused = await world.post("/v1/completions", {"prompt": "ab", "max_tokens": 0})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "max_tokens"

    play(short_dir, HELLO, test)


def test_sglang_generate(short_dir: Path) -> None:
    async def test(world: World) -> None:
        response = await world.post("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 5}, "rid": "r"})
        answer = response.json()
        assert (answer["text"], answer["output_ids"]) == ("Hello", [20, 21])
        meta = answer["meta_info"]
        assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == ("r", 3, 2, 1)
        assert meta["finish_reason"] == {"type": "stop", "matched": 21}
        params = (await world.generated()).params
        assert (params.max_tokens, params.logprobs) == (5, None)
        await world.post("/generate", {"text": "x", "sampling_params": {"no_stop_trim": True}})
        assert (await world.generated()).params.include_stop_str_in_output
        several = await world.post("/generate", {"input_ids": [[1], [2]], "stream": True})
        found = events(several)
        assert [e["text"] for e in found if e["index"] == 1][-1] == "Hello"  # the whole text so far
        for model, status in (("unknown", 200), ("tiny", 200), ("other", 404)):  # the first is a router's word for none
            assert (await world.post("/generate", {"text": "x", "model": model})).status_code == status
        both = await world.post("/generate", {"text": "x", "input_ids": [1]})
        assert both.status_code == 400 and both.json()["error"]["param"] == "text"

    play(short_dir, HELLO, test)


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        (ErrorCode.INVALID, 400, "invalid_request_error"),
        (ErrorCode.TOO_LONG, 400, "invalid_request_error"),
        (ErrorCode.OVERLOADED, 429, "rate_limit_error"),
        (ErrorCode.SHUTTING_DOWN, 503, "service_unavailable_error"),
        (ErrorCode.INTERNAL, 500, "server_error"),
        (ErrorCode.DEADLINE, 504, "timeout_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_of_the_cluster(short_dir: Path, code: ErrorCode, status: int, kind: str, stream: bool) -> None:
    """An error before anything was streamed has its own status, also when a stream was asked for."""

    def fail(msg: Generate) -> Iterable[Any]:
        yield RequestError(msg.rid, code, "chat: is wrong", "chat", 5, 2.2 if code == ErrorCode.OVERLOADED else 0.0)

    async def test(world: World) -> None:
        response = await world.post("/v1/chat/completions", CHAT | {"stream": stream})
        assert response.status_code == status and response.headers["content-type"] == "application/json"
        error = response.json()["error"]
        assert (error["type"], error["param"], error["message"]) == (kind, "messages", "messages: is wrong")
        assert response.headers.get("retry-after") == {429: "3", 503: "1"}.get(status)
        assert "x-request-id" in response.headers

    play(short_dir, answering(fail), test)


def test_an_error_in_the_middle_of_a_stream_is_an_event(short_dir: Path) -> None:
    def fail(msg: Generate) -> Iterable[Any]:
        yield rows(msg.rid, "begun", 1)
        yield RequestError(msg.rid, ErrorCode.DEADLINE, "too late", "deadline_ms")

    async def test(world: World) -> None:
        found = events(await world.post("/v1/completions", {"prompt": "x", "stream": True, "timeout_ms": 5}))
        assert found[0]["choices"][0]["text"] == "begun" and found[-1]["error"]["type"] == "timeout_error"
        assert (await world.generated()).deadline_ms == 5

    play(short_dir, answering(fail), test)


def test_one_failed_prompt_fails_all_and_aborts_the_others(short_dir: Path) -> None:
    aborted: list[int] = []

    def answer(msg: Generate) -> Iterable[Any]:
        if msg.text == "bad":
            yield RequestError(msg.rid, ErrorCode.TOO_LONG, "too long", "text")

    def with_aborts(msg: Any) -> Iterable[Any]:
        if type(msg).__name__ == "Abort":
            aborted.append(msg.rid)
            yield rows(msg.rid, "", finish=Finish.ABORT)
        yield from answering(answer)(msg)

    async def test(world: World) -> None:
        response = await world.post("/v1/completions", {"prompt": ["good", "bad", "good"]})
        assert response.status_code == 400 and response.json()["error"]["param"] == "prompt"
        while len(aborted) < 2:
            await asyncio.sleep(0.01)

    play(short_dir, with_aborts, test)


def test_what_is_wrong_in_a_grammar_is_said_of_the_clients_field(short_dir: Path) -> None:
    def fail(msg: Generate) -> Iterable[Any]:
        problem = "params.grammar: text: is not JSON: Expecting value"
        yield RequestError(msg.rid, ErrorCode.INVALID, problem, "params.grammar")

    async def test(world: World) -> None:
        response = await world.post("/v1/completions", {"prompt": "x", "guided_json": "{"})
        assert response.json()["error"]["message"] == "guided_json: is not JSON: Expecting value"

    play(short_dir, answering(fail), test)
