"""Snapshots in the radix tree against a list of prefixes, and the rules of where they are taken."""

from array import array

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from scheduler_proc.block_pool import BlockPool
from scheduler_proc.radix_tree import RadixTree
from scheduler_proc.snapshots import Found, Saving, Snapshots, Track, find, saving_of
from tests.examples import examples


def raw(tokens):
    return array("i", tokens).tobytes()


def in_tree(total, page_size):
    pool, snapshots = BlockPool(1000), Snapshots(total)
    tree = RadixTree(pool, page_size, snapshots=snapshots)

    def insert(tokens):
        pages = pool.allocate(-(-len(tokens) // page_size))
        tree.insert(raw(tokens), pages)
        pool.release(pages)

    def save(tokens, worth=1, busy=(), awaited=False):
        *_, (node, _, whole) = tree.walk(raw(tokens))
        return snapshots.save(node, whole, worth, busy, awaited=awaited)

    return tree, snapshots, insert, save


@st.composite
def workloads(draw):
    sequence = st.lists(st.integers(0, 2), min_size=1, max_size=14)
    action = st.tuples(st.sampled_from(["insert", "save", "save", "evict", "find", "match"]), sequence)
    return draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([0, 1, 3, 30])), draw(st.lists(action, max_size=40))


@settings(max_examples=examples(400), deadline=None)
@given(workloads())
def test_same_as_a_list_of_prefixes(workload):
    """`kept` are the tokens of each number, the one used longest ago first; the tree says only what it still has."""
    size, total, actions = workload
    tree, snapshots, insert, save = in_tree(total, size)
    kept: dict[int, tuple[int, ...]] = {}
    inserted: list[list[int]] = []
    for action, tokens in actions:
        whole = tuple(tokens[: tree.peek(raw(tokens), len(tokens)) // size * size])
        match action:
            case "insert":
                insert(tokens)
                inserted.append(tokens)
            case "evict":
                tree.evict(len(tokens) // 3)
                kept = {n: own for n, own in kept.items() if tree.peek(raw(own), len(own)) == len(own)}
            case "match":
                tree.match(raw(tokens), len(tokens))
            case "save" if whole:
                there = next((n for n, own in kept.items() if own == whole), None)
                oldest = next(iter(kept), None)
                number = save(whole)
                if there is not None:
                    assert number is None
                    kept[there] = kept.pop(there)
                elif total:
                    assert (number == oldest) == (len(kept) == total)
                    kept.pop(number, None)
                    kept[number] = whole
                else:
                    assert number is None
        found = find(tree.walk(raw(tokens)), size, len(tokens) - 1, raw(tokens))
        usable = {own: n for n, own in kept.items() if tuple(tokens[: len(own)]) == own}
        starts = {len(own): n for own, n in usable.items() if len(own) < len(tokens)}
        assert found.start == max(starts, default=0) and found.number == starts.get(found.start, -1)
        assert found.deepest == max(map(len, usable), default=0)
        whole = tree.peek(raw(tokens), len(tokens)) // size * size
        ways = [own for own in inserted if own[:whole] == tokens[:whole] and own != tokens[: len(own)]]
        assert found.branch == (whole if ways else 0) or tree.evicted
        assert found.reach == len(tokens), "nobody has locked anything"
        if found.number >= 0 and action == "find":
            snapshots.load(found.number)
            kept[found.number] = kept.pop(found.number)
        assert list(snapshots.owners()) == list(kept)
        assert sorted([*snapshots.free_numbers(), *kept]) == list(range(total))
    tree.evict(1000)
    assert not snapshots.used and sorted(snapshots.free_numbers()) == list(range(total))


def test_those_that_the_plan_saves_already_are_not_reused():
    _, snapshots, insert, save = in_tree(1, 1)
    insert([1, 2, 3])
    assert save([1]) == 0
    assert save([1, 2], busy=[0]) is None
    assert save([1, 2], busy=[]) == 0 and snapshots.saved == 2 and snapshots.used == 1


def test_one_that_is_there_already_is_not_taken_again_but_has_been_used():
    _, snapshots, insert, save = in_tree(2, 1)
    insert([1, 2, 3])
    assert (save([1]), save([1, 2]), save([1])) == (0, 1, None)
    assert list(snapshots.owners()) == [1, 0] and snapshots.saved == 2


def test_what_saves_most_stays():
    _, snapshots, insert, save = in_tree(2, 1)
    insert(range(9))
    assert (save([0], 50), save([0, 1], 20)) == (0, 1)
    assert save([0, 1, 2], 10) is None, "each of the others saves more"
    assert save([0, 1, 2], 10) == 1, "but not for ever"
    assert save([0, 1, 2, 3], 10) == 1
    snapshots.load(0)
    assert [save(range(n), 30) for n in (5, 6, 7)] == [1, 1, 0], "used or not"


def test_one_that_somebody_waits_for_is_taken():
    *_, insert, save = in_tree(1, 1)
    insert(range(9))
    assert save([0], 50) == 0
    assert save([0, 1], 10) is None
    assert save([0, 1], 10, busy=[0], awaited=True) is None
    assert save([0, 1], 10, awaited=True) == 0


def test_counters_go_on_when_all_is_forgotten():
    _, snapshots, insert, save = in_tree(3, 1)
    insert([1])
    snapshots.load(save([1]))
    again = snapshots.emptied()
    assert (again.total, again.used, again.saved, again.loaded) == (3, 0, 1, 1)


def test_what_somebody_else_uses_bounds_what_can_be_kept():
    tree, _, insert, save = in_tree(9, 2)
    insert([1, 1, 2, 2, 3, 3, 4, 4])
    assert save([1, 1]) is not None

    def reach():
        return find(tree.walk(raw([1, 1, 2, 2, 3, 3, 9, 9])), 2, 99, raw([1, 1, 2, 2, 3, 3, 9, 9])).reach

    assert reach() == 8
    tree.lock(tree.match(raw([1, 1]), 2).node)
    assert reach() == 8, "it starts there"
    node = tree.match(raw([1, 1, 2, 2]), 4).node
    tree.lock(node)
    assert reach() == 6
    tree.unlock(node)
    assert reach() == 8


@pytest.mark.parametrize(
    ("found", "length", "points"),
    [
        (Found(0, -1, 0, 0, 104), 104, [96]),
        (Found(0, -1, 0, 0, 101), 101, [96]),
        (Found(0, -1, 0, 0, 100), 100, [92]),
        (Found(0, -1, 0, 40, 104), 104, [40, 96]),
        (Found(20, 3, 20, 40, 104), 104, [40, 96]),
        (Found(20, 3, 20, 28, 104), 104, [28, 96]),
        (Found(20, 3, 20, 24, 104), 104, [96]),
        (Found(0, -1, 0, 88, 104), 104, [88, 96]),
        (Found(0, -1, 0, 92, 104), 104, [92]),
        (Found(0, -1, 92, 96, 104), 104, []),
        (Found(92, 1, 92, 92, 104), 104, []),
        (Found(0, -1, 0, 40, 40), 104, [40]),
        (Found(0, -1, 0, 0, 3), 3, []),
        (Found(0, -1, 0, 0, 12), 12, []),
        (Found(0, -1, 0, 0, 13), 13, [8]),
    ],
)
def test_where_a_prompt_leaves_snapshots(found, length, points):
    """Pages of 4 tokens, and 8 that are worth one."""
    saving = saving_of(found, length, 4, 8)
    assert saving.points == points and saving.reach == found.reach


def test_a_prompt_comes_to_its_points_one_after_the_other():
    saving = Saving([12, 4], 20)
    saving.wait(8)
    saving.wait(8)
    assert saving.points == [4, 8, 12]
    assert (saving.due(3), saving.due(8), saving.due(11), saving.due(12), saving.due(99)) == ([], [4, 8], [], [12], [])


def test_what_goes_along_with_an_answer_gives_way_to_a_prompt_and_takes_nothing_from_one():
    tree, snapshots, insert, save = in_tree(1, 1)
    insert(range(9))
    track = Track(start=4)
    assert snapshots.follow(track, 7, 4, []) is None, "not far enough"
    assert (snapshots.follow(track, 8, 4, []), track.length) == (0, 8)
    assert save([0], 50, busy=[0]) is None
    assert (save([0], 50), track.number) == (0, -1)
    assert snapshots.follow(track, 12, 4, []) is None and track.number == -1
    *_, (node, _, _) = tree.walk(raw([0]))
    assert snapshots.owners() == {0: node}
    snapshots.supersede([0])
    assert snapshots.follow(track, 16, 4, busy=[0]) is None
    assert snapshots.follow(track, 16, 4, []) == 0 and node.states is None


def test_the_end_of_an_answer_is_worth_a_quarter_until_it_is_used():
    tree, snapshots, insert, save = in_tree(2, 1)
    insert(range(9))
    track = Track(start=0)
    assert (snapshots.follow(track, 40, 4, []), save([0], 20)) == (0, 1)
    *_, (node, _, whole) = tree.walk(raw([0, 1]))
    snapshots.settle(track, node, whole, 40)
    assert save([0, 1, 2], 12) == 0, "worth ten"
    assert (snapshots.saved, snapshots.used) == (3, 2)
