"""Speculation by prompt lookup: when it pays, and that it is off when it does not, in simulated time."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import SchedulerConfig
from scheduler_proc.cost_model import CostModel, LinearCost, Overheads, StepWork
from scheduler_proc.kv_manager import KVManager
from scheduler_proc.scheduler import Scheduler
from scheduler_proc.simulation import Simulation
from scheduler_proc.speculation_gain import Gaps, Prospect, StepCurve, choose
from scheduler_proc.workload import Lengths, Recipe, Traffic, Vocabulary, generate

# A step that reads weights, then computes: the first tokens are nearly free, from 32 on they cost a third of a step.
CHEAP = LinearCost(base_s=60e-3, per_token_s=0.2e-3, per_token_over_32_s=0.6e-3)
DEAR = LinearCost(base_s=2e-3, per_token_s=2e-3)  # guesses cost as much as what they save
SMALL = LinearCost(base_s=0.5e-3, per_token_s=0.02e-3)  # a model whose steps are as short as the way of a plan
OVERHEADS = Overheads(plan_s=0.3e-3, result_s=0.2e-3, commit_s=0.1e-3)


@dataclass(frozen=True)
class Noisy(Vocabulary):
    """Answers that repeat every 30 tokens, but for those that are drawn at random, which are `noise` of them."""

    noise: float = 0.0

    @cache  # noqa: B019 - of the same vocabulary, costs of three kinds ask with and without guesses
    def answer(self, request: int, position: int) -> int:
        rng = random.Random(f"{request} {position}")
        if rng.random() < self.noise:
            return self.first + rng.randrange(self.size)
        return self.first + random.Random(f"{request} {position % 30}").randrange(self.size)


class HeldUp:
    """The first step with guesses takes fifty times as long as it should."""

    def __init__(self, cost: LinearCost):
        self._cost = cost
        self._over = False

    def seconds(self, work: StepWork) -> float:
        held_up = not self._over and work.rows < work.tokens < 60
        self._over |= held_up
        return self._cost.seconds(work) * (50 if held_up else 1)


def run(
    vocabulary: Vocabulary, cost: CostModel, requests: int = 4, rounds: int = 1, **config: object
) -> tuple[float, list, dict]:
    """Seconds until all have ended, all answers, and what was counted. So many requests at once, `rounds` times."""
    recipe = Recipe("random", requests * rounds, Lengths("fixed", 60), Lengths("fixed", 300), concurrency=requests)
    workload = generate(recipe)
    kv = KVManager(30 * requests, 16)  # more than they fill: every page is looked at by the checks
    scheduler = Scheduler(SchedulerConfig(**config), kv, 1000)  # type: ignore[arg-type]
    traffic = Traffic(workload, vocabulary)
    simulation = Simulation(scheduler, traffic, vocabulary, cost, OVERHEADS, check_every=5)
    simulation.run()
    records = simulation.records.values()
    return max(r.last for r in records) / 1e9, [list(r.answer) for r in records], scheduler.stats()


def compare(vocabulary: Vocabulary, cost: LinearCost, **config: object) -> tuple[float, dict]:
    """How many times as fast with speculation, and what was counted then."""
    off, expected, none = run(vocabulary, cost, **config)
    on, answers, stats = run(vocabulary, cost, speculation="ngram", **config)
    assert answers == expected
    assert none["drafts"] == 0
    return off / on, stats


@pytest.mark.parametrize("cost", [CHEAP, SMALL])
@pytest.mark.parametrize("requests", [1, 8, 32])
def test_repeated_text_is_faster(cost: LinearCost, requests: int) -> None:
    ratio, stats = compare(Noisy(size=50000), cost, requests=requests)
    # guesses for one are nearly free, for 32 the processor computes four times as much
    assert ratio > {1: 2.5, 8: 1.8, 32: 1.25}[requests]
    assert stats["accepted_tokens"] > 0.9 * stats["draft_tokens"]


@pytest.mark.soak
@pytest.mark.parametrize("cost", [CHEAP, DEAR, SMALL])
@pytest.mark.parametrize("requests", [1, 8, 32])
@pytest.mark.parametrize("noise", [1.0, 0.6, 0.3, 0.1])
@pytest.mark.parametrize("size", [3, 50000])
def test_it_is_never_slower_than_off(cost: LinearCost, requests: int, noise: float, size: int) -> None:
    """From guesses that are never right to those that often are, and where they are cheap and where they are dear."""
    ratio, _ = compare(Noisy(size=size, noise=noise), cost, requests=requests)
    assert ratio > 0.97


@pytest.mark.parametrize("cost", [CHEAP, SMALL])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_guesses_that_were_held_up_once_are_tried_again(cost: LinearCost, in_flight: int) -> None:
    vocabulary = Noisy(size=50000)
    off, _, _ = run(vocabulary, cost, 1, rounds=10, steps_in_flight=in_flight)
    on, _, stats = run(vocabulary, HeldUp(cost), 1, rounds=10, speculation="ngram", steps_in_flight=in_flight)
    assert stats["drafts"] > 100 and off / on > 1.4


@pytest.mark.parametrize("cost", [DEAR, SMALL])
@pytest.mark.parametrize("requests", [1, pytest.param(8, marks=pytest.mark.soak)])
def test_trying_again_costs_little(cost: LinearCost, requests: int) -> None:
    vocabulary = Noisy(size=3, noise=0.6)
    off, _, _ = run(vocabulary, cost, requests, rounds=10)
    on, _, _ = run(vocabulary, cost, requests, rounds=10, speculation="ngram")
    assert off / on > 0.97


@pytest.mark.parametrize("in_flight", [1, 2])
def test_text_without_repetition_costs_no_guesses(in_flight: int) -> None:
    ratio, stats = compare(Noisy(size=50000, noise=1.0), SMALL, steps_in_flight=in_flight)
    assert stats["draft_tokens"] == 0 and ratio == pytest.approx(1, abs=0.01)


def test_guesses_that_are_dear_are_not_made() -> None:
    _, stats = compare(Noisy(size=3, noise=0.9), DEAR)
    assert stats["draft_tokens"] < 0.1 * stats["output_tokens"]


def test_likely_guesses_go_first() -> None:
    prospects = [Prospect(0.9, 4), Prospect(0.3, 4), Prospect(0.9, 4, unseen=1)]
    free = choose(prospects, 3, 100, lambda tokens: 1.0, gap_ahead=0.0, gap_after=0.0)
    assert free.counts == [4, 4, 4]
    assert free.gain == pytest.approx((3 + sum(0.9**j + 0.3**j + 0.9 ** (j + 1) for j in range(1, 5))) / 3)
    assert choose(prospects, 3, 5, lambda tokens: 1.0, gap_ahead=0.0, gap_after=0.0).counts == [3, 0, 2]
    dear = choose(prospects, 3, 100, lambda tokens: tokens / 3, gap_ahead=0.0, gap_after=0.0)
    assert dear.gain < 1
    assert choose(prospects[1:2], 1, 100, lambda tokens: 1.0, gap_ahead=0.0, gap_after=0.5).gain < 1


@st.composite
def steps_with_guesses(draw: st.DrawFn) -> tuple[list[Prospect], int, int, list[float], float, float, float]:
    """Up to 7 guesses in all, room for some of them, and what steps and pauses take."""
    chances = st.floats(0.01, 0.98)
    prospects = draw(
        st.lists(st.builds(Prospect, chances, st.integers(1, 2), st.integers(0, 1)), min_size=1, max_size=3)
    )
    rows = len(prospects) + draw(st.integers(0, 4))
    times = sorted(draw(st.lists(st.floats(0.01, 1.0), min_size=rows + 8, max_size=rows + 8)))
    pauses = st.floats(0.0, 0.5)
    return prospects, rows, draw(st.integers(1, 7)), times, draw(pauses), draw(pauses), draw(st.floats(0.1, 1.0))


@given(steps_with_guesses())
def test_no_other_guesses_give_more(drawn: tuple[list[Prospect], int, int, list[float], float, float, float]) -> None:
    """Of all ways to share the room out, tried one by one."""
    prospects, rows, room, times, ahead, after, luck = drawn
    plain = rows / (times[rows] + ahead)

    def right(counts: Sequence[int]) -> float:
        pairs = zip(prospects, counts, strict=True)
        return sum(p.chance ** (depth + p.unseen) for p, count in pairs for depth in range(1, count + 1))

    def gain(counts: Sequence[int]) -> float:
        return (rows + luck * right(counts)) / (times[rows + sum(counts)] + after) / plain

    choice = choose(prospects, rows, room, times.__getitem__, gap_ahead=ahead, gap_after=after, luck=luck)
    others = [counts for counts in product(*(range(p.most + 1) for p in prospects)) if 0 < sum(counts) <= room]
    assert choice.gain == pytest.approx(max(map(gain, others))) == pytest.approx(gain(choice.counts))
    assert choice.right == pytest.approx(right(choice.counts))


def test_guesses_that_bring_nothing_are_not_made() -> None:
    prospects = [Prospect(0.5, 2), Prospect(0.0, 2)]
    choice = choose(prospects, 2, 9, lambda tokens: 1.0, gap_ahead=0.0, gap_after=0.0)
    assert choice.counts == [2, 0]


def test_the_time_of_a_step_is_what_was_measured() -> None:
    curve = StepCurve()
    assert curve.most == 0
    for tokens, seconds in ((1, 1.0), (16, 2.0), (64, 5.0)):
        for _ in range(5):
            curve.learn(tokens, seconds)
    assert [curve.seconds(n) for n in (1, 16, 64)] == pytest.approx([1, 2, 5])
    assert curve.seconds(40) == pytest.approx(3.5)
    assert curve.most == 64
    assert curve.seconds(1000) == pytest.approx(5)  # never tried
    curve.learn(1, 100.0)  # held up
    assert curve.seconds(1) < 1.2
    for _ in range(100):
        curve.learn(1, 1.0)
    for _ in range(30):
        curve.learn(1, 1.4)
    assert curve.seconds(1) == pytest.approx(1.4, rel=0.01), "what is new counts most, however much came before"


def test_times_are_known_by_half_octave_and_forgotten_above_what_runs() -> None:
    curve = StepCurve()
    for tokens, seconds in ((16, 1.0), (20, 2.0), (90, 3.0), (128, -1.0)):
        curve.learn(tokens, seconds)
    assert [curve.seconds(tokens) for tokens in (1, 16, 20, 90)] == [1.0, 1.0, 2.0, 3.0]
    assert curve.seconds(128) > 0, "a clock that steps back is no division by zero"
    curve.forget(20)
    assert (curve.most, curve.seconds(90)) == (20, 2.0)


def test_pauses_of_the_worker() -> None:
    gaps = Gaps()
    for _ in range(50):
        gaps.learn_way(1e-3)
        gaps.learn(2e-3, ahead=True)
    assert gaps.ahead == pytest.approx(2e-3)
    assert gaps.after == pytest.approx(4e-3, rel=0.01)  # twice the way, as long as none was measured
    gaps.learn(7e-3, ahead=False)
    assert gaps.after == pytest.approx(7e-3)
    gaps.learn(10.0, ahead=False)  # held up
    assert gaps.after < 8e-3
    gaps.learn_way(10.0)
    gaps.forget_after()
    assert gaps.after == pytest.approx(4e-3, rel=0.2), "guessed anew"
    early = Gaps()
    early.learn(-1.0, ahead=True)
    assert early.ahead == 0
