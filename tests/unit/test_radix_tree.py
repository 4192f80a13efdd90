"""The radix tree against a dictionary of all prefixes, and its eviction order and accounting."""

from array import array

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from scheduler_proc.block_pool import BlockPool
from scheduler_proc.radix_tree import RadixTree


def raw(tokens):
    return array("i", tokens).tobytes()


def whole(tokens, size):
    return tokens[: len(tokens) // size * size]


@st.composite
def workloads(draw):
    size = draw(st.sampled_from([1, 2, 3]))
    sequence = st.lists(st.integers(0, 2), max_size=14)
    return size, draw(st.lists(st.tuples(st.booleans(), sequence), max_size=25))


@settings(max_examples=300, deadline=None)
@given(workloads())
def test_same_as_a_dictionary_of_all_prefixes(workload):
    """Insert and match many sequences; every prefix that was ever inserted is found, with the page it got first."""
    size, actions = workload
    pool = BlockPool(1000)
    tree = RadixTree(pool, size)
    naive: dict[tuple[int, ...], int] = {}  # whole-page prefix -> its last page
    for is_insert, tokens in actions:
        count = len(tokens) // size
        prefixes = [tuple(tokens[: (i + 1) * size]) for i in range(count)]
        expected = []
        for prefix in prefixes:
            if prefix not in naive:
                break
            expected.append(naive[prefix])
        if is_insert:
            pages = pool.allocate(count)
            _, present = tree.insert(raw(whole(tokens, size)), pages)
            assert present == len(expected)
            for prefix, page in zip(prefixes, pages, strict=True):
                naive.setdefault(prefix, page)
            pool.release(pages)  # the caller's own references
        else:
            assert tree.match(raw(tokens), 1000)[1] == expected
            assert tree.match(raw(tokens), 2)[1] == expected[:2]
    assert tree.num_pages == tree.evictable == len(naive) == pool.num_pages - pool.free
    assert tree.evict(10**6) == len(naive)
    assert pool.free == pool.num_pages and list(tree.nodes()) == []


def grown(page_size=2):
    pool = BlockPool(100)
    tree = RadixTree(pool, page_size)

    def insert(tokens):
        pages = pool.allocate(len(tokens) // page_size)
        node, _ = tree.insert(raw(tokens), pages)
        pool.release(pages)
        return node

    return pool, tree, insert


def test_least_recently_used_leaf_goes_first_from_its_end():
    pool, tree, insert = grown()
    insert([1, 1, 2, 2, 3, 3])
    insert([1, 1, 5, 5])
    tree.match(raw([1, 1, 2, 2, 3, 3]), 9)  # the first one is the younger now
    assert tree.evict(1) == 1
    assert len(tree.match(raw([1, 1, 5, 5]), 9)[1]) == 1
    assert tree.evict(1) == 1
    assert len(tree.match(raw([1, 1, 2, 2, 3, 3]), 9)[1]) == 2, "evicted from the end, the prefix stays"


def test_locked_paths_are_never_evicted():
    pool, tree, insert = grown()
    node = insert([1, 1, 2, 2])
    insert([1, 1, 9, 9])
    tree.lock(node)
    assert tree.evictable == 1
    assert tree.evict(100) == 1
    assert len(tree.match(raw([1, 1, 2, 2]), 9)[1]) == 2
    tree.unlock(node)
    assert tree.evict(100) == 2
    with pytest.raises(ValueError, match="unlocked more often"):
        _, tree, insert = grown()
        tree.unlock(insert([1, 1]))


def test_a_lock_survives_the_split_of_its_edge():
    pool, tree, insert = grown()
    node = insert([1, 1, 2, 2, 3, 3, 4, 4])
    tree.lock(node)
    insert([1, 1, 2, 2, 7, 7])
    assert tree.evict(100) == 1
    assert len(tree.match(raw([1, 1, 2, 2, 3, 3, 4, 4]), 9)[1]) == 4
    tree.unlock(node)
    assert tree.evictable == 4 == tree.num_pages


def test_insert_refuses_a_part_of_a_page():
    _, tree, _ = grown()
    with pytest.raises(ValueError, match="need 8 bytes"):
        tree.insert(raw([1, 1, 1]), [0])


def test_a_long_edge_that_differs_anywhere_is_cut_exactly_there():
    pool = BlockPool(4096)
    tree = RadixTree(pool, 1)
    tokens = list(range(2000))
    pages = pool.allocate(2000)
    tree.insert(raw(tokens), pages)
    for at in (0, 1, 2, 999, 1000, 1023, 1024, 1025, 1998, 1999):
        other = tokens[:at] + [-1] + tokens[at + 1 :]
        assert tree.match(raw(other), 4000)[1] == pages[:at]
