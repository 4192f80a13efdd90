"""Workloads of the simulator: generated ones, traces, and clear errors."""

import random
from array import array

import pytest

from scheduler_proc.trace import read_trace
from scheduler_proc.workload import Lengths, Recipe, Text, Traffic, Vocabulary, WorkloadError, generate
from tests.unit.simulator_runs import TRACE, VOCABULARY, fixed, run


def test_a_shorter_text_is_a_prefix_of_the_longer_one():
    assert VOCABULARY.tokens(Text(5, 100))[:40] == VOCABULARY.tokens(Text(5, 40))
    assert VOCABULARY.tokens(Text(5, 1)) != VOCABULARY.tokens(Text(6, 1))
    tokens = Vocabulary(16, 100).tokens(Text(7, 1000))
    assert min(tokens) >= 16 and max(tokens) < 116


def test_a_prompt_is_the_history_and_the_new_text():
    workload = generate(Recipe("chat", 2, fixed(5), fixed(3), turns=2, prefix_tokens=4, concurrency=1, think_s=1.0))
    traffic = Traffic(workload, VOCABULARY)
    (first,) = traffic.due(0)
    assert len(first.prompt) == 9
    assert traffic.next_due is None and not traffic.done
    traffic.ended(first.number, array("i", [7, 8, 9]), 50)
    assert traffic.next_due == 50 + 10**9
    assert traffic.due(51) == []
    (second,) = traffic.due(50 + 10**9)
    own = workload.sessions[0].turns[1].own[0]
    assert second.prompt == first.prompt + array("i", [7, 8, 9]) + VOCABULARY.tokens(own)
    traffic.ended(second.number, [], 0)
    assert traffic.done


@pytest.mark.parametrize("text", ["", "0", "x", "uniform:5", "uniform:9:3", "lognormal:10:9", "normal:1:2", "1:2"])
def test_lengths_that_are_none(text):
    with pytest.raises(WorkloadError, match="lengths"):
        Lengths.parse(text)


def test_lengths():
    rng = random.Random(0)
    draws = [Lengths.parse("lognormal:100:0.5").draw(rng) for _ in range(2001)]
    assert sorted(draws)[1000] == pytest.approx(100, rel=0.05)
    assert {Lengths.parse("uniform:3:5").draw(rng) for _ in range(100)} == {3, 4, 5}
    assert Lengths.parse("7").draw(rng) == 7


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"requests": 0}, "requests"),
        ({"rate": 0.0}, "rate"),
        ({"rate": 1.0, "concurrency": 1}, "rate"),
        ({"turns": 0}, "turns"),
    ],
)
def test_recipes_that_are_wrong(change, field):
    with pytest.raises(WorkloadError, match=f"^{field} must be"):
        Recipe(**change)


def test_a_trace_runs_as_it_says():
    workload = read_trace(TRACE.splitlines())
    report = run(workload).report
    assert report.finished == 4
    assert report.prompt_tokens == 50 + 60 + 90 + 50
    # the first line finds the second's prefix, the third its session, the last is alone in its namespace
    assert report.cached_tokens == 40 + 64
    assert report.duration_s > 9


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: must be an object"),
        ('{"arrival_s": 1, "prompt_tokens": 5}', "line 2: output_tokens: is missing"),
        ('{"arrival_s": -1, "prompt_tokens": 5, "output_tokens": 5}', "line 2: arrival_s: must be a number"),
        ('{"arrival_s": 1, "prompt_tokens": 5.5, "output_tokens": 5}', "line 2: prompt_tokens: must be an integer"),
        ('{"arrival_s": 1, "prompt_tokens": 5, "output_tokens": true}', "line 2: output_tokens: must be an integer"),
        ('{"arrival_s": 1, "prompt_tokens": 5, "output_tokens": 5, "x": 1}', "line 2: x: no such field"),
        ('{"arrival_s": 1, "prompt_tokens": 5, "output_tokens": 5, "salt": 1}', "line 2: salt: must be a string"),
        ('{"arrival_s": 1, "prompt_tokens": 5, "output_tokens": 5, "prefix_tokens": 1}', "line 2: prefix_group: goes"),
        (
            '{"arrival_s": 1, "prompt_tokens": 5, "output_tokens": 5, "prefix_tokens": 9, "prefix_group": 1}',
            "line 2: prefix_tokens: must be at most prompt_tokens",
        ),
        ('{"arrival_s": 1, "prompt_tokens": 5, "output_tokens": 5, "max_tokens": 4}', "line 2: max_tokens: must be"),
        ('{"arrival_s": 1, "prompt_tokens": 15, "output_tokens": 5, "session": 1}', "line 2: prompt_tokens: must be"),
        (
            '{"arrival_s": 1, "prompt_tokens": 99, "output_tokens": 5, "session": 1, "priority": 2}',
            "line 2: priority: must be as in the first line",
        ),
    ],
)
def test_trace_errors_name_line_and_field(line, problem):
    good = '{"arrival_s": 0, "prompt_tokens": 10, "output_tokens": 5, "session": 1}'
    with pytest.raises(WorkloadError) as error:
        read_trace([good, line])
    assert str(error.value).startswith(problem)
