"""What each rule of admission keeps for tokens to come, against what running requests then really take."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages import ints
from common.sampling_params import DrawParams
from scheduler_proc.admission import Admission, ExactPeak, FullReservation, NewTokenRatio
from scheduler_proc.kv_manager import KVManager
from scheduler_proc.request import Request


def request(seq: int, prompt_len: int, answered: int, max_tokens: int) -> Request:
    """All requests begin with the same tokens and go on with tokens of their own."""
    tokens = [*range(4), *[1000 * seq + n for n in range(1, 100)]][: prompt_len + answered]
    return Request(seq, ints(*tokens), prompt_len, max_tokens, frozenset(), DrawParams(), seq=seq)


def start(kv: KVManager, request: Request, pending: int) -> None:
    """It has computed all of its tokens, and has pages for those of steps in flight."""
    kv.take_room(request, kv.lock_prefix(request))
    request.cached_len = len(request.tokens)
    kv.publish(request)
    kv.grow(request, len(request.tokens) + pending)
    request.pending = pending


Moment = tuple[KVManager, list[Request], Request]


@st.composite
def moments(draw: st.DrawFn) -> Moment:
    """A pool with much room, requests that run, and one that waits whose prefix is locked, as when `fits` is asked."""
    kv = KVManager(200, draw(st.integers(1, 4)), prefix_cache=draw(st.booleans()))
    sizes = st.tuples(st.integers(1, 12), st.integers(0, 5), st.integers(0, 5), st.integers(1, 12))
    running = []
    for seq, (prompt_len, answered, pending, left) in enumerate(draw(st.lists(sizes, max_size=5)), 1):
        running.append(request(seq, prompt_len, answered, answered + pending + left))
        start(kv, running[-1], pending)
    prompt_len, _, _, left = draw(sizes)
    waiting = request(9, prompt_len, 0, left)
    kv.lock_prefix(waiting)
    return kv, running, waiting


def asked_for(rule: Admission, moment: Moment, already: int) -> int:
    """The fewest pages that must be there to be had, so that the one that waits may start. All but `already` of those
    who run have started since the rule was told who runs."""
    kv, running, waiting = moment
    rule.begin(kv, running[:already])
    for one in running[already:]:
        rule.started(kv, one)
    assert rule.fits(kv, waiting)
    while kv.available:
        page = kv.pool.allocate(1)
        if not rule.fits(kv, waiting):
            kv.pool.release(page)
            break
    return kv.available


@given(moments(), st.integers(0, 5))
def test_what_is_reserved_in_full_is_what_all_take_in_the_end(moment: Moment, already: int) -> None:
    kv, running, waiting = moment
    asked = asked_for(FullReservation(), moment, already)
    assert asked == sum(len(kv.grow(one, one.kv_len_at_end)) for one in [*running, waiting])


def peak(kv: KVManager, everyone: list[Request]) -> int:
    """The most pages beside the tree's that they take, if each gets a token in every step until it ends."""

    def pages(one: Request, steps: int) -> int:
        return max(len(one.pages), kv.pages_for(one.device_len + steps)) - one.shared_pages

    last = max(one.remaining for one in everyone)
    return max(sum(pages(one, t) for one in everyone if one.remaining > t) for t in range(last))


@given(moments())
def test_what_a_request_gives_back_is_known_before(moment: Moment) -> None:
    kv, running, _ = moment
    for one in running:
        before, returned = kv.available, kv.returned_by(one)
        kv.release(one)
        assert kv.available == before + returned


@given(moments(), st.integers(0, 5))
def test_the_exact_peak_is_enough_and_hardly_more(moment: Moment, already: int) -> None:
    kv, running, waiting = moment
    held = sum(len(one.pages) - one.shared_pages for one in running)
    needed = peak(kv, [*running, waiting])
    asked = asked_for(ExactPeak(), moment, already) + held
    # of several, tokens to come are rounded up to pages for each, and two more are counted than become keys and values
    slack = (len(running) + 1) * (1 + kv.pages_for(2))
    assert needed <= asked <= needed + slack if running else asked == max(needed, kv.pages_for(len(waiting.tokens) + 1))


@given(moments(), st.integers(0, 5), st.floats(0, 1), st.integers(0, 12))
def test_a_ratio_of_what_may_still_come_is_kept(moment: Moment, already: int, ratio: float, clip: int) -> None:
    kv, running, waiting = moment
    now = kv.pages_for(len(waiting.tokens) + 1) - len(waiting.pages)
    later = int(ratio * sum(min(clip, one.max_tokens - one.generated) for one in [*running, waiting]))
    expected = now + kv.pages_for(later) if running else now
    assert asked_for(NewTokenRatio(ratio, ratio, clip=clip), moment, already) == expected


def test_the_ratio_falls_while_all_goes_well() -> None:
    rule = NewTokenRatio()
    ratios = []
    for _ in range(700):
        ratios.append(rule.ratio)
        rule.after_step()
    assert ratios[0] == 0.7 and ratios[300] == pytest.approx(0.4)
    assert ratios[599] > 0.1001 and set(ratios[601:]) == {0.1}


def test_the_ratio_rises_on_preemption_to_what_was_needed_and_never_falls() -> None:
    rule = NewTokenRatio(0.1, 0.1)
    running = [request(1, 5, 10, 100), request(2, 5, 0, 200)]
    rule.after_preemption(running)
    assert rule.ratio == pytest.approx((10 + 2 * 20) / 300)
    before = rule.ratio
    rule.after_preemption([request(1, 5, 0, 10_000)])
    assert rule.ratio == before
    rule.after_preemption([request(1, 5, 1, 5)])
    assert rule.ratio == 1.0
    rule.after_preemption([])
    assert rule.ratio == 1.0
