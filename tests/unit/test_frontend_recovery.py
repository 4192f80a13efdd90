"""What the tokenizer does after a loss: every live request is handed in again from where its client is."""

import asyncio
import threading
from array import array
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.logprobs import LogprobRows, Logprobs
from common.messages import (
    Abort,
    AddRequest,
    ErrorCode,
    Finish,
    GetStats,
    OpenStream,
    RequestError,
    Stats,
    TextBatch,
    Timing,
    TokenBatch,
    ints,
)
from common.sampling_params import DrawParams, Grammar, SamplingParams
from common.stamps import Lost
from tests.examples import examples
from tests.unit.frontend_world import World, request, rows_of, run, text_batch
from tests.unit.test_streams import decoders
from tokenizer_proc.clients import Sent
from tokenizer_proc.streams import Streams


def forget(world: World) -> None:
    world.scheduler.clear()
    world.detokenizer.clear()


def test_a_grammar_goes_along_and_its_answer_may_end() -> None:
    async def test() -> None:
        world, grammar = World(), Grammar("regex", "a+")
        params = SamplingParams(temperature=0.0, seed=7, max_tokens=9, ignore_eos=True, grammar=grammar)
        (rid,) = await world.choices(1, params=params)
        world.frontend.on_detokenizer(text_batch(rid, "a", tokens=(8,)))
        world.frontend.resume()
        (again,) = world.added
        assert (again.grammar, again.ignore_eos, again.generated) == (grammar, True, 1)
        assert again.stop_token_ids == ints(0), "where nothing else can come, the end may, with ignore_eos too"
        await world.choices(1, owner=b"b", params=replace(params, ignore_eos=False))
        world.frontend.resume()
        assert [m.ignore_eos for m in world.added] == [True, False]

    run(test)


def test_choices_go_on_after_the_last_token_that_their_client_was_sent() -> None:
    async def test() -> None:
        world = World()
        params = SamplingParams(temperature=0.5, seed=7, max_tokens=9, stop=("x",), min_tokens=2)
        first, second = await world.choices(2, params=params, cache_salt="tenant", priority=-4)
        world.frontend.on_detokenizer(text_batch(second, "ab", tokens=(8, 9)))
        world.frontend.resume()
        draws = [params.draw(seed, 3, ints(0)) for seed in (7, 8)]
        assert world.scheduler == [
            AddRequest(first, ints(1, 2, 3), 9, ints(0), draws[0], "tenant", -4, 0, waited_ms=1, counted=True),
            AddRequest(
                second, ints(1, 2, 3, 8, 9), 9, ints(0), draws[1], "tenant", -4, 0, 2, waited_ms=1, counted=True
            ),
        ]
        assert world.detokenizer == [
            OpenStream(first, ("x",), True, 2),
            OpenStream(second, ("x",), True, 2, ints(8, 9)),
        ]
        world.frontend.on_detokenizer(text_batch(second, "c", Finish.LENGTH))
        forget(world)
        world.frontend.resume()
        assert [m.rid for m in world.added] == [first], "what has ended is not handed in again"
        values = stats(world)
        assert values["tokenizer.resubmitted"] == 3

    run(test)


def stats(world: World) -> dict[str, int]:
    world.receive(GetStats(1))
    world.frontend.on_detokenizer(Stats(world.scheduler[-1].query))  # type: ignore[attr-defined]
    values: dict[str, int] = world.answers[b"a"][-1].values
    return values


def test_requests_are_handed_in_in_the_order_of_their_arrival() -> None:
    async def test() -> None:
        world = World()
        for owner, rid in ((b"b", 3), (b"a", 2), (b"b", 1)):
            world.now += 1
            world.receive(request(rid, token_ids=ints(rid)), owner)
            await world.settle()
        forget(world)
        world.frontend.resume()
        assert [list(m.prompt) for m in world.added] == [[3], [2], [1]]

    run(test)


def test_a_request_that_is_being_tokenized_is_handed_in_once() -> None:
    async def test() -> None:
        world = World()
        world.encoder.gate = threading.Event()
        world.receive(request(text="fox"))
        await asyncio.sleep(0)
        world.frontend.resume()
        assert world.scheduler == world.detokenizer == []
        world.encoder.gate.set()
        await world.settle()
        assert len(world.added) == 1 and not world.added[0].waited_ms

    run(test)


def test_the_cached_tokens_of_a_request_are_those_of_its_first_answer() -> None:
    async def test() -> None:
        world = World()
        (rid,) = await world.choices(1)
        world.frontend.on_detokenizer(text_batch(rid, "a"))
        world.frontend.resume()
        late = text_batch(rid, "b", Finish.LENGTH)
        late.cached[0] = 3  # its own, found again
        world.frontend.on_detokenizer(late)
        assert [list(m.cached) for m in world.answers[b"a"]] == [[2], [2]]

    run(test)


@pytest.mark.parametrize("stream", [True, False])
def test_an_abort_that_nobody_will_answer_is_answered(stream: bool) -> None:
    async def test() -> None:
        world = World()
        _, second = await world.choices(2, stream=stream)
        world.now += 1
        (later,) = await world.choices(1, owner=b"b")
        world.now -= 1
        scored = Logprobs(ints(9), array("f", [-1.0]), ints(1), ints(0), ints(), array("f"))
        world.frontend.on_detokenizer(
            replace(text_batch(second, "b"), logprobs=LogprobRows.of({0: scored}), token_bytes={9: b"b"})
        )
        world.receive(Abort(5))
        forget(world)
        world.answers.clear()
        entry = world.frontend._ledger.admitted[0]
        world.frontend.resume()
        assert [m.rid for m in world.added] == [later], "who came after it goes on"
        (batch,) = world.answers[b"a"]
        text = "" if stream else "b"
        assert rows_of([batch]) == [(5, 0, "", Finish.ABORT), (5, 1, text, Finish.ABORT)]
        assert list(batch.token_ids) == ([] if stream else [9]) and list(batch.prompt_tokens) == [3, 3]
        assert batch.timings == (Timing(0, 99), Timing(1, 99, 0, 99))
        assert batch.logprobs == (None if stream else LogprobRows.of({1: scored}))
        assert {choice.finish for choice in entry.choices} == {Finish.ABORT}, "as its story will tell"
        world.receive(request())
        await world.settle()
        assert len(world.added) == 2, "the id is free again"

    run(test)


def test_the_time_lost_counts_against_the_deadline() -> None:
    async def test() -> None:
        world = World()
        world.receive(request(1, deadline_ms=20))
        world.receive(request(2, deadline_ms=50), b"b")
        await world.settle()
        forget(world)
        world.now += 30 * 10**6
        world.frontend.resume()
        assert [(m.deadline_ms, m.waited_ms) for m in world.added] == [(20, 30)]
        (error,) = world.answers[b"a"]
        assert (error.rid, error.code) == (1, ErrorCode.DEADLINE)

    run(test)


def test_questions_for_counters_are_asked_again() -> None:
    async def test() -> None:
        world = World()
        world.receive(GetStats(9))
        (asked,) = world.scheduler
        forget(world)
        world.frontend.resume()
        assert world.scheduler == [asked]
        world.frontend.restarts = {"scheduler": 1}
        assert isinstance(asked, GetStats)
        world.frontend.on_detokenizer(Stats(asked.query))
        assert world.answers[b"a"][0].values["launcher.restarts.scheduler"] == 1
        forget(world)
        world.frontend.resume()
        assert world.scheduler == []

    run(test)


def test_prompt_scores_that_have_come_are_not_computed_again() -> None:
    async def test() -> None:
        world = World()
        (rid,) = await world.choices(1, params=SamplingParams(seed=1, prompt_logprobs=0))
        score = Logprobs(ints(2), array("f", [-1.0]), ints(1), ints(0), ints(), array("f"))
        for _ in range(2):
            scored = replace(text_batch(rid, "", tokens=()), prompt_logprobs=LogprobRows.of({0: score}))
            world.frontend.on_detokenizer(replace(scored, token_bytes={2: b"b"}))
            world.frontend.resume()
        assert [(m.scored, m.generated) for m in world.added] == [(1, 0), (2, 0)]

    run(test)


def test_one_beam_is_a_greedy_search() -> None:
    async def test() -> None:
        world = World()
        await world.choices(1, params=SamplingParams(use_beam_search=True, max_tokens=3))
        world.frontend.resume()
        (whole,) = world.added
        assert (whole.max_tokens, whole.draw) == (3, DrawParams(temperature=0.0, seed=77))

    run(test)


def test_a_beam_search_takes_its_last_step_again() -> None:
    async def test() -> None:
        world = World()
        params = SamplingParams(temperature=0.0, use_beam_search=True, max_tokens=3)
        await world.choices(2, params=params)
        world.frontend.resume()
        (step,) = world.added
        assert list(step.prompt) == [1, 2, 3] and (step.max_tokens, step.waited_ms) == (1, 1)

    run(test)


def test_a_beam_search_that_has_begun_keeps_its_place_in_the_queue() -> None:
    async def test() -> None:
        world = World()
        world.now = 10**9
        params = SamplingParams(temperature=0.0, use_beam_search=True, max_tokens=3)
        world.receive(request(n=2, params=params))
        await world.settle()
        (first,) = world.added
        assert not first.waited_ms
        world.scheduler.clear()
        world.now += 70 * 10**6
        four = Logprobs(ints(5), array("f", [-1]), ints(1), ints(4), ints(5, 6, 7, 8), array("f", [-1, -2, -3, -4]))
        batch = text_batch(first.rid, "", Finish.LENGTH, (5,))
        world.frontend.on_detokenizer(replace(batch, logprobs=LogprobRows.of({0: four})))
        assert [(list(m.prompt), m.waited_ms) for m in world.added] == [([1, 2, 3, 5], 70), ([1, 2, 3, 6], 70)]
        both = TextBatch(
            ints(*(m.rid for m in world.added)), ints(0, 0), ints(1, 1), ints(5, 5), ("", ""),
            bytes([Finish.LENGTH] * 2), ints(0, 0), ints(2, 2), array("q", [1, 2]), LogprobRows.of({0: four, 1: four}),
        )  # fmt: skip
        world.scheduler.clear()
        world.frontend.on_detokenizer(both)
        assert [list(m.prompt) for m in world.added] == [[1, 2, 3, 5, 5], [1, 2, 3, 5, 6]], "of both beams"

    run(test)


def test_a_beam_search_ends_at_its_deadline() -> None:
    async def test() -> None:
        world = World()
        params = SamplingParams(temperature=0.0, use_beam_search=True, max_tokens=3)
        world.receive(request(n=2, params=params, deadline_ms=5))
        await world.settle()
        (first,) = world.added
        world.now += 5 * 10**6
        four = Logprobs(ints(5), array("f", [-1]), ints(1), ints(4), ints(5, 6, 7, 8), array("f", [-1, -2, -3, -4]))
        batch = text_batch(first.rid, "", Finish.LENGTH, (5,))
        world.frontend.on_detokenizer(replace(batch, logprobs=LogprobRows.of({0: four})))
        assert [(m.rid, m.code) for m in world.answers[b"a"]] == [(5, ErrorCode.DEADLINE)]

    run(test)


def test_draining_refuses_what_is_new_and_waits_for_what_is_there() -> None:
    async def test() -> None:
        world = World()
        (rid,) = await world.choices(1)
        assert not world.frontend.drained
        world.frontend.drain()
        world.receive(request(6))
        (refused,) = world.answers[b"a"]
        assert (refused.rid, refused.code) == (6, ErrorCode.SHUTTING_DOWN)
        assert not world.frontend.drained
        world.frontend.on_detokenizer(text_batch(rid, "a", Finish.LENGTH))
        assert rows_of(world.answers[b"a"][1:]) == [(5, 0, "a", Finish.LENGTH)]
        assert world.frontend.drained and not World().frontend.drained
        world.state[b"a"] = Sent.FULL
        world.receive(request(7))
        assert not world.frontend.drained, "somebody has not been told yet"
        world.state[b"a"] = Sent.YES
        world.frontend.flush()
        assert world.frontend.drained

    run(test)


@settings(max_examples=examples(200))
@given(
    st.lists(st.integers(1, 250), min_size=1, max_size=24),
    st.lists(st.sampled_from(["ab", "e", "\ufffd", "zz"]), max_size=2),
    st.lists(st.tuples(st.integers(0, 24), st.integers(0, 24)), max_size=4),
    st.booleans(),
)
def test_text_is_as_if_nothing_had_been_lost(
    tokens: list[int], stop: list[str], losses: list[tuple[int, int]], stream: bool
) -> None:
    """Detokenizer and scheduler are lost, with rows on their way between them and to the tokenizer; any bytes as text,
    cut anywhere; also with stop strings, which hold text back."""
    tokens = [token % 250 + 1 for token in tokens]
    params = SamplingParams(temperature=0.0, max_tokens=len(tokens), stop=tuple(stop), ignore_eos=True)

    def answer(world: World) -> tuple[str, list[int], list[int]]:
        rows = [m for m in world.answers.get(b"a", []) if isinstance(m, TextBatch)]
        assert not any(isinstance(m, RequestError) for m in world.answers.get(b"a", []))
        text = "".join(text for m in rows for text in m.texts)
        return text, [t for m in rows for t in m.token_ids], [f for m in rows for f in m.finish if f]

    async def play(cuts: list[tuple[int, int]]) -> tuple[str, list[int], list[int]]:
        world = World()
        world.receive(request(params=params, stream=stream))
        await world.settle()
        for computed, arrived in [*cuts, (len(tokens), len(tokens))]:  # `arrived` of them reach the tokenizer
            streams = Streams(decoders(), lambda _: b"")
            opened, added = world.detokenizer[-1], world.scheduler[-1]
            if not isinstance(added, AddRequest):
                break  # a stop string has ended it, and the abort is on its way
            assert isinstance(opened, OpenStream)
            done = added.generated
            assert list(added.prompt) == [1, 2, 3, *tokens[:done]] and list(opened.emitted) == tokens[:done]
            assert streams.open(opened) is None
            for number in range(done, min(computed, len(tokens))):
                finish = Finish.LENGTH if number + 1 == len(tokens) else Finish.NONE
                batch = TokenBatch(
                    ints(added.rid), ints(1), ints(tokens[number]), bytes([finish]), ints(0), array("q", [1, 2])
                )
                out = streams.push(batch, 3)
                if out is not None and number < arrived:
                    world.frontend.on_detokenizer(out)
            forget(world)
            if world.frontend._ledger.choices == 0:
                break
            world.frontend.resume()
        return answer(world)

    async def test() -> None:
        assert await play(losses) == await play([])

    run(test)


def test_the_seed_of_a_request_without_one_is_kept() -> None:
    async def test() -> None:
        world = World()
        (rid,) = await world.choices(1, params=SamplingParams(temperature=1.0))
        world.frontend.resume()
        (again,) = world.added
        assert (again.rid, again.draw.seed) == (rid, 77)

    run(test)


def test_what_the_detokenizer_said_and_cannot_be_read_ends_its_requests() -> None:
    async def test() -> None:
        world = World()
        (rid,) = await world.choices(1)
        world.frontend.on_lost(Lost("detokenizer", "a frame of it cannot be read", (rid, 12345)))
        (error,) = world.answers[b"a"]
        assert (error.rid, error.code) == (5, ErrorCode.INTERNAL) and "lost" in error.problem
        assert world.scheduler == [Abort(rid)]
        world.frontend.resume()
        assert not world.added, "the others go on, this one has ended"

    run(test)


def test_an_error_of_the_detokenizer_ends_the_request_in_the_scheduler_too() -> None:
    async def test() -> None:
        world = World()
        (rid,) = await world.choices(1)
        world.frontend.on_detokenizer(RequestError(rid, ErrorCode.INTERNAL, "lost"))
        assert world.scheduler == [Abort(rid)]

    run(test)
