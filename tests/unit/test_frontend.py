"""What the tokenizer does with messages, without sockets."""

import asyncio
import threading
from array import array
from dataclasses import replace
from typing import Any

import pytest

from common.codec import encode
from common.messages import (
    Abort,
    AddRequest,
    ChatMessage,
    ErrorCode,
    Finish,
    Generate,
    GetStats,
    OpenStream,
    RequestError,
    Stats,
    TextBatch,
    Timing,
    ints,
)
from common.sampling_params import Grammar, SamplingParams
from tests.unit.frontend_world import World, request, run, text_batch, tokenizer
from tokenizer_proc.prompt import PromptEncoder


def test_the_detokenizer_is_told_to_show_what_ends_the_answer() -> None:
    async def test() -> None:
        world = World()
        world.receive(request(5, SamplingParams(stop=("x",), include_stop_str_in_output=True), text="fox"))
        await world.settle()
        assert world.detokenizer == [OpenStream(world.live_rid(), ("x",), True, shows_stop=True)]

    run(test)


def test_a_request_goes_to_both_and_its_text_comes_back() -> None:
    async def test() -> None:
        world = World()
        params = SamplingParams(temperature=0.5, max_tokens=100, stop=("x",), stop_token_ids=ints(8))
        world.receive(request(5, params, text="fox"))
        await world.settle()
        rid = world.live_rid()
        prompt = tokenizer().encode("fox").ids
        assert world.scheduler == [
            AddRequest(rid, ints(*prompt), 32 - len(prompt), ints(0, 8), params.draw(77)),
        ]
        assert world.detokenizer == [OpenStream(rid, ("x",), True)]
        world.frontend.on_detokenizer(text_batch(rid, "he"))
        world.frontend.on_detokenizer(text_batch(rid, "y", Finish.LENGTH))
        first, last = world.answers[b"a"]
        assert (list(first.rids), first.texts, first.finish) == ([5], ("he",), b"\0")
        assert (list(last.prompt_tokens), list(last.cached), list(last.times)) == ([len(prompt)], [2], [1, 2, 99])
        assert last.finish == bytes([Finish.LENGTH]) and len(world.scheduler) == 1
        world.frontend.on_detokenizer(text_batch(rid, "late"))
        assert len(world.answers[b"a"]) == 2

    run(test)


def test_text_has_the_tokenizers_special_tokens_and_a_chat_has_not() -> None:
    async def test() -> None:
        world = World()
        world.receive(request(1, text="fox"))
        await world.settle()
        world.receive(request(2, chat=(ChatMessage("user", "fox"),)))
        await world.settle()
        text, chat = (list(m.prompt) for m in world.scheduler if isinstance(m, AddRequest))
        assert text == tokenizer().encode("fox").ids
        assert chat == text[1:]

    run(test)


def test_without_streaming_there_is_one_row_at_the_end() -> None:
    async def test() -> None:
        world = World()
        world.receive(request(stream=False))
        await world.settle()
        rid = world.live_rid()
        for text, finish in (("a", Finish.NONE), ("b", Finish.NONE), ("c", Finish.STOP)):
            world.frontend.on_detokenizer(text_batch(rid, text, finish, (7, 8)))
        (row,) = world.answers[b"a"]
        assert (row.texts, list(row.token_ids), list(row.counts)) == (("abc",), [7, 8] * 3, [6])

    run(test)


def test_one_batch_per_client_however_many_rows() -> None:
    async def test() -> None:
        world = World()
        for owner in (b"a", b"b"):
            for rid in (1, 2):
                world.receive(request(rid), owner)
        await world.settle()
        rids = [m.rid for m in world.scheduler if isinstance(m, AddRequest)]
        batch = TextBatch(
            ints(999, *rids),  # of the first one nobody knows any more
            ints(0, 0, 0, 0, 0),
            ints(1, 1, 1, 1, 1),
            ints(*range(5)),
            ("gone", "p", "q", "r", "s"),
            bytes(5),
            ints(0, 0, 0, 0, 0),
            ints(0, 0, 0, 0, 0),
            array("q"),
        )
        world.frontend.on_detokenizer(batch)
        assert [(list(m.rids), m.texts) for m in world.answers[b"a"]] == [([1, 2], ("p", "q"))]
        assert [(list(m.rids), m.texts) for m in world.answers[b"b"]] == [([1, 2], ("r", "s"))]

    run(test)


ANY = Grammar("regex", "a+")


@pytest.mark.parametrize(
    ("msg", "code", "field"),
    [
        (request(text="x" * 5000), ErrorCode.TOO_LONG, "text"),
        (request(text="the quick brown fox " * 20), ErrorCode.TOO_LONG, "text"),
        (request(token_ids=ints(*[1] * 32)), ErrorCode.TOO_LONG, "token_ids"),
        (request(token_ids=ints()), ErrorCode.INVALID, "token_ids"),
        (request(token_ids=ints(1, 1000)), ErrorCode.INVALID, "token_ids[1]"),
        (request(params=SamplingParams(stop_token_ids=ints(1000))), ErrorCode.INVALID, "params.stop_token_ids[0]"),
        (request(chat=(ChatMessage("user", ""),)), ErrorCode.INVALID, "chat"),
        (request(params=SamplingParams(grammar=ANY, use_beam_search=True)), ErrorCode.INVALID, "params.grammar"),
        (
            request(params=SamplingParams(allowed_token_ids=ints(5, 1000))),
            ErrorCode.INVALID,
            "params.allowed_token_ids[1]",
        ),
        (
            request(params=SamplingParams(allowed_token_ids=ints(0, 7), stop_token_ids=ints(7), min_tokens=1)),
            ErrorCode.INVALID,
            "params.min_tokens",
        ),
        (request(params=SamplingParams(bad_words=("x", " "))), ErrorCode.INVALID, "params.bad_words[1]"),
        (request(params=SamplingParams(bad_words=("1é" * 60,))), ErrorCode.INVALID, "params.bad_words[0]"),
    ],
)
def test_refusals_before_anything_is_forwarded(msg: Generate, code: ErrorCode, field: str) -> None:
    async def test() -> None:
        world = World()
        world.receive(msg)
        await world.settle()
        (error,) = world.answers[b"a"]
        assert (error.rid, error.code, error.field) == (5, code, field)
        assert world.scheduler == world.detokenizer == []
        world.receive(request())
        await world.settle()
        assert len(world.scheduler) == 1  # the id is free again

    run(test)


def test_chats_without_a_template_and_with_one_that_refuses() -> None:
    async def test() -> None:
        for template, words in ((None, "no chat template"), ("{{ raise_exception('only Latin') }}", "only Latin")):
            world = World(template)
            world.receive(request(chat=(ChatMessage("user", "hi"),)))
            await world.settle()
            assert words in world.answers[b"a"][0].problem

    run(test)


def test_bad_frames_are_answered_when_they_name_a_request() -> None:
    async def test() -> None:
        world = World()
        good = encode(request())
        world.frontend.on_client(b"a", good[:-1])
        assert world.answers == {} and world.frontend.refused.total == 1
        world.receive(request(params=SamplingParams(temperature=-1.0)))
        (error,) = world.answers[b"a"]
        assert (error.rid, error.code, error.field) == (5, ErrorCode.INVALID, "params.temperature")
        assert world.frontend.refused.total == 2

    run(test)


def test_a_live_id_and_too_many_requests() -> None:
    async def test() -> None:
        world = World(max_live=2)
        world.receive(request(1))
        world.receive(request(1))
        world.receive(request(1), b"b")
        world.receive(request(2), b"b")
        await world.settle()
        assert [(m.rid, m.code, m.field) for m in world.answers[b"a"]] == [(1, ErrorCode.INVALID, "rid")]
        (error,) = world.answers[b"b"]
        assert (error.rid, error.code, error.limit) == (2, ErrorCode.OVERLOADED, 2) and error.retry_after_s > 0
        assert len(world.scheduler) == 2

    run(test)


def test_an_abort_while_the_prompt_is_tokenized() -> None:
    async def test() -> None:
        world = World()
        world.encoder.gate = threading.Event()
        world.receive(request(text="fox"))
        await asyncio.sleep(0)
        world.receive(Abort(5))
        (row,) = world.answers[b"a"]
        assert (list(row.rids), row.finish, list(row.counts)) == ([5], bytes([Finish.ABORT]), [0])
        world.receive(request(text="dog"))  # the id is free again
        world.encoder.gate.set()
        await world.settle()
        assert [list(m.prompt) for m in world.scheduler if isinstance(m, AddRequest)] == [tokenizer().encode("dog").ids]
        assert len(world.answers[b"a"]) == 1 and len(world.detokenizer) == 1

    run(test)


def test_an_abort_of_a_running_request_goes_to_the_scheduler_once() -> None:
    async def test() -> None:
        world = World()
        world.receive(request())
        await world.settle()
        world.receive(Abort(5))
        world.receive(Abort(5))
        world.receive(Abort(6))
        assert world.scheduler[1:] == [Abort(world.live_rid())] and world.answers == {}
        world.frontend.on_detokenizer(text_batch(world.live_rid(), "", Finish.ABORT, ()))
        assert world.answers[b"a"][0].finish == bytes([Finish.ABORT])

    run(test)


def test_a_stop_string_ends_the_request_in_the_scheduler_too() -> None:
    async def test() -> None:
        world = World()
        world.receive(request(params=SamplingParams(stop=("x",))))
        await world.settle()
        rid = world.live_rid()
        world.frontend.on_detokenizer(text_batch(rid, "", Finish.STOP))
        assert world.scheduler[1:] == [Abort(rid)]

    run(test)


def test_ignore_eos_leaves_only_the_users_stop_tokens() -> None:
    async def test() -> None:
        world = World()
        world.receive(request(params=SamplingParams(ignore_eos=True, stop_token_ids=ints(4))))
        await world.settle()
        (add,) = world.scheduler
        assert isinstance(add, AddRequest) and list(add.stop_token_ids) == [4]

    run(test)


def test_errors_of_the_scheduler_reach_the_client() -> None:
    async def test() -> None:
        world = World()
        world.receive(request())
        await world.settle()
        error = RequestError(world.live_rid(), ErrorCode.OVERLOADED, "full", "prompt", 3, 0.5)
        world.frontend.on_detokenizer(error)
        world.frontend.on_detokenizer(error)
        assert world.answers[b"a"] == [RequestError(5, ErrorCode.OVERLOADED, "full", "prompt", 3, 0.5)]
        assert world.frontend.measures.flat()["tokenizer.errors_overloaded"] == 1

    run(test)


def test_stats_come_back_with_the_clients_number() -> None:
    async def test() -> None:
        world = World()
        world.receive(GetStats(8), b"a")
        world.receive(GetStats(8), b"b")
        first, second = world.scheduler
        assert isinstance(first, GetStats) and isinstance(second, GetStats) and first.query != second.query
        world.frontend.on_detokenizer(Stats(second.query, {"scheduler.free_pages": 3}))
        (stats,) = world.answers[b"b"]
        assert stats.query == 8
        assert stats.values["scheduler.free_pages"] == 3 and stats.values["tokenizer.live_requests"] == 0
        assert b"a" not in world.answers

    run(test)


def test_at_the_end_every_request_has_an_answer() -> None:
    async def test() -> None:
        world = World()
        world.receive(request(1))
        await world.settle()
        world.encoder.gate = threading.Event()
        world.receive(request(2, text="fox"))
        await asyncio.sleep(0)
        world.frontend.shut_down()
        world.receive(request(3))
        world.encoder.gate.set()
        await world.settle()
        assert {(m.rid, m.code) for m in world.answers[b"a"]} == {(n, ErrorCode.SHUTTING_DOWN) for n in (1, 2, 3)}
        assert len(world.answers[b"a"]) == 3

    run(test)


def test_an_unexpected_error_is_answered_and_stays_inside() -> None:
    class Broken(PromptEncoder):
        def encode(self, msg: Generate) -> Any:
            raise RuntimeError("broken")

    async def test() -> None:
        world = World()
        world.frontend._encoder = Broken(tokenizer(), None, World().frontend._limits)
        world.receive(request(text="fox"))
        await world.settle()
        assert [(m.rid, m.code) for m in world.answers[b"a"]] == [(5, ErrorCode.INTERNAL)]

    run(test)


@pytest.mark.parametrize("stream", [True, False])
def test_clients_hear_when_what_happened(stream: bool) -> None:
    async def test() -> None:
        world = World()
        world.now = 100
        world.receive(request(5, stream=stream))
        await world.settle()
        rid = world.live_rid()
        for now, batch in (
            (200, replace(text_batch(rid, "a"), timings=(Timing(0, started=150),))),
            (300, text_batch(rid, "b")),
            (400, text_batch(rid, "c", Finish.LENGTH)),
        ):
            world.now = now
            world.frontend.on_detokenizer(batch)
        told = [m.timings for m in world.answers[b"a"]]
        whole = (Timing(0, 100, 150, 200),)
        assert told == ([whole, (), whole] if stream else [whole]), "with the first tokens and with the end"
        assert world.answers[b"a"][-1].times[-1] == 400

    run(test)


def test_a_message_that_is_too_large_is_a_prompt_that_is_too_long() -> None:
    world = World()
    world.receive(request(5, text="x" * 2**21))
    (error,) = world.answers[b"a"]
    assert (error.rid, error.code) == (5, ErrorCode.TOO_LONG) and "maximum context length is 32 tokens" in error.problem
    assert world.frontend.refused.by_cause["oversized"] == 1


def test_text_that_waits_counts_from_its_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several messages may arrive before anything is tokenized."""
    monkeypatch.setattr("tokenizer_proc.frontend.MAX_PENDING_CHARS", 5)

    async def test() -> None:
        world = World()
        for rid in range(3):
            world.receive(request(rid, text="four"), bytes([rid]))
        refused = [owner for owner, answers in world.answers.items() for a in answers if a.code == ErrorCode.OVERLOADED]
        assert refused == [b"\x01", b"\x02"]
        await world.settle()
        assert len(world.added) == 1
        world.answers.clear()
        world.receive(request(4, text="fourteen"))
        await world.settle()
        assert len(world.added) == 2 and not world.answers, "what was tokenized waits no longer, and alone all may"

    run(test)


def test_answers_that_end_together_go_in_several_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenizer_proc.rows.MAX_SIZE", 200)

    async def test() -> None:
        world = World()
        for rid in range(4):
            world.receive(request(rid, stream=False))
        await world.settle()
        rids = [m.rid for m in world.scheduler if isinstance(m, AddRequest)]
        zeros, texts = ints(0, 0, 0, 0), ("\u00e4" * 31, "\u00e4" * 31, "a" * 31, "a" * 31)
        ends = TextBatch(
            ints(*rids), zeros, ints(20, 20, 20, 20), ints(*range(80)), texts, bytes([Finish.LENGTH] * 4),
            zeros, zeros, array("q"),
        )  # fmt: skip
        world.frontend.on_detokenizer(ends)
        sent = [(list(m.rids), list(m.token_ids)) for m in world.answers[b"a"]]
        assert sent == [([0], [*range(20)]), ([1], [*range(20, 40)]), ([2, 3], [*range(40, 80)])]

    run(test)
