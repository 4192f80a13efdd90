"""The parts of the serving benchmark that do no I/O: workloads, arrivals, traces, metrics."""

import itertools
import json
import random
import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client_cli import bench_load as load
from client_cli.bench_load import Length, LoadError, Tokens
from client_cli.bench_metrics import Record, SloError, meets, parse_slos, percentile, spread, summarize
from client_cli.bench_report import title
from client_cli.bench_trace import BLOCK, read_trace

MS = 1_000_000


def tokens(seed: int = 1, vocabulary: int = 500) -> Tokens:
    return Tokens(vocabulary, random.Random(seed))


# ---- workloads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "low", "high"), [("5", 5, 5), ("5:9", 5, 9)])
def test_lengths(text: str, low: int, high: int) -> None:
    length = Length.parse(text, "--input-len")
    assert (length.low, length.high) == (low, high)
    assert {length.draw(random.Random(s)) for s in range(100)} == set(range(low, high + 1))


@pytest.mark.parametrize("text", ["", "x", "0", "-3", "9:5", "1:2:3", "5:", "9999999999"])
def test_wrong_lengths(text: str) -> None:
    if text == "5:":
        assert Length.parse(text, "--input-len") == Length(5, 5)
        return
    with pytest.raises(LoadError, match="length"):
        Length.parse(text, "--input-len")


@given(st.integers(1, 40), st.integers(0, 2**32), st.integers(2, 60))
def test_random_prompts_have_exact_lengths_and_ids_of_the_vocabulary(count: int, seed: int, vocabulary: int) -> None:
    found = load.single(count, Length(3, 9), Length(2, 4), tokens(seed, vocabulary))
    assert len(found) == count
    for conversation in found:
        (turn,) = conversation.turns
        assert 3 <= len(turn.tokens) <= 9 and 2 <= turn.output_len <= 4
        assert all(0 <= token < vocabulary for token in turn.tokens)
    assert found == load.single(count, Length(3, 9), Length(2, 4), tokens(seed, vocabulary))


def test_shared_prefixes_take_turns() -> None:
    found = load.shared_prefix(9, Length(4, 4), Length(1, 1), tokens(), groups=3, prefix_len=10)
    prompts = [c.turns[0].tokens for c in found]
    assert all(len(prompt) == 14 for prompt in prompts)
    assert len({prompt[:10] for prompt in prompts}) == 3 and len({prompt[10:] for prompt in prompts}) == 9
    assert [prompt[:10] for prompt in prompts[:3]] == [prompt[:10] for prompt in prompts[3:6]]


def test_conversations_have_turns_and_a_common_prefix() -> None:
    found = load.multi_turn(10, Length(4, 4), Length(1, 1), tokens(), turns=4, prefix_len=6)
    assert [len(c.turns) for c in found] == [4, 4, 2]
    assert [len(turn.tokens) for turn in found[0].turns] == [10, 4, 4, 4]
    assert len({c.turns[0].tokens[:6] for c in found}) == 1


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness: float) -> None:
    times = list(load.arrivals(20_000, 50.0, burstiness, random.Random(1)))
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert times[0] == 0 and min(gaps) >= 0
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.03)
    # a gamma distribution of shape k has a coefficient of variation of 1 / sqrt(k)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.05)


def test_times_are_given_to_first_turns() -> None:
    found = load.at_times(load.multi_turn(4, Length(1, 1), Length(1, 1), tokens(), 2, 0), iter([0.5, 2.0]))
    assert [[turn.at_s for turn in c.turns] for c in found] == [[0.5, 0.0], [2.0, 0.0]]


def test_words_differ_where_tokens_do() -> None:
    text = load.text_of([1, 2, 3, 1])
    words = text.split()
    assert text.startswith(" ") and len(words) == 4 and words[0] == words[3] and len(set(words)) == 3
    assert len(set(load.WORDS)) == len(load.WORDS)


# ---- traces --------------------------------------------------------------------------------------------------------


def trace(*rows: Any) -> list[Any]:
    return [row if isinstance(row, str) else json.dumps(row) for row in rows]


def test_a_trace_of_the_simulator() -> None:
    rows = trace(
        {"arrival_s": 3, "prompt_tokens": 9, "output_tokens": 2, "prefix_group": "g", "prefix_tokens": 5},
        {"arrival_s": 1, "prompt_tokens": 8, "output_tokens": 3, "prefix_group": "g", "prefix_tokens": 5},
        "",
        {"arrival_s": 0.5, "prompt_tokens": 4, "output_tokens": 2, "session": "s"},
        {"arrival_s": 0.7, "prompt_tokens": 10, "output_tokens": 1, "session": "s"},
    )
    session, second, first = read_trace(rows, tokens())
    assert first.turns[0].tokens[:5] == second.turns[0].tokens[:5]
    assert (len(first.turns[0].tokens), len(second.turns[0].tokens)) == (9, 8)
    assert [(t.at_s, len(t.tokens), t.output_len) for t in session.turns] == [(0.5, 4, 2), (0.7, 4, 1)]


def test_a_mooncake_trace() -> None:
    rows = trace(
        {"timestamp": 1500, "input_length": BLOCK + 10, "output_length": 7, "hash_ids": [1, 2]},
        {"timestamp": 0, "input_length": 2 * BLOCK, "output_length": 7, "hash_ids": [1, 3]},
        {"timestamp": 2000, "input_length": 20, "output_length": 7},
    )
    a, b, c = read_trace(rows, tokens())
    assert [x.start_s for x in (a, b, c)] == [0.0, 1.5, 2.0]
    assert [len(x.turns[0].tokens) for x in (a, b, c)] == [2 * BLOCK, BLOCK + 10, 20]
    assert a.turns[0].tokens[:BLOCK] == b.turns[0].tokens[:BLOCK]
    assert a.turns[0].tokens[BLOCK:][:10] != b.turns[0].tokens[BLOCK:]


GOOD = {"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 1}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "not JSON"),
        ("[1]", "must be an object"),
        ({"arrival_s": 0, "prompt_tokens": 5}, "output_tokens: is missing"),
        (GOOD | {"x": 1}, "x: is not known"),
        (GOOD | {"priority": 1}, "priority: a benchmark cannot follow it"),
        (GOOD | {"prompt_tokens": 0}, "prompt_tokens: must be an integer from 1"),
        (GOOD | {"output_tokens": 1.5}, "output_tokens: must be an integer"),
        (GOOD | {"arrival_s": "now"}, "arrival_s: must be a number"),
        (GOOD | {"prefix_group": 1}, "prefix_group: goes together"),
        (GOOD | {"prefix_group": [1], "prefix_tokens": 1}, "prefix_group: must be a string or an integer"),
        (GOOD | {"session": [1]}, "session: must be a string or an integer"),
        (GOOD | {"prefix_group": 1, "prefix_tokens": 6}, "prefix_tokens: must be at most"),
        ({"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": ["a"]}, "hash_ids: must be a list"),
        ({"timestamp": 0, "input_length": 5}, "output_length: is missing"),
    ],
)
def test_a_wrong_trace_is_refused_by_line_and_field(row: Any, said: str) -> None:
    with pytest.raises(LoadError) as caught:
        read_trace(trace(GOOD, row), tokens())
    assert "line 2: " in str(caught.value) and said in str(caught.value)


def test_other_wrong_traces() -> None:
    with pytest.raises(LoadError, match="empty"):
        read_trace(["", "\n"], tokens())
    turn = GOOD | {"session": 1}
    later = {
        "arrival_s": 1,
        "prompt_tokens": 9,
        "output_tokens": 1,
        "prefix_group": 1,
        "prefix_tokens": 1,
        "session": 1,
    }
    with pytest.raises(LoadError, match="line 2: prefix_group: only the first line of a session may have one"):
        read_trace(trace(turn, later), tokens())
    with pytest.raises(LoadError, match="line 2: prompt_tokens: must be more than the 6 tokens"):
        read_trace(trace(turn, turn | {"prompt_tokens": 6}), tokens())


# ---- metrics -------------------------------------------------------------------------------------------------------


def record(arrivals_ms: list[float], *, output: int | None = None, error: str | None = None) -> Record:
    found = Record(0, 10 * MS, output if output is not None else len(arrivals_ms))
    for at in arrivals_ms:
        found.arrived(int((10 + at) * MS))
    found.output_tokens = len(arrivals_ms) if output is None else output
    found.prompt_tokens, found.error = 100, error
    return found


def test_times_of_a_request() -> None:
    found = record([30, 40, 60])
    assert (found.ttft, found.itl, found.tpot, found.e2e) == (30, 15, 15, 60)
    assert found.gaps_ns == [10 * MS, 20 * MS]
    several_at_once = record([30, 60], output=7)
    assert (several_at_once.tpot, several_at_once.itl) == (5, 30)
    one = record([30])
    assert (one.ttft, one.tpot, one.itl, one.e2e) == (30, None, None, 30)
    none = record([])
    assert none.ttft is none.e2e is None


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentiles_lie_between_their_neighbours(values: list[float], percent: float) -> None:
    ordered = sorted(values)
    found = percentile(ordered, percent)
    at = (len(ordered) - 1) * percent / 100
    assert ordered[int(at)] <= found <= ordered[min(int(at) + 1, len(ordered) - 1)] * (1 + 1e-9)


def test_percentiles_are_interpolated() -> None:
    assert [percentile([1, 2, 3, 4, 5], p) for p in (0, 50, 90, 100)] == pytest.approx([1, 3, 4.6, 5])
    assert spread([]) is None
    assert spread([2, 1, 3]) == pytest.approx({"mean": 2, "p50": 2, "p90": 2.8, "p99": 2.98, "max": 3})


def test_a_summary() -> None:
    records = [record([30, 40, 60]), record([80, 90]), record([5], error="HTTP 500: broken")]
    summary = summarize(records, 4, {"ttft": 50, "tpot": 20}, duration_s=2.0)
    assert (summary["completed"], summary["failed"], summary["not_sent"]) == (2, 1, 1)
    assert (summary["prompt_tokens"], summary["output_tokens"]) == (200, 5)
    assert (summary["requests_per_s"], summary["output_tokens_per_s"], summary["total_tokens_per_s"]) == (1, 2.5, 102.5)
    assert (summary["met_slo"], summary["goodput_requests_per_s"]) == (1, 0.5)
    assert summary["errors"] == {"HTTP 500: broken": 1}
    assert summary["ttft_ms"]["mean"] == 55 and summary["itl_ms"]["max"] == 20 and summary["late_sends_ms"]["max"] == 10
    assert json.loads(json.dumps(summary)) == summary


def test_the_title_says_when_requests_come() -> None:
    config = {"dataset": "trace", "request_rate": None, "concurrency": 4, "seed": 1, "server": "ipc"}
    assert title(config) == "trace, times of the trace, concurrency 4, seed 1, ipc"
    assert "random, all at once," in title(config | {"dataset": "random", "concurrency": None})
    assert "random, 8 requests/s, concurrency 4," in title(config | {"dataset": "random", "request_rate": 8.0})


def test_objectives() -> None:
    assert parse_slos(["ttft:200", "tpot:50.5"]) == {"ttft": 200, "tpot": 50.5}
    for wrong in ("ttft", "ttft:x", "speed:5", "ttft:0", "ttft:inf", "ttft:nan"):
        with pytest.raises(SloError):
            parse_slos([wrong])
    assert meets(record([30, 40]), {"ttft": 30, "itl": 10}) and not meets(record([30, 41]), {"itl": 10})
    assert meets(record([30]), {"tpot": 1}), "one token has no time per token after it"
    assert not meets(record([30], error="x"), {})
