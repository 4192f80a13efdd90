"""Who waits for a prefix that somebody else is computing, against the definition, in every small case."""

from itertools import product

import pytest

from common.messages import ints
from common.sampling_params import DrawParams
from scheduler_proc.in_batch import awaited_snapshot, better_off_waiting
from scheduler_proc.kv_manager import KVManager
from scheduler_proc.request import Request
from scheduler_proc.snapshots import MOST_POINTS, Saving

LENGTH = 7


def request(rid: int, tokens: list[int], computed: int = 0, salt: str = "", scored: bool = False) -> Request:
    draw = DrawParams(prompt_logprobs=0) if scored else DrawParams()
    one = Request(rid, ints(*tokens), len(tokens), 9, frozenset(), draw, salt, seq=rid)
    one.cached_len = computed
    return one


def common(a: Request, b: Request) -> int:
    pairs = enumerate(zip(a.tokens, b.tokens, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a.tokens), len(b.tokens)))


@pytest.mark.parametrize("page_size", [1, 3])
@pytest.mark.parametrize("known", [0, 3])
def test_whoever_gains_enough_from_one_who_is_as_far(page_size: int, known: int) -> None:
    kv = KVManager(50, page_size)
    kv.tree.insert(bytes(4 * known), kv.pool.allocate(kv.pages_for(known)))
    waiting = request(0, [0] * LENGTH)
    assert kv.cached(waiting) == known
    found = set()
    for length, other_token, salt, scored in product((5, LENGTH, 9), range(LENGTH + 1), ("", "a"), (False, True)):
        tokens = [int(i == other_token) for i in range(length)]
        for computed, gain in product(range(length), (1, 3, 4)):
            other = request(1, tokens, computed, salt, scored)
            there = min(common(waiting, other), waiting.match_limit)  # what will be cached of it that it may use
            pays = not salt and not scored and there - known >= gain and known <= computed < there
            assert better_off_waiting(waiting, kv, [other], gain) == pays
            assert better_off_waiting(waiting, kv, [waiting, other], 99) is False
            found.add(pays)
    assert found == {False, True}


def test_one_of_several_is_enough() -> None:
    kv = KVManager(50, 1)
    stranger, maker = request(1, [1, 1, 1, 1]), request(2, [0] * 9)
    for order in ([stranger, maker], [maker, stranger]):
        assert better_off_waiting(request(0, [0] * LENGTH), kv, order, 2)
    assert not better_off_waiting(request(0, [0] * LENGTH), kv, [stranger], 2)
    assert not better_off_waiting(request(0, [0] * LENGTH), kv, [], 2)


@pytest.mark.parametrize("page_size", [1, 3])
@pytest.mark.parametrize("known", [0, 3])
def test_whoever_gains_enough_from_a_snapshot_that_is_left(page_size: int, known: int) -> None:
    """One that is left in any case, or can be asked for, where that is enough further."""
    kv = KVManager(50, page_size, recurrent=True, snapshots=9)
    kv.tree.insert(bytes(4 * LENGTH), kv.pool.allocate(kv.pages_for(LENGTH)))
    waiting = request(0, [0] * LENGTH)
    if known:
        kv.save_state(waiting, known, ())
    assert kv.cached(waiting) == known
    found = set()
    sets = ([], [3], [6], [3, 6])
    for length, other_token, salt, own, reach in product((5, LENGTH, 9), range(LENGTH + 1), ("", "a"), sets, (4, 9)):
        tokens = [int(i == other_token) for i in range(length)]
        for computed, gain in product(range(length), (1, 3, 4)):
            other = request(1, tokens, computed, salt)
            points = [point for point in own if computed < point <= min(length, reach)]
            other.saving = Saving(points, reach)
            there = min(common(waiting, other), LENGTH - 1, reach)
            left = [point for point in points if known + gain <= point <= there]
            asked = there // page_size * page_size
            able = asked > computed and asked - max(left, default=known) >= gain
            awaited = awaited_snapshot(waiting, kv, [other], gain)
            if salt or computed < known or not (left or able):
                assert awaited is None
            else:
                assert awaited == (other.saving, asked if able else left[-1])
                found.add(able)
    assert found == {False, True}


def test_nobody_is_asked_for_more_snapshots_than_it_may_leave() -> None:
    kv = KVManager(50, 1, recurrent=True, snapshots=9)
    waiting, other = request(0, [0] * 20), request(1, [0] * 40)
    assert awaited_snapshot(waiting, kv, [other], 2) is None, "it leaves none: there is no prefix cache"
    other.saving = Saving(range(31, 31 + MOST_POINTS - 1), 40)
    assert awaited_snapshot(waiting, kv, [other], 2) == (other.saving, 19)
    other.saving.wait(39)
    assert awaited_snapshot(waiting, kv, [other], 2) is None
    other.saving.points[0] = 5
    assert awaited_snapshot(waiting, kv, [other], 2) == (other.saving, 5)
