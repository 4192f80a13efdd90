"""Several choices that want the log probabilities of their prompt: the first one has it scored, the others share it."""

from array import array
from typing import Any

import pytest

from common.logprobs import LogprobRows, Logprobs
from common.messages import Abort, ErrorCode, Finish, OpenStream, RequestError, TextBatch, ints
from common.rows import Row, RowReader
from common.sampling_params import SamplingParams
from tests.unit.frontend_world import World, request, run, text_batch
from tokenizer_proc.ledger import Owner

PROMPT = ints(5, 6, 7, 8)
OWNER: Owner = b"a"


def asked(**more: Any) -> Any:
    params = SamplingParams(temperature=0.0, seed=3, max_tokens=4, prompt_logprobs=1, **more.pop("sampling", {}))
    return request(params=params, token_ids=PROMPT, **{"n": 3, **more})


def scores(rid: int, *targets: int, tokens: tuple[int, ...] = (), finish: Finish = Finish.NONE) -> TextBatch:
    """A row of the detokenizer with what prompt tokens predict."""
    entries = Logprobs(ints(*targets), array("f", [-0.5] * len(targets)), ints(*[1] * len(targets)),
                       ints(*[1] * len(targets)), ints(*targets), array("f", [-0.5] * len(targets)))  # fmt: skip
    return TextBatch(
        ints(rid), ints(0), ints(len(tokens)), ints(*tokens), ("t" * len(tokens),), bytes([finish]), ints(0), ints(2),
        array("q", [1, 2]), None, LogprobRows.of({0: entries}), {t: b"%d" % t for t in targets},
    )  # fmt: skip


def told(world: World) -> list[Row]:
    """All rows that the client has, as its connection shows them."""
    reader = RowReader()
    return [
        row
        for m in world.answers.get(OWNER, [])
        if isinstance(m, TextBatch)
        for row in reader.rows(m, 0, lambda *_: True)
    ]


def shown(row: Row) -> list[tuple[int, bytes] | None] | None:
    if row.prompt_logprobs is None:
        return None
    return [None if entry is None else (entry.token_id, entry.token) for entry in row.prompt_logprobs]


WHOLE = [None, (6, b"6"), (7, b"7"), (8, b"8")]


@pytest.mark.parametrize("stream", [True, False])
def test_the_others_begin_when_the_first_is_scored_and_get_its_scores(stream: bool) -> None:
    async def test() -> None:
        world = World()
        world.receive(asked(stream=stream))
        await world.settle()
        (first,) = world.added
        assert first.draw.prompt_logprobs == 1 and len(world.detokenizer) == 1
        world.frontend.on_detokenizer(scores(first.rid, 6, 7))
        assert len(world.added) == 1
        world.frontend.on_detokenizer(scores(first.rid, 8, tokens=(9,)))
        others = world.added[1:]
        assert [m.draw.seed for m in others] == [4, 5] and all(m.waited_ms for m in others)
        assert all(m.draw.prompt_logprobs is None and m.prompt == PROMPT and not m.scored for m in others)
        assert [m.rid for m in world.detokenizer if isinstance(m, OpenStream)] == [m.rid for m in world.added]
        for rid in [m.rid for m in reversed(others)] + [first.rid]:
            if rid != first.rid:
                world.frontend.on_detokenizer(text_batch(rid, "a"))
            world.frontend.on_detokenizer(text_batch(rid, "b", Finish.LENGTH))
        found: dict[int, list[Any]] = {}
        for row in told(world):
            found.setdefault(row.choice, []).append(shown(row))
        assert found == {choice: [WHOLE, None] if stream else [WHOLE] for choice in (0, 1, 2)}

    run(test)


def test_a_first_answer_of_one_token_ends_when_the_others_begin() -> None:
    async def test() -> None:
        world = World()
        world.receive(asked())
        await world.settle()
        world.frontend.on_detokenizer(scores(world.added[0].rid, 6, 7, 8, tokens=(9,), finish=Finish.LENGTH))
        for added in world.added[1:]:
            world.frontend.on_detokenizer(text_batch(added.rid, "b", Finish.LENGTH))
        assert [(row.choice, shown(row)) for row in told(world)] == [(0, WHOLE), (1, WHOLE), (2, WHOLE)]
        assert not world.frontend.measures.flat()["tokenizer.errors_internal"] and len(world.added) == 3

    run(test)


def test_an_abort_before_that_ends_all_choices_at_once() -> None:
    async def test() -> None:
        world = World()
        world.receive(asked())
        await world.settle()
        world.frontend.on_detokenizer(scores(world.added[0].rid, 6))
        world.receive(Abort(5))
        rows = told(world)
        assert [(row.choice, row.finish) for row in rows] == [(choice, Finish.ABORT) for choice in (0, 1, 2)]
        assert Abort(world.added[0].rid) in world.scheduler
        world.frontend.on_detokenizer(scores(world.added[0].rid, 7, 8))  # on its way
        assert len(world.added) == 1

    run(test)


def test_after_a_loss_the_first_goes_on_alone_and_those_that_have_begun_all() -> None:
    async def test() -> None:
        world = World()
        world.receive(asked())
        await world.settle()
        first = world.added[0]
        world.frontend.on_detokenizer(scores(first.rid, 6))
        world.scheduler.clear()
        world.frontend.resume()
        (again,) = world.added
        assert (again.rid, again.scored) == (first.rid, 1)
        world.frontend.on_detokenizer(scores(first.rid, 7, 8, tokens=(9,)))
        second = world.added[1]
        world.frontend.on_detokenizer(text_batch(second.rid, "a"))
        world.scheduler.clear()
        world.frontend.resume()
        assert [(m.draw.seed, m.scored, m.generated) for m in world.added] == [(3, 3, 1), (4, 0, 1), (5, 0, 0)]
        for added in world.added:
            world.frontend.on_detokenizer(text_batch(added.rid, "b", Finish.LENGTH))
        assert [(row.choice, shown(row)) for row in told(world)] == [
            (0, WHOLE), (1, WHOLE), (0, None), (1, None), (2, WHOLE),
        ]  # fmt: skip

    run(test)


def test_a_deadline_that_passes_meanwhile() -> None:
    async def test() -> None:
        world = World()
        world.receive(asked(deadline_ms=5))
        await world.settle()
        world.now += 6 * 10**6
        world.frontend.on_detokenizer(scores(world.added[0].rid, 6, 7, 8, tokens=(9,)))
        (error,) = world.answers[OWNER]
        assert isinstance(error, RequestError) and error.code == ErrorCode.DEADLINE
        assert len(world.added) == 1

    run(test)


@pytest.mark.parametrize(("start", "scored"), [(0, 0), (1, 0), (2, 1), (3, 2), (4, 3), (99, 3)])
def test_what_is_not_asked_for_is_not_scored(start: int, scored: int) -> None:
    """The prediction of a token is that of the one before it."""

    async def test() -> None:
        world = World()
        world.receive(asked(n=1, sampling={"prompt_logprobs_start": start}))
        await world.settle()
        assert [m.scored for m in world.added] == [scored]
        world.receive(asked(rid=6, sampling={"prompt_logprobs_start": start}))
        await world.settle()
        assert len(world.added) == (2 if scored < 3 else 4), "where nothing is scored, nobody waits"
        if scored < 3:
            world.frontend.on_detokenizer(scores(world.added[1].rid, *PROMPT[scored + 1 :], tokens=(9,)))
            assert len(world.added) == 4

    run(test)
