"""Stop strings against a definition that looks at the whole text."""

from itertools import permutations, product

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tokenizer_proc.stop_strings import StopMatcher

TEXT = st.text("ab.", max_size=40)
STOPS = st.lists(st.text("ab.", min_size=1, max_size=6), max_size=4)


def expected(text: str, stops: list[str], least: int = 0) -> tuple[str, str | None]:
    """The match that ends first, but after `least` characters; of those the one that starts first."""
    ends = [(end, start) for end in range(least + 1, len(text) + 1) for start in range(end) if text[start:end] in stops]
    end, start = min(ends, default=(0, 0))
    return (text[:start], text[start:end]) if ends else (text, None)


def cut(text: str, data: st.DataObject) -> list[str]:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@settings(max_examples=examples(600), deadline=None)
@given(TEXT, STOPS, st.data())
def test_the_result_is_the_same_however_the_text_is_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    deltas = cut(text, data)
    free = data.draw(st.integers(0, len(deltas)))  # deltas in which no stop string may end
    matcher = StopMatcher(stops)
    shown, stopped = "", None
    for i, delta in enumerate(deltas):
        part, stopped = matcher.push(delta, may_stop=i >= free)
        shown += part
        if stopped is not None:
            break
    if stopped is None:
        shown += matcher.flush()
    assert (shown, stopped) == expected(text, stops, sum(map(len, deltas[:free])))


@settings(max_examples=examples(600), deadline=None)
@given(TEXT, STOPS, st.data())
def test_a_stop_that_is_shown_ends_the_same_text_and_holds_nothing(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    deltas = cut(text, data)
    free = data.draw(st.integers(0, len(deltas)))
    matcher = StopMatcher(stops, shows_stop=True)
    shown, stopped, seen = "", None, ""
    for i, delta in enumerate(deltas):
        part, stopped = matcher.push(delta, may_stop=i >= free)
        shown += part
        seen += delta
        if stopped is not None:
            break
        assert shown == seen and matcher.flush() == ""
    before, found = expected(text, stops, sum(map(len, deltas[:free])))
    assert (shown, stopped) == (before + (found or ""), found)


@settings(max_examples=examples(600), deadline=None)
@given(TEXT, STOPS, st.data())
def test_exactly_what_could_become_a_stop_is_held(text: str, stops: list[str], data: st.DataObject) -> None:
    matcher = StopMatcher(stops)
    seen = shown = ""
    for delta in cut(text, data):
        part, stopped = matcher.push(delta)
        if stopped:
            return
        seen += delta
        shown += part
        unsure = [n for n in range(len(seen) + 1) if any(s.startswith(seen[len(seen) - n :]) for s in stops)]
        assert shown == seen[: len(seen) - max(unsure, default=0)]


def test_a_stop_that_repeats_itself_is_found_behind_each_of_its_beginnings() -> None:
    for stop in ("".join(letters) for size in range(1, 9) for letters in product("ab", repeat=size)):
        for begun in range(len(stop)):
            text = stop[:begun] + stop
            assert StopMatcher([stop]).push(text) == (text[: text.index(stop)], stop)


def test_a_stop_that_is_overtaken_is_shown() -> None:
    matcher = StopMatcher(["aab"])
    assert matcher.push("aa") == ("", None)
    assert matcher.push("a") == ("a", None)
    assert matcher.push("c") == ("aac", None)
    assert matcher.push("xaab rest") == ("x", "aab")


def test_the_longest_of_those_that_end_together() -> None:
    for stops in permutations(["b", "ab", "xab"]):
        assert StopMatcher(stops).push("__xab") == ("__", "xab")
    assert StopMatcher(["abcd", "bc"]).push("abcd") == ("a", "bc")


def test_without_stop_strings_all_is_shown_at_once() -> None:
    matcher = StopMatcher([])
    assert matcher.push("text") == ("text", None)
    assert matcher.flush() == ""


def test_held_text_is_bounded_by_the_longest_stop() -> None:
    """So that the cost of a delta does not grow with the text before it."""
    matcher = StopMatcher(["ab" * 200 + "c"])
    longest = 0
    shown = 0
    for n in range(1, 5001):
        text, stopped = matcher.push("ab")
        assert not stopped
        shown += len(text)
        longest = max(longest, 2 * n - shown)
    assert longest == 400
