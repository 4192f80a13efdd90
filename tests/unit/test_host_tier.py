"""Evicted pages on the host: they come back instead of being computed again, and none is lost or owned twice."""

from array import array

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from common.config import CacheConfig, ConfigError
from common.messages import AddRequest, ints
from common.sampling_params import DrawParams
from scheduler_proc.block_pool import BlockPool
from scheduler_proc.host_tier import HostTier
from scheduler_proc.invariants import InvariantViolation, check
from scheduler_proc.kv_manager import KVManager
from scheduler_proc.radix_tree import RadixTree
from tests.examples import examples
from tests.paper_worker import solo_output
from tests.rig import Rig

DEVICE = 8  # pages of the rigs below, 4 tokens each


def talk(rig, rid, prompt, max_tokens=4):
    """One request from its beginning to its end. Returns how many of its prompt's tokens were cached."""
    rig.add(rid, prompt, max_tokens)
    while rig.step() is not None:
        check(rig.scheduler)
    assert rig.out[rid] == solo_output(list(prompt), max_tokens)
    return rig.cached[rid]


def two_conversations(**options):
    """Each of 6 pages on a device of 8; returns how much of each turn was cached."""
    rig = Rig(pages=DEVICE, context=DEVICE * 4, **options)
    hits = [talk(rig, rid, [rid % 2] * 20) for rid in range(6)]
    return rig, hits


def test_conversations_that_evict_each_other_come_back():
    rig, hits = two_conversations(host_pages=20)
    assert hits == [0, 0, 19, 19, 19, 19]
    stats = rig.scheduler.stats()
    assert stats["cached_tokens"] == 4 * 19 and 0 < stats["host_cached_tokens"] < stats["cached_tokens"]
    assert stats["offloaded_pages"] > stats["loaded_pages"] > 0 == stats["host_dropped_pages"]


def test_without_a_host_tier_only_what_stayed_is_cached():
    rig, hits = two_conversations()
    assert sum(hits) < 4 * 19
    assert not any(value for name, value in rig.scheduler.stats().items() if "host" in name or "loaded" in name)


def test_a_small_host_keeps_what_was_used_last():
    rig = Rig(pages=DEVICE, context=DEVICE * 4, host_pages=6)
    for rid in range(4):
        talk(rig, rid, [rid] * 20)
    assert rig.scheduler.stats()["host_dropped_pages"] > 0
    assert talk(rig, 10, [0] * 20) == 0
    assert talk(rig, 11, [3] * 20) == 19


def test_a_match_inside_a_host_page_is_loaded_to_the_page_that_goes_on():
    rig = Rig(pages=DEVICE, context=DEVICE * 4, host_pages=20)
    talk(rig, 0, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    talk(rig, 1, [50] * 28)
    before = rig.scheduler.stats()["loaded_pages"]
    assert talk(rig, 2, [1, 2, 3, 4, 5, 6, 7, 30, 31]) == 7
    stats = rig.scheduler.stats()
    assert stats["loaded_pages"] == before + 1, "the page that is shared; the one that is read in part stays"
    assert stats["copied_pages"] == 0 and stats["host_cached_tokens"] == 7
    assert talk(rig, 3, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]) == 9


def test_pages_that_are_computed_again_take_the_place_of_those_on_the_host():
    """Scoring a prompt computes what is cached; then nothing has to be copied to have it on the device."""
    rig = Rig(pages=DEVICE, context=DEVICE * 4, host_pages=20)
    prompt = [1] * 12
    talk(rig, 0, prompt)
    rig.scheduler.kv.tree.evict(DEVICE)
    assert rig.scheduler.stats()["host_used_pages"] == 4
    msg = AddRequest(1, ints(*prompt), 4, ints(), DrawParams(prompt_logprobs=0))
    rig.take(rig.scheduler.handle(msg, rig.now))
    rig.step()
    assert rig.scheduler.stats()["host_used_pages"] == 1, "whole pages are on the device at once, for others to share"
    rig.run()
    assert rig.out[1] == rig.out[0] and rig.cached[1] == 0
    stats = rig.scheduler.stats()
    assert stats["loaded_pages"] == 0 and stats["host_used_pages"] <= 1, "a page that is filled in part may stay"
    check(rig.scheduler)


def test_a_plan_that_moves_many_pages_admits_nobody_else(monkeypatch):
    monkeypatch.setattr("scheduler_proc.planner.MOVED_PAGES", 3)
    rig = Rig(pages=20, host_pages=40)
    for rid in range(4):
        talk(rig, rid, [rid] * 9)
    rig.scheduler.kv.tree.evict(20)
    rig.scheduler.kv.take_copies()
    for rid in range(4):
        rig.add(4 + rid, [rid] * 9, 1)
    assert [len(plan.copies) // 2 for plan in rig.run()] == [4, 4], "two pages for each that starts"


def test_lost_workers_take_the_host_tier_with_them():
    rig, _ = two_conversations(host_pages=20)
    before = rig.scheduler.stats()
    rig.scheduler.reset(1, rig.now, crashed=False)
    rig.restart_worker()
    rig.scheduler.epoch = 0  # the paper worker does not mind
    after = rig.scheduler.stats()
    assert after["host_used_pages"] == 0 and after["offloaded_pages"] == before["offloaded_pages"] > 0
    assert talk(rig, 20, [0] * 20) == 0
    check(rig.scheduler)


def test_an_evicted_sequence_stays_one_edge():
    """However it was evicted, a page at a time here."""
    kv = KVManager(DEVICE, 4, host_pages=20)
    pages = kv.pool.allocate(7)
    kv.tree.insert(array("i", range(27)).tobytes(), pages)
    kv.pool.release(pages)
    for _ in range(5):
        assert kv.tree.evict(1) == 1
    assert [(node.on_host, len(node.pages)) for node in kv.tree.nodes()] == [(False, 2), (True, 5)]
    assert list(kv.copies[::2]) == pages[:1:-1], "from its end"


def over_a_host(host_pages):
    """A tree of pages of one token, and what inserts into it."""
    pool, copies = BlockPool(20), array("i")
    tier = HostTier(host_pages, 20, copies)
    tree = RadixTree(pool, 1, tier)

    def insert(tokens):
        pages = pool.allocate(len(tokens))
        tree.insert(raw(tokens), pages)
        pool.release(pages)

    return pool, tier, tree, insert


def test_what_is_locked_on_the_host_makes_no_room():
    """As the prefix of a request is while room is made for it on the device."""
    pool, tier, tree, insert = over_a_host(host_pages=1)
    insert([1])
    tree.evict(1)
    match = tree.match(raw([1]), 1)
    tree.lock(match.node)
    insert([2])
    assert tree.evict(1) == 1 == tier.dropped and pool.free == 20
    assert tree.peek(raw([1]), 1) == 1 and tree.peek(raw([2]), 1) == 0
    tree.load(match.node, pool.allocate(1))
    tree.unlock(match.node)
    assert tree.evictable == tree.num_pages == 1 == tier.pool.free


def test_what_branches_below_an_edge_on_the_host_hangs_there_when_the_edge_has_grown():
    pool, _, tree, insert = over_a_host(host_pages=9)
    insert([1, 2, 3])
    insert([1, 2, 4])
    assert [tree.evict(count) for count in (2, 1, 1)] == [2, 1, 1]
    assert sorted(len(node.pages) for node in tree.nodes()) == [1, 1, 2], "the edge above them is one again"
    for last in (3, 4):
        match = tree.match(raw([1, 2, last]), 3)
        tree.lock(match.node)
        for node in match.hosted:
            tree.load(node, pool.allocate(len(node.pages)))
        tree.unlock(match.node)
    assert tree.num_pages == tree.evictable == 4 and pool.free == 16


def test_a_host_tier_needs_a_prefix_cache():
    with pytest.raises(ValueError, match="prefix cache"):
        KVManager(8, 4, prefix_cache=False, host_pages=1)
    with pytest.raises(ConfigError, match="host-kv-memory must be 0 without the prefix cache"):
        CacheConfig(prefix_cache=False, host_kv_bytes=1)


def planted():
    rig, _ = two_conversations(host_pages=20)
    kv = rig.scheduler.kv
    return rig.scheduler, kv, next(node for node in kv.tree.nodes() if node.on_host)


def test_a_planted_leak_of_a_host_page_is_caught():
    scheduler, kv, _ = planted()
    kv.tier.pool.allocate(1)
    with pytest.raises(InvariantViolation, match="has 0 owners, its reference count says 1"):
        check(scheduler)


def test_a_planted_page_in_two_places_is_caught():
    scheduler, kv, node = planted()
    kv.tier.pool.share(node.pages)
    with pytest.raises(InvariantViolation, match="has 1 owners, its reference count says 2"):
        check(scheduler)


def test_a_planted_forgotten_unlock_on_the_host_is_caught():
    scheduler, _, node = planted()
    node.locks += 1
    with pytest.raises(InvariantViolation, match="on the host is locked"):
        check(scheduler)


def test_a_planted_miscount_of_children_is_caught():
    scheduler, _, node = planted()
    while node.on_host:
        node = node.parent
    if node.parent is None:
        pytest.fail("the host's nodes hang below a node on the device here")
    node.live += 1
    with pytest.raises(InvariantViolation, match="children of a node are on the device"):
        check(scheduler)


def raw(tokens):
    return array("i", tokens).tobytes()


@st.composite
def workloads(draw):
    size = draw(st.sampled_from([1, 2, 3, 4]))
    sequence = st.lists(st.integers(0, 2), max_size=14)
    action = st.one_of(st.tuples(st.booleans(), sequence), st.tuples(st.just(None), st.integers(1, 6)))
    return size, draw(st.sampled_from([3, 1000])), draw(st.lists(action, max_size=30))


@settings(max_examples=examples(400), deadline=None)
@given(workloads())
def test_a_tree_over_a_host_tier_is_a_dictionary_of_all_prefixes(workload):
    """Insert, match, evict and load; `cells` are what the pages of both tiers hold, moved by the copies that are asked
    for. With a large host nothing is ever forgotten; with a small one, what is found is right."""
    size, host_pages, actions = workload
    device, copies = 1000, array("i")
    pool, tier = BlockPool(device), HostTier(host_pages, device, copies)
    tree = RadixTree(pool, size, tier)
    naive: set[tuple[int, ...]] = set()
    cells: dict[int, list[int]] = {}  # page -> all tokens up to its end
    answers: dict[tuple[int, tuple[int, ...]], int] = {}  # version and tokens -> how many were found
    for kind, what in actions:
        for query in naive:  # two answers need two versions of the tree
            known = tree.peek(raw(query), len(query))
            assert answers.setdefault((tree.version, query), known) == known
        if kind is None:
            before, room, dropped = tree.num_pages, tier.pool.free, tier.dropped
            assert tree.evict(what) == min(what, before) == before - tree.num_pages
            assert tier.dropped - dropped == max(0, min(what, before) - room), "no more than do not fit"
            follow(copies, cells)
            continue
        expected = max((n for n in range(len(what) + 1) if tuple(what[:n]) in naive), default=0)
        found = tree.peek(raw(what), len(what))
        match = tree.match(raw(what), len(what))
        ids = [*match.pages, *(device + page for node in match.hosted for page in node.pages)]
        assert found == len(ids) * size + match.partial
        assert found == expected or (host_pages < 1000 and found < expected)
        assert tree.peek(raw(what), len(what), on_device=True) // size == len(match.pages)
        for i, page in enumerate([*ids, match.source] if match.partial else ids):
            wanted = what[: min(found, (i + 1) * size)]
            assert cells[page][: len(wanted)] == wanted
        if kind:
            pages = pool.allocate(-(-len(what) // size))
            tree.insert(raw(what), pages)
            inserted = {page for node in tree.nodes() if not node.on_host for page in node.pages}
            cells |= {page: what[: (i + 1) * size] for i, page in enumerate(pages) if page in inserted}
            pool.release(pages)
            naive |= {tuple(what[:n]) for n in range(len(what) + 1)}
        elif match.hosted:
            tree.lock(match.node)
            for node in match.hosted:
                tree.load(node, pool.allocate(len(node.pages)))
            tree.unlock(match.node)
            follow(copies, cells)
        on_host = [page for node in tree.nodes() if node.on_host for page in node.pages]
        assert len(set(on_host)) == len(on_host) == host_pages - tier.pool.free
        assert tree.num_pages == tree.evictable == device - pool.free
        for node in tree.nodes():
            assert not (node.on_host and any(not child.on_host for child in node.children.values()))
    tree.evict(device)
    assert pool.free == device and tree.num_pages == tree.evictable == 0


def follow(copies, cells):
    for source, target in zip(copies[::2], copies[1::2], strict=True):
        cells[target] = cells[source]
    del copies[:]


def test_going_to_the_host_and_back_leaves_nothing_behind():
    rig = Rig(pages=40, host_pages=4000, max_running=2)
    for rid in range(300):
        talk(rig, rid, [100 + rid % 6] * 60, 1)
    assert len(rig.scheduler.kv.tree._host_leaves) <= 200
