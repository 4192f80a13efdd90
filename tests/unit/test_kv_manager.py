"""What it costs to hold cached pages, and to give them up."""

from itertools import product

from common.messages import ints
from common.sampling_params import DrawParams
from scheduler_proc.kv_manager import KVManager
from scheduler_proc.request import Request


def request(rid: int, tokens: range) -> Request:
    return Request(rid, ints(*tokens), len(tokens), 8, frozenset(), DrawParams(), seq=rid)


def with_one_leaf(pages: int, host_pages: int = 0) -> KVManager:
    """All but one page cached, as one edge that nobody uses."""
    kv = KVManager(pages, 1, host_pages=host_pages)
    first = request(0, range(pages - 1))
    kv.take_room(first, kv.lock_prefix(first))
    first.cached_len = pages - 1
    kv.release(first)
    assert kv.tree.evictable == pages - 1 and kv.pool.free == 1
    return kv


def test_a_long_edge_gives_up_many_pages_at_once():
    """Each eviction copies what stays of an edge: page by page it would be copied for every token of every answer."""
    kv = with_one_leaf(16_384)
    other = request(1, range(20_000, 20_001))
    kv.take_room(other, kv.lock_prefix(other))
    for length in range(2, 300):
        kv.grow(other, length)
    assert 298 <= kv.tree.evicted < 298 + 256
    evictions = kv.tree.version
    for length in range(300, 400):
        kv.grow(other, length)
    assert kv.tree.version - evictions <= 2


def test_few_pages_go_to_the_host_at_once():
    """A page can have megabytes, and the step that needs one waits for all that are moved before it."""
    kv = with_one_leaf(16_384, host_pages=16_384)
    other = request(1, range(20_000, 20_001))
    kv.take_room(other, kv.lock_prefix(other))
    moved = []
    for length in range(2, 300):
        kv.grow(other, length)
        moved.append(len(kv.take_copies()) // 2)
    assert max(moved) <= 16 and sum(map(bool, moved)) < 30, "and not each time"


def test_few_pages_are_given_up_one_by_one():
    kv = with_one_leaf(60)
    other = request(1, range(20_000, 20_001))
    kv.take_room(other, kv.lock_prefix(other))
    for length in range(2, 10):
        kv.grow(other, length)
        assert kv.tree.evicted == length - 1


def test_what_guesses_would_take_is_what_they_take():
    for size, held, tokens, more in product((1, 3), range(4), range(9), range(6)):
        kv = KVManager(60, size)
        one = request(1, range(1))
        one.pages = kv.pool.allocate(held)
        ahead = kv.pages_ahead(one, tokens, more)
        kv.grow(one, tokens)
        assert ahead == len(kv.grow(one, tokens + more))


def test_a_request_that_cannot_start_takes_no_references():
    kv = with_one_leaf(60)
    waiting = request(1, range(59))
    match = kv.lock_prefix(waiting)
    assert match is not None and len(waiting.pages) == 58
    assert {kv.pool.references(page) for page in waiting.pages} == {1}
    assert kv.tree.evict(60) == 1, "what it has found is locked"
    kv.unlock_prefix(waiting, match)
    assert not waiting.pages and kv.tree.evictable == 58
    kv.take_room(waiting, kv.lock_prefix(waiting))
    assert [kv.pool.references(page) for page in waiting.pages] == [2] * 58 + [1]
    kv.release(waiting)
    assert kv.pool.free + kv.tree.evictable == 60


def test_a_tree_that_has_forgotten_all_is_another_one_with_the_same_counters():
    """Who has remembered how much of a request is cached must ask again."""
    kv = with_one_leaf(60)
    kv.tree.evict(3)
    before, evicted = kv.tree.version, kv.tree.evicted
    kv.forget()
    assert kv.tree.version > before and kv.tree.evicted == evicted == 3
    assert kv.pool.free == kv.available == 60 and kv.cached(request(1, range(59))) == 0


def test_copies_of_pages_that_hold_nothing_any_more_are_not_made():
    kv = with_one_leaf(16, host_pages=16)
    kv.tree.evict(3)
    kv.forget()
    assert not kv.take_copies() and kv.tier is not None and kv.tier.pool.free == 16
    first = request(0, range(15))
    kv.take_room(first, kv.lock_prefix(first))
    first.cached_len = 15
    kv.release(first)
    kv.tree.evict(2)
    assert len(kv.take_copies()) == 4, "those that come later are"


def test_a_new_snapshot_is_news_for_who_has_remembered_what_is_cached():
    kv = KVManager(60, 4, recurrent=True, snapshots=1)
    one = request(0, range(9))
    kv.tree.insert(one.tokens.tobytes(), kv.pool.allocate(3))
    before = kv.tree.version
    assert kv.cached(one) == 0 and kv.save_state(one, 12, ()) is None, "there is no such page"
    assert kv.tree.version == before
    assert kv.save_state(one, 8, ()) == 0 and kv.cached(one) == 8
    assert kv.tree.version > before
    assert kv.cached(request(1, range(8))) == 0, "one token is to be computed"


def test_pages_that_nobody_uses_are_freed_for_those_that_hold_the_same():
    """What can be had stays the same, so nothing that admission has promised is lost."""
    kv = KVManager(30, 1, recurrent=True)
    old = kv.pool.allocate(10)
    kv.tree.insert(request(0, range(10)).tokens.tobytes(), old)
    kv.pool.release(old)
    one = request(1, range(12))
    kv.take_room(one, kv.lock_prefix(one))
    one.cached_len = 6
    kv.publish(one)
    assert kv.available == 30 - 12 and kv.pool.free == 30 - 12 - 10 + 6 and one.shared_pages == 6
    one.cached_len = 12
    kv.publish(one)
    assert kv.available == kv.pool.free == 30 - 12 and one.shared_pages == 12 == kv.tree.num_pages
    kv.release(one)
    assert kv.available == 30 and kv.tree.num_pages == 12
