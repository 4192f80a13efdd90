"""Guesses from the tokens before, against a plain search."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_proc.prompt_lookup import AT_ONCE, CHAIN, PATIENCE, SELDOM, PromptLookup


def follow(tokens: list[int], start: int, shortest: int, longest: int) -> tuple[PromptLookup, array]:
    """A lookup that has seen `start` tokens as a prompt and the others one by one."""
    known = array("i", tokens[:start])
    lookup = PromptLookup(known, shortest, longest)
    lookup.search()
    for token in tokens[start:]:
        known.append(token)
        lookup.took()
    return lookup, known


def matches(tokens: list[int], shortest: int, longest: int) -> list[tuple[int, int]]:
    """Every earlier end of a run that equals the newest tokens: its length up to `longest`, where it ends."""
    found = []
    for end in range(shortest, len(tokens)):
        length = 0
        while length < min(longest, end) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        if length >= shortest:
            found.append((length, end))
    return found


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=60),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(1, 60),
)
def test_a_search_finds_the_longest_of_the_latest_matches(tokens, shortest, more, start):
    start = min(start, len(tokens))
    lookup, known = follow(tokens, start, shortest, shortest + more)
    lookup.search()
    # chains hold whatever has the same hash: of so few words, the same n-gram
    candidates = sorted(matches(tokens, shortest, shortest + more), key=lambda m: -m[1])[:CHAIN]
    best = max(candidates, default=(0, -1))
    assert (lookup.length, lookup.at) == best
    if lookup.at >= 0:
        expected = list(known)
        while len(expected) < len(known) + 9:
            expected.append(expected[lookup.at + len(expected) - len(known)])
        for count in range(1, 10):
            assert list(lookup.guesses(count)) == expected[len(known) : len(known) + count]


def test_a_guess_goes_on_while_it_is_right():
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    lookup, known = follow([*text, 9, 1, 2], 9, 2, 4)
    assert (lookup.at, lookup.length) == (2, 2)
    for step, token in enumerate([3, 4, 5], 1):
        known.append(token)
        assert lookup.took() is True
        assert (lookup.at, lookup.length) == (2 + step, 2 + step)
    assert list(lookup.guesses(3)) == [6, 7, 8]
    known.append(99)
    assert lookup.took() is False
    assert lookup.at == -1
    known.append(98)
    assert lookup.took() is None


def test_a_loop_is_guessed_to_its_end():
    lookup, _ = follow([7, 1, 2, 1, 2], 1, 2, 3)
    assert list(lookup.guesses(7)) == [1, 2, 1, 2, 1, 2, 1]


def test_a_long_prompt_is_indexed_bit_by_bit_and_the_table_grows():
    text = [i * i % 1009 for i in range(3000)]
    known = array("i", text[:300])
    lookup = PromptLookup(known, 2, 4)
    assert not lookup.index(100)
    known.extend(text[300:])
    known.extend(text[5:9])
    while not lookup.index(100):
        assert lookup.at == -1
    lookup.search()
    assert list(lookup.guesses(5)) == text[9:14]


def test_the_latest_of_equal_matches_is_taken():
    lookup, _ = follow([1, 2, 3, 1, 2, 4, 1, 2], 1, 2, 4)
    assert list(lookup.guesses(1)) == [4]


def test_a_table_that_is_full_is_filled_anew_bit_by_bit():
    tokens = array("i", range(20_000))
    lookup = PromptLookup(tokens, 2, 4)
    while not lookup.index():
        pass
    entered = []
    for token in range(20_000, 80_000):
        tokens.append(token)
        before = lookup._next
        lookup.took()
        entered.append(lookup._next - before)
    assert max(entered) <= AT_ONCE and min(entered) < 0, "it was begun anew"
    tokens.extend(range(79_990, 80_000))
    lookup.search()
    assert lookup.at == 80_000


def test_searches_in_vain_become_seldom_until_one_finds_something(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = []
    search = PromptLookup.search
    monkeypatch.setattr(PromptLookup, "search", lambda self: (searched.append(len(tokens)), search(self)))
    tokens = array("i", range(10))
    lookup = PromptLookup(tokens, 2, 4)

    def append(*more: int) -> list[int]:
        """After how many tokens it searched."""
        searched.clear()
        for token in more:
            tokens.append(token)
            lookup.took()
        return searched

    assert append(*range(10, 210)) == [*range(11, 11 + PATIENCE), *range(11 + PATIENCE + 1, 211, SELDOM)]
    assert append(0, 1, 2) == [212] and tokens[lookup.at] == 3
    assert append(999, *range(1000, 1010)) == [*range(214, 214 + 11)], "as often as at first"
