"""The judge finds what is wrong, names it rightly, and lets only pass what is allowed."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages import Finish
from tests.faults.checks import MORE_FDS, MORE_RSS, WARM_UP, Growth, Measure, check_log, check_pages, check_restarts
from tests.faults.judge import (
    LATE_TOKENS,
    Allowed,
    Choice,
    Ending,
    Finding,
    Kind,
    Outcome,
    Served,
    compare_tokens,
    judge,
)
from tests.faults.plan import Ask, Conduct, Fault, Round
from tests.faults.plan import Kind as FaultKind
from tests.faults.report import Report

# Different tokens, so that what was done to them can be told.
TOKENS = st.lists(st.integers(0, 10_000), min_size=2, max_size=40, unique=True)


@given(TOKENS, st.data())
def test_a_beginning_is_right_and_complete_only_as_a_whole(tokens: list[int], data: st.DataObject) -> None:
    assert compare_tokens(tokens, tokens, complete=True) is None
    cut = data.draw(st.integers(0, len(tokens) - 1))
    assert compare_tokens(tokens[:cut], tokens, complete=False) is None
    wrong = compare_tokens(tokens[:cut], tokens, complete=True)
    assert wrong is not None and wrong[0] is Kind.LOST


@given(TOKENS, st.booleans(), st.data())
def test_what_was_done_to_tokens_is_named(tokens: list[int], complete: bool, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(tokens) - 1))
    count = data.draw(st.integers(1, len(tokens) - at))
    twice = [*tokens[: at + count], *tokens[at:]]
    wrong = compare_tokens(twice, tokens, complete=complete)
    assert wrong is not None and wrong[0] is Kind.DUPLICATED
    without = [*tokens[:at], *tokens[at + count :]]
    wrong = compare_tokens(without, tokens, complete=complete)
    assert (wrong is None and at + count == len(tokens) and not complete) or (
        wrong is not None and wrong[0] is Kind.LOST
    )
    other = [*tokens[:at], -1, *tokens[at + 1 :]]
    wrong = compare_tokens(other, tokens, complete=complete)
    assert wrong is not None and wrong[0] is Kind.WRONG


SOLO = [Choice(list(range(48)), "abc", Finish.LENGTH)]
READ = Ask("greedy", False, True, 0, Conduct.READ)
NOTHING = Allowed()


def outcome(ending: Ending, tokens: int = 48, text: str = "abc", finish: Finish = Finish.LENGTH) -> Outcome:
    return Outcome([Choice(list(range(tokens)), text, finish)], ending)


def kind_of(ask: Ask, got: Outcome, allowed: Allowed = NOTHING) -> object:
    verdict = judge(ask, got, SOLO, allowed)
    return verdict.kind if isinstance(verdict, Finding) else verdict


def test_ends() -> None:
    assert kind_of(READ, outcome(Ending.FINISHED)) is Served.SERVED
    assert kind_of(READ, outcome(Ending.FINISHED, text="abd")) is Kind.WRONG
    assert kind_of(READ, outcome(Ending.FINISHED, finish=Finish.STOP)) is Kind.WRONG
    assert kind_of(READ, outcome(Ending.FINISHED, tokens=47)) is Kind.LOST
    assert kind_of(READ, outcome(Ending.SILENT, finish=Finish.NONE)) is Kind.LOST
    assert kind_of(READ, outcome(Ending.FINISHED, 10, "a", Finish.ABORT)) is Kind.LOST
    cancelled = replace(READ, conduct=Conduct.CANCEL)
    assert kind_of(cancelled, outcome(Ending.FINISHED, 10, "a", Finish.ABORT)) is Served.GIVEN_UP
    assert kind_of(cancelled, outcome(Ending.FINISHED, 10, "a\ufffd", Finish.ABORT)) is Served.GIVEN_UP
    assert kind_of(cancelled, outcome(Ending.FINISHED, 10, "b\ufffd", Finish.ABORT)) is Kind.WRONG
    assert kind_of(cancelled, outcome(Ending.FINISHED, 10, "a\ufffd\ufffd", Finish.ABORT)) is Kind.WRONG
    assert kind_of(READ, outcome(Ending.FINISHED, text="a\ufffd")) is Kind.WRONG
    assert kind_of(READ, replace(outcome(Ending.FINISHED), stray_rows=1)) is Kind.DUPLICATED
    wrong = outcome(Ending.DISCONNECTED, 3, "x", Finish.NONE)
    assert kind_of(READ, wrong, Allowed(tokenizer_replaced=True)) is Kind.WRONG, "what came before an error counts too"


def test_log_probabilities() -> None:
    """Those of the prompt come before the first token; a request that is aborted before it has the first of them."""
    solo = [Choice([1, 2, 3], "abc", Finish.LENGTH, [1, 2, 3], [-1, 7, 8])]

    def verdict(tokens: int, scored: list[int], prompt: list[int], finish: Finish) -> object:
        got = Outcome([Choice([1, 2, 3][:tokens], "abc"[:tokens], finish, scored, prompt)], Ending.FINISHED)
        found = judge(replace(READ, conduct=Conduct.CANCEL), got, solo, NOTHING)
        return found.kind if isinstance(found, Finding) else found

    assert verdict(3, [1, 2, 3], [-1, 7, 8], Finish.LENGTH) is Served.SERVED
    assert verdict(3, [1, 2], [-1, 7, 8], Finish.LENGTH) is Kind.WRONG
    assert verdict(3, [1, 2, 3], [-1, 7], Finish.LENGTH) is Kind.LOST
    assert verdict(1, [1], [-1, 7], Finish.ABORT) is Kind.LOST
    assert verdict(0, [], [-1, 7], Finish.ABORT) is Served.GIVEN_UP
    assert verdict(0, [], [-1, 9], Finish.ABORT) is Kind.WRONG


def test_an_abort_that_is_swallowed() -> None:
    endless = Ask("endless", False, True, 0, Conduct.CANCEL, 5)
    got = outcome(Ending.FINISHED, 48 + LATE_TOKENS + 1)
    got.given_up_at = 48
    assert kind_of(endless, got) is Kind.ABORT
    assert kind_of(endless, got, Allowed(paused=True)) is Served.SERVED
    got.given_up_at = 49
    assert kind_of(endless, got) is Served.SERVED
    assert kind_of(endless, outcome(Ending.IGNORED, finish=Finish.NONE)) is Kind.ABORT


ERRORS = [
    (Ending.DISCONNECTED, READ, 5, "tokenizer_replaced"),
    (Ending.DISCONNECTED, replace(READ, http=True), 5, "gateway_replaced"),
    (Ending.NOT_SERVED, replace(READ, http=True), 5, "tokenizer_replaced"),
    (Ending.OVERLOADED, READ, 0, "burst"),
    (Ending.CONDEMNED, READ, 5, "condemned"),
    (Ending.STOPPING, READ, 0, "stopping"),
    (Ending.STOPPING, READ, 5, "stopped"),
]


@pytest.mark.parametrize(("ending", "ask", "tokens", "field"), ERRORS)
def test_errors_are_allowed_for_their_cause_alone(ending: Ending, ask: Ask, tokens: int, field: str) -> None:
    got = outcome(ending, tokens, "", Finish.NONE)
    assert kind_of(ask, got) is Kind.LOST
    assert kind_of(ask, got, Allowed(**{field: True})) is Served.REFUSED


def test_errors_that_are_never_allowed() -> None:
    everything = Allowed(True, True, True, True, True, True, True)
    assert kind_of(READ, outcome(Ending.OTHER_ERROR), everything) is Kind.LOST
    assert kind_of(READ, outcome(Ending.OVERLOADED, 5, "", Finish.NONE), everything) is Kind.LOST
    assert kind_of(READ, outcome(Ending.DISCONNECTED), Allowed(gateway_replaced=True)) is Kind.LOST
    assert kind_of(READ, outcome(Ending.DEADLINE), everything) is Kind.LOST
    assert kind_of(replace(READ, conduct=Conduct.DEADLINE), outcome(Ending.DEADLINE)) is Served.REFUSED


def test_pages() -> None:
    gauges = {"free": 3, "evictable": 5, "locked": 0, "held": 0, "total": 8}
    stats = {f"scheduler.{name}_pages": count for name, count in gauges.items()}
    assert not check_pages(stats)
    assert check_pages(stats | {"scheduler.free_pages": 2})[0].kind is Kind.PAGES
    assert check_pages(stats | {"scheduler.locked_pages": 1})


def test_restarts_and_log() -> None:
    plan = Round(1, 1, (), (Fault(FaultKind.KILL, "worker-1", 0.5), Fault(FaultKind.RENEW, "workers", 0.6)))
    before = {"workers": 3, "scheduler": 1}
    assert not check_restarts(plan, before, {"workers": 4, "scheduler": 1})
    assert check_restarts(plan, before, {"workers": 5, "scheduler": 1})
    assert check_restarts(plan, before, {"workers": 3, "scheduler": 2})
    assert not check_log(["10:00:00.000 E worker-1     a peer is gone", "10:00:00.000 W launcher     x", ""])
    assert check_log(["10:00:00.000 E scheduler    ProtocolError: x"])
    assert check_log(["Traceback (most recent call last):"])


def test_growth_is_measured_against_a_processs_own_beginning() -> None:
    growth = Growth()
    for _ in range(WARM_UP):
        assert not growth.take("scheduler", 1, Measure(20, 10 * 2**20))
    assert not growth.take("scheduler", 1, Measure(20 + MORE_FDS, 10 * 2**20 + MORE_RSS))
    assert growth.take("scheduler", 1, Measure(21 + MORE_FDS, 10 * 2**20))
    assert growth.take("scheduler", 1, Measure(20, 10 * 2**20 + MORE_RSS + 1))
    assert not growth.take("scheduler", 2, Measure(2000, 2**40)), "another process with the same name"


def test_a_report_counts_a_burst_once() -> None:
    report = Report(1)
    asks = [replace(READ, conduct=conduct) for conduct in (*[Conduct.BURST] * 5, Conduct.CANCEL, Conduct.CANCEL)]
    report.add_round(Round(1, 1, (READ, *asks), (Fault(FaultKind.KILL, "scheduler", 0.5),)))
    assert report.faults == {"burst (ipc)": 1, "cancel (ipc)": 2, "kill scheduler": 1}


def test_a_report_names_the_round_to_play_again() -> None:
    report = Report(5)
    assert report.ok
    report.findings.append((17, Finding(Kind.LOST, "it has not ended")))
    assert not report.ok and "--seed 5 --begin 17 --rounds 1" in report.text()
