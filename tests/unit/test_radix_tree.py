"""The radix tree against a dictionary of all prefixes, and its eviction order and accounting."""

from array import array

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from scheduler_proc.block_pool import BlockPool
from scheduler_proc.radix_tree import RadixTree
from tests.examples import examples


def raw(tokens):
    return array("i", tokens).tobytes()


@st.composite
def workloads(draw):
    size = draw(st.sampled_from([1, 2, 3, 4]))
    sequence = st.lists(st.integers(0, 2), max_size=14)
    salt = st.sampled_from(["", "a"])
    return size, draw(st.lists(st.tuples(st.booleans(), sequence, salt), max_size=25))


@settings(max_examples=examples(400), deadline=None)
@given(workloads())
def test_same_as_a_dictionary_of_all_prefixes(workload):
    """Insert and match many sequences; every prefix that was ever inserted is found, to the token, and nothing else.

    `holds` says what the cells of every page hold, so that a match that leads to a wrong page is seen.
    """
    size, actions = workload
    pool = BlockPool(1000)
    tree = RadixTree(pool, size)
    naive: set[tuple[str, tuple[int, ...]]] = set()
    holds: dict[int, tuple[str, list[int], int]] = {}  # page -> namespace, all tokens up to its end, its start
    answers: dict[tuple[int, str, tuple[int, ...]], int] = {}  # version, namespace and tokens -> how many were found
    for is_insert, tokens, salt in actions:
        for most in (len(tokens), len(tokens) // 2, len(tokens) + size):
            known_to = min(most, len(tokens))
            expected = max((n for n in range(known_to + 1) if (salt, tuple(tokens[:n])) in naive), default=0)
            assert tree.peek(raw(tokens), most, salt) == expected
            match = tree.match(raw(tokens), most, salt)
            assert len(match.pages) * size + match.partial == expected
            assert len(match.pages) == expected // size and 0 <= match.partial < size
            read = [*match.pages, match.source] if match.partial else match.pages
            for i, page in enumerate(read):
                name, known, start = holds[page]
                wanted = tokens[i * size : min(expected, (i + 1) * size)]
                assert name == salt and start == i * size and known[start : start + len(wanted)] == wanted
                assert known[:start] == tokens[:start], "the page continues the same tokens"
        asked = {(name, query) for _, name, query in answers} | {(salt, tuple(tokens))}
        remember(tree, asked, answers)
        if is_insert:
            count = -(-len(tokens) // size)
            pages = pool.allocate(count)
            _, present = tree.insert(raw(tokens), pages, salt)
            assert present == (count if expected == len(tokens) else expected // size)
            for i in range(present, count):
                holds[pages[i]] = (salt, tokens[: (i + 1) * size], i * size)
            naive |= {(salt, tuple(tokens[:n])) for n in range(len(tokens) + 1)}
            pool.release(pages)  # the caller's own references
            remember(tree, asked, answers)
        assert tree.num_pages == tree.evictable == pool.num_pages - pool.free
        in_tree = [page for node in tree.nodes() for page in node.pages]
        assert len(in_tree) == len(set(in_tree)) == tree.num_pages
        for node in tree.nodes():
            assert node.parent is not None and sorted(node.children) == node.order
            assert not node.children or len(node.key) == len(node.pages) * size * 4, "inner edges are whole pages"
    total = tree.num_pages
    assert tree.evict(10**6) == total
    assert pool.free == pool.num_pages and list(tree.nodes()) == [] and tree._roots == {}


def remember(tree, asked, answers):
    """Two answers to one question need two versions of the tree."""
    for name, query in asked:
        found = tree.peek(raw(query), len(query), name)
        assert answers.setdefault((tree.version, name, query), found) == found


def grown(page_size=2):
    pool = BlockPool(100)
    tree = RadixTree(pool, page_size)

    def insert(tokens):
        pages = pool.allocate(-(-len(tokens) // page_size))
        node, _ = tree.insert(raw(tokens), pages)
        pool.release(pages)
        return node

    return pool, tree, insert


def pages_of(tree, tokens):
    return len(tree.match(raw(tokens), len(tokens)).pages)


def test_least_recently_used_leaf_goes_first_from_its_end():
    _, tree, insert = grown()
    insert([1, 1, 2, 2, 3, 3])
    insert([1, 1, 5, 5])
    tree.match(raw([1, 1, 2, 2, 3, 3]), 9)  # the first one is the younger now
    assert tree.evict(1) == 1
    assert pages_of(tree, [1, 1, 5, 5]) == 1
    assert tree.evict(1) == 1
    assert pages_of(tree, [1, 1, 2, 2, 3, 3]) == 2, "evicted from the end, the prefix stays"


def test_what_is_new_goes_after_what_is_old():
    _, tree, insert = grown()
    insert([1, 1])
    tree.match(raw([1, 1]), 2)
    insert([5, 5])
    assert tree.evict(1) == 1
    assert (pages_of(tree, [1, 1]), pages_of(tree, [5, 5])) == (0, 1)


def test_a_page_that_is_copied_has_been_used():
    _, tree, insert = grown(page_size=4)
    insert([1, 2, 3, 4])
    insert([5, 6, 7, 8])
    assert tree.match(raw([1, 2, 9, 9]), 4).partial == 2
    assert tree.evict(1) == 1
    assert (pages_of(tree, [1, 2, 3, 4]), pages_of(tree, [5, 6, 7, 8])) == (1, 0)


def test_a_locked_page_stays_when_a_longer_one_comes():
    pool, tree, insert = grown(page_size=4)
    node = insert([1, 2])
    tree.lock(node)
    insert([1, 2, 3])
    assert tree.num_pages == 2 and pool.references(node.pages[0]) == 1
    tree.unlock(node)
    assert tree.evict(9) == 2 and pool.free == pool.num_pages


def test_locked_paths_are_never_evicted():
    _, tree, insert = grown()
    node = insert([1, 1, 2, 2])
    insert([1, 1, 9, 9])
    tree.lock(node)
    assert tree.evictable == 1
    assert tree.evict(100) == 1
    assert pages_of(tree, [1, 1, 2, 2]) == 2
    tree.unlock(node)
    assert tree.evict(100) == 2
    with pytest.raises(ValueError, match="unlocked more often"):
        tree.unlock(grown()[2]([1, 1]))


def test_a_lock_survives_the_split_of_its_edge():
    _, tree, insert = grown()
    node = insert([1, 1, 2, 2, 3, 3, 4, 4])
    tree.lock(node)
    insert([1, 1, 2, 2, 7, 7])
    assert tree.evict(100) == 1
    assert pages_of(tree, [1, 1, 2, 2, 3, 3, 4, 4]) == 4
    tree.unlock(node)
    assert tree.evictable == 4 == tree.num_pages


def test_a_match_inside_a_page_names_the_page_that_shares_most():
    _, tree, insert = grown(page_size=4)
    insert([1, 2, 3, 4, 5, 6, 7, 8])
    node = insert([1, 2, 9, 9, 9])
    match = tree.match(raw([1, 2, 9, 9, 7]), 5)
    assert (match.partial == 0 and match.node is node.parent) or len(match.pages) == 1
    match = tree.match(raw([1, 2, 9, 5, 5]), 5)
    assert (match.pages, match.partial) == ([], 3)
    match = tree.match(raw([1, 2, 3, 4, 5, 6, 0]), 7)
    assert len(match.pages) == 1 and match.partial == 2
    assert tree.match(raw([1, 2, 3, 4, 5, 6, 0]), 5).partial == 1, "never more than asked for"


def test_a_longer_answer_replaces_the_partly_filled_page_that_it_begins_with():
    pool, tree, insert = grown(page_size=4)
    insert([1, 2, 3, 4, 5])
    assert tree.num_pages == 2
    insert([1, 2, 3, 4, 5, 6, 7])
    assert tree.num_pages == 2 == pool.num_pages - pool.free
    insert([1, 2, 3, 4, 5, 6])
    assert tree.num_pages == 2, "a shorter one adds nothing"


def test_insert_refuses_pages_that_the_tokens_do_not_fill():
    _, tree, _ = grown()
    with pytest.raises(ValueError, match="do not fill 2 pages"):
        tree.insert(raw([1, 1]), [0, 1])


def test_a_long_edge_that_differs_anywhere_is_cut_exactly_there():
    pool = BlockPool(4096)
    tree = RadixTree(pool, 1)
    tokens = list(range(2000))
    pages = pool.allocate(2000)
    tree.insert(raw(tokens), pages)
    for at in (0, 1, 2, 999, 1000, 1023, 1024, 1025, 1998, 1999):
        other = [*tokens[:at], -1, *tokens[at + 1 :]]
        assert tree.match(raw(other), 4000).pages == pages[:at]


def test_a_sequence_inserted_bit_by_bit_is_one_edge():
    pool, tree, insert = grown()
    node = insert([1, 1])
    tree.lock(node)
    pages = [*node.pages, *pool.allocate(2)]
    again, present = tree.insert(raw([1, 1, 2, 2, 3, 3]), pages, "", own=node)
    pool.release(pages[1:])
    assert again is node and present == 1 and list(tree.nodes()) == [node]
    assert tree.num_pages == 3 and tree.evictable == 0, "it is locked as a whole"
    tree.unlock(node)
    assert tree.evictable == 3 == tree.evict(9)
    assert pool.free == pool.num_pages


def test_the_heaps_are_tidied_as_often_as_they_double(monkeypatch):
    tidied = []
    monkeypatch.setattr(RadixTree, "_tidy", lambda tree, heap: tidied.append(len(heap)))
    pool = BlockPool(3000)
    tree = RadixTree(pool, 1)
    for token in range(3000):
        tree.insert(raw([token]), pool.allocate(1))
    assert [length for length in tidied if length] == [65, 131, 263, 527, 1055, 2111]


def test_an_edge_that_somebody_else_has_locked_does_not_grow():
    """The other holder's pages end where its lock ends."""
    _, tree, insert = grown()
    node = insert([1, 1])
    tree.lock(node)
    child = insert([1, 1, 2, 2])  # not by the one who has locked it
    assert child is not node and child.parent is node
    assert tree.evict(9) == 1 and pages_of(tree, [1, 1, 2, 2]) == 1
