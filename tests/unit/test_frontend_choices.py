"""What the tokenizer does with requests of several choices, and with deadlines."""

import asyncio
import threading
from array import array
from typing import Any

import pytest

from common.codec import MAX_FRAME_BYTES
from common.messages import (
    Abort,
    AddRequest,
    Beat,
    ErrorCode,
    Finish,
    Generate,
    GetStats,
    OpenStream,
    RequestError,
    Stats,
    TextBatch,
    ints,
)
from common.sampling_params import SamplingParams
from tests.unit.frontend_world import World, request, rows_of, run, text_batch, tokenizer
from tokenizer_proc import clients as clients_module
from tokenizer_proc.clients import Sent
from tokenizer_proc.prompt import PromptEncoder

# ---- several choices ----------------------------------------------------------------------------------------------


def test_each_choice_is_a_request_of_its_own_with_the_next_seed() -> None:
    async def test() -> None:
        world = World()
        params = SamplingParams(temperature=0.5, seed=2**63 - 1, max_tokens=7, stop=("x",))
        encoded = world.encoder.encoded
        world.receive(request(params=params, text="fox", n=3, cache_salt="tenant", priority=-4))
        await world.settle()
        assert len(encoded) == 1, "tokenized once"
        prompt = ints(*tokenizer().encode("fox").ids)
        rids = [m.rid for m in world.added]
        assert len(set(rids)) == 3
        assert world.scheduler == [
            AddRequest(rid, prompt, 7, ints(0), params.draw(seed), "tenant", -4, 0)
            for rid, seed in zip(rids, (2**63 - 1, 0, 1), strict=True)
        ]
        assert world.detokenizer == [OpenStream(rid, ("x",), True) for rid in rids]

    run(test)


def test_rows_tell_their_choice_and_the_request_lives_until_the_last_one_ends() -> None:
    async def test() -> None:
        world = World()
        first, second = await world.choices(2)
        world.frontend.on_detokenizer(text_batch(second, "b"))
        world.frontend.on_detokenizer(text_batch(first, "a", Finish.LENGTH))
        world.frontend.on_detokenizer(text_batch(first, "late"))
        world.receive(request())
        world.frontend.on_detokenizer(text_batch(second, "c", Finish.LENGTH))
        refused = world.answers[b"a"].pop(2)
        assert (refused.rid, refused.code, refused.field) == (5, ErrorCode.INVALID, "rid"), "in use by the second one"
        assert rows_of(world.answers[b"a"]) == [
            (5, 1, "b", Finish.NONE), (5, 0, "a", Finish.LENGTH), (5, 1, "c", Finish.LENGTH),
        ]  # fmt: skip
        assert world.scheduler == []
        assert await world.choices(1), "the id is free again"

    run(test)


def test_without_streaming_every_choice_has_one_row_at_its_own_end() -> None:
    async def test() -> None:
        world = World()
        first, second = await world.choices(2, stream=False)
        for rid, text, finish in ((first, "a", 0), (second, "x", 0), (second, "y", 2), (first, "b", 1)):
            world.frontend.on_detokenizer(text_batch(rid, text, Finish(finish), (rid,)))
        assert rows_of(world.answers[b"a"]) == [(5, 1, "xy", Finish.LENGTH), (5, 0, "ab", Finish.STOP)]
        assert [list(m.token_ids) for m in world.answers[b"a"]] == [[second] * 2, [first] * 2]

    run(test)


def test_what_is_held_of_one_choice_holds_up_no_other() -> None:
    async def test() -> None:
        world = World()
        first, second = await world.choices(2, stream=False)
        for tokens, finish in ((ints(7, 8), Finish.NONE), (ints(6, 9), Finish.LENGTH)):
            batch = TextBatch(
                ints(first, second), ints(0, 0), ints(1, 1), tokens, ("a", "b"), bytes([Finish.NONE, finish]),
                ints(0, 0), ints(0, 0), array("q"),
            )  # fmt: skip
            world.frontend.on_detokenizer(batch)
        (answer,) = world.answers[b"a"]
        assert (list(answer.choices), answer.texts, list(answer.token_ids)) == ([1], ("bb",), [8, 9])

    run(test)


def test_an_abort_ends_every_choice_that_has_not_ended() -> None:
    async def test() -> None:
        world = World()
        first, second, third = await world.choices(3)
        world.frontend.on_detokenizer(text_batch(second, "b", Finish.LENGTH))
        world.receive(Abort(5))
        world.receive(Abort(5))
        assert world.scheduler == [Abort(first), Abort(third)]
        for rid in (first, third):
            world.frontend.on_detokenizer(text_batch(rid, "", Finish.ABORT, ()))
        assert rows_of(world.answers[b"a"])[1:] == [(5, 0, "", Finish.ABORT), (5, 2, "", Finish.ABORT)]

    run(test)


def test_an_abort_while_the_prompt_is_tokenized_ends_every_choice_with_a_row() -> None:
    async def test() -> None:
        world = World()
        world.encoder.gate = threading.Event()
        world.receive(request(text="fox", n=3))
        await asyncio.sleep(0)
        world.receive(Abort(5))
        assert rows_of(world.answers[b"a"]) == [(5, i, "", Finish.ABORT) for i in range(3)]
        world.encoder.gate.set()
        await world.settle()
        assert world.scheduler == world.detokenizer == []

    run(test)


def test_when_one_choice_is_refused_the_others_are_aborted_and_the_client_hears_it_once() -> None:
    async def test() -> None:
        world = World()
        first, second, third, fourth = await world.choices(4)
        world.frontend.on_detokenizer(text_batch(first, "a", Finish.LENGTH))
        for rid in (third, fourth):
            world.frontend.on_detokenizer(RequestError(rid, ErrorCode.OVERLOADED, "full", "", 3, 0.5))
        world.frontend.on_detokenizer(text_batch(second, "late"))
        assert world.scheduler == [Abort(second), Abort(fourth)], "not the one that has ended, nor the refused one"
        assert world.answers[b"a"][1:] == [RequestError(5, ErrorCode.OVERLOADED, "full", "", 3, 0.5)]

    run(test)


def test_limits_count_choices() -> None:
    async def test() -> None:
        world = World(max_live=6)
        rids = await world.choices(4)
        world.receive(request(1, n=3), b"b")
        world.receive(request(2, n=2), b"b")
        world.receive(request(3, n=5), b"b")
        await world.settle()
        assert [(m.rid, m.code, m.field) for m in world.answers[b"b"]] == [
            (1, ErrorCode.OVERLOADED, "max_waiting"), (3, ErrorCode.INVALID, "n"),
        ]  # fmt: skip
        assert len(world.added) == 2
        world.frontend.on_detokenizer(text_batch(rids[0], "", Finish.LENGTH))
        world.receive(request(4), b"b")
        await world.settle()
        assert len(world.added) == 3, "a choice that ended makes room"

    run(test)


def test_all_choices_of_a_client_that_is_gone_are_aborted() -> None:
    async def test() -> None:
        world = World()
        rids = await world.choices(3)
        world.state[b"a"] = Sent.GONE
        world.frontend.beat()
        assert world.scheduler == [Abort(rid) for rid in rids]

    run(test)


def test_a_client_that_does_not_read_hears_of_each_request_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients_module, "MAX_BACKLOG_MESSAGES", 0)

    async def test() -> None:
        world = World()
        first, second, third = await world.choices(3)
        world.state[b"a"] = Sent.FULL
        world.frontend.on_detokenizer(text_batch(first, "end", Finish.LENGTH))
        assert world.scheduler == [Abort(second), Abort(third)]
        world.state[b"a"] = Sent.YES
        world.frontend.flush()
        rows, error = world.answers[b"a"]
        assert rows.texts == ("end",) and (error.rid, error.code) == (5, ErrorCode.OVERLOADED)

    run(test)


def test_at_the_end_a_request_with_many_choices_has_one_answer() -> None:
    async def test() -> None:
        world = World()
        await world.choices(3)
        world.frontend.shut_down()
        assert [(m.rid, m.code) for m in world.answers[b"a"]] == [(5, ErrorCode.SHUTTING_DOWN)]

    run(test)


def test_an_answer_that_is_too_large_ends_its_request_with_one_error() -> None:
    async def test() -> None:
        world = World()
        first, second, third = await world.choices(3)
        huge = "\N{GRINNING FACE}" * (MAX_FRAME_BYTES // 4)
        batch = TextBatch(
            ints(first, second), ints(0, 0), ints(0, 0), ints(), (huge, huge), bytes([Finish.LENGTH, Finish.NONE]),
            ints(0, 0), ints(0, 0), array("q"),
        )  # fmt: skip
        world.frontend.on_detokenizer(batch)
        assert [(m.rid, m.code) for m in world.answers[b"a"]] == [(5, ErrorCode.INTERNAL)]
        assert world.scheduler == [Abort(second), Abort(third)]
        assert world.frontend.measures.flat()["tokenizer.errors_internal"] == 1

    run(test)


def test_stats_count_requests_and_their_choices() -> None:
    async def test() -> None:
        world = World()
        await world.choices(3)
        world.receive(GetStats(1))
        (question,) = world.scheduler
        assert isinstance(question, GetStats)
        world.frontend.on_detokenizer(Stats(question.query))
        values = world.answers[b"a"][0].values
        assert (values["tokenizer.live_requests"], values["tokenizer.live_choices"]) == (1, 3)

    run(test)


# ---- deadlines ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spent_ns", "left_ms"), [(0, 20), (1, 19), (12_000_000, 8), (19_000_001, 1), (19_999_999, 1)])
def test_the_scheduler_gets_the_time_that_is_left(spent_ns: int, left_ms: int) -> None:
    class Clocked(PromptEncoder):
        def encode(self, msg: Generate) -> Any:
            world.now += spent_ns
            return super().encode(msg)

    world = World()
    world.frontend._encoder = Clocked(tokenizer(), None, world.frontend._limits)

    async def test() -> None:
        world.receive(request(n=2, deadline_ms=20))
        await world.settle()
        assert [m.deadline_ms for m in world.added] == [left_ms] * 2

    run(test)


def test_a_deadline_that_has_passed_when_the_prompt_is_tokenized() -> None:
    class Clocked(PromptEncoder):
        def encode(self, msg: Generate) -> Any:
            world.now += 20_000_000
            return super().encode(msg)

    world = World()
    world.frontend._encoder = Clocked(tokenizer(), None, world.frontend._limits)

    async def test() -> None:
        world.receive(request(n=2, deadline_ms=20))
        await world.settle()
        assert world.scheduler == world.detokenizer == []
        (error,) = world.answers[b"a"]
        assert (error.rid, error.code, error.field, error.limit) == (5, ErrorCode.DEADLINE, "deadline_ms", 20)

    run(test)


def test_a_deadline_is_answered_while_the_prompt_is_still_tokenized() -> None:
    async def test() -> None:
        world = World()
        world.encoder.gate = threading.Event()
        world.receive(request(text="fox", n=2, deadline_ms=1))
        while not world.answers:
            await asyncio.sleep(0.001)
        assert world.frontend.preparing == 1
        world.receive(request(6, text="fox", deadline_ms=60_000))
        await asyncio.sleep(0)
        world.encoder.gate.set()
        await world.settle()
        assert [(m.rid, m.code) for m in world.answers[b"a"]] == [(5, ErrorCode.DEADLINE)]
        assert len(world.scheduler) == len(world.detokenizer) == 1, "the other one had time left"

    run(test)


def test_a_deadline_that_the_scheduler_noticed_is_told_in_the_clients_terms() -> None:
    async def test() -> None:
        world = World()
        first, second = await world.choices(2, deadline_ms=500)
        world.frontend.on_detokenizer(RequestError(second, ErrorCode.DEADLINE, "after 490 ms", "deadline_ms", 490))
        (error,) = world.answers[b"a"]
        assert (error.rid, error.code, error.limit) == (5, ErrorCode.DEADLINE, 500) and "500 ms" in error.problem
        assert world.scheduler == [Abort(first)]

    run(test)


def test_a_deadline_is_answered_when_the_scheduler_is_silent() -> None:
    async def test() -> None:
        world = World()
        first, second = await world.choices(2, deadline_ms=500)
        await world.choices(1, owner=b"b")  # has time for ever
        world.now += 999_000_000
        world.frontend.beat()
        assert not any(isinstance(m, RequestError) for m in world.answers.get(b"a", [])), "it may be about to answer"
        world.now += 1_000_000
        world.frontend.beat()
        error = world.answers[b"a"][-1]
        assert (error.rid, error.code, error.limit) == (5, ErrorCode.DEADLINE, 500)
        assert world.scheduler == [Abort(first), Abort(second)]
        assert {type(m) for m in world.answers[b"b"]} == {Beat}
        answers = len(world.answers[b"a"])
        world.frontend.on_detokenizer(RequestError(first, ErrorCode.DEADLINE, "after 490 ms", "deadline_ms", 490))
        assert len(world.answers[b"a"]) == answers

    run(test)
