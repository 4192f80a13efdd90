"""Which guesses stay: the longest run that equals what was drawn, and the token drawn after it."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from common.logprobs import LogprobRows, Logprobs
from worker_proc.verification import DraftRow, verify

WORDS = st.integers(0, 2)


def test_a_run_of_right_guesses_and_one_more() -> None:
    # a row of its own, a row with guesses 5 6 7 of which two are right, a row whose first guess is wrong, a row
    drawn = [1, 5, 6, 8, 9, 3, 4, 2]
    verdict = verify([DraftRow(4, 1, [5, 6, 7]), DraftRow(0, 5, [9])], drawn)
    assert verdict.accepted == [2, 0]
    assert verdict.kept == [0, 1, 2, 3, 5, 7]
    assert verdict.last == [0, 3, 5, 7]
    assert verdict.tokens(drawn) == [1, 5, 6, 8, 3, 2]


def test_all_guesses_right() -> None:
    verdict = verify([DraftRow(0, 0, [1, 2])], [1, 2, 3])
    assert (verdict.accepted, verdict.kept, verdict.last) == ([2], [0, 1, 2], [2])


@given(st.lists(st.tuples(st.lists(WORDS, max_size=4), st.lists(WORDS, min_size=5, max_size=5)), max_size=5))
def test_what_stays_is_what_one_token_at_a_time_gives(rows: list[tuple[list[int], list[int]]]) -> None:
    """Row by row: guesses, and what the model would draw at each position if all guesses before were right."""
    drafts, drawn, expected = [], [], []
    for slot, (guesses, answers) in enumerate(rows):
        if guesses:
            drafts.append(DraftRow(slot, len(drawn), guesses))
        drawn += answers[: len(guesses) + 1]
        for i, answer in enumerate(answers[: len(guesses) + 1]):
            expected.append(answer)
            if i == len(guesses) or answer != guesses[i]:
                break
    verdict = verify(drafts, drawn)
    assert verdict.tokens(drawn) == expected
    assert len(verdict.last) == len(rows)
    assert verdict.last == sorted(verdict.last) and set(verdict.last) <= set(verdict.kept)


def test_log_probabilities_follow_their_tokens() -> None:
    def entry(token: int) -> Logprobs:
        return Logprobs(array("i", [token]), array("f", [-1]), array("i", [1]), array("i", [0]), array("i"), array("f"))

    verdict = verify([DraftRow(0, 1, [7, 7])], [3, 7, 5, 6])
    rows = LogprobRows.of({1: entry(7), 2: entry(5), 3: entry(6)})
    found = verdict.logprobs(rows)
    assert found is not None
    assert {number: own.token_ids[0] for number, own in found.by_row().items()} == {1: 7, 2: 5}
    assert verdict.logprobs(None) is None
    assert verdict.numbers() == {0: 0, 1: 1, 2: 2}
