"""The request ledger."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.logprobs import Logprobs
from common.messages import Finish, Generate, ints
from common.sampling_params import SamplingParams
from tokenizer_proc.ledger import Entry, Ledger
from tokenizer_proc.rows import Scores, TextRow


def request(rid: int, seed: int | None = None, **more: int | str) -> Generate:
    return Generate(rid, None, ints(1, 2), None, SamplingParams(seed=seed), **more)  # type: ignore[arg-type]


def seeds(entry: Entry) -> list[int]:
    return [choice.seed for choice in entry.choices]


def test_a_missing_seed_is_drawn_and_a_given_one_kept() -> None:
    ledger = Ledger(lambda: 99)
    assert seeds(ledger.open(b"a", request(1), 0)) == [99]
    assert seeds(ledger.open(b"a", request(2, seed=5), 0)) == [5]
    assert seeds(ledger.open(b"a", request(3, seed=0), 0)) == [0]


def test_every_choice_has_its_own_id_and_the_seeds_count_up() -> None:
    ledger = Ledger(lambda: 2**63 - 2)
    first, second = ledger.open(b"a", request(1, seed=7, n=3), 0), ledger.open(b"a", request(2, n=3), 0)
    assert seeds(first) == [7, 8, 9]
    assert seeds(second) == [2**63 - 2, 2**63 - 1, 0], "seeds begin again after the largest"
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len({choice.rid for entry in (first, second) for choice in entry.choices}) == 6
    assert (len(ledger), ledger.choices) == (2, 6)


def test_an_entry_keeps_what_was_asked_for_and_counts_from_its_arrival() -> None:
    msg = request(1, cache_salt="s", priority=-3, deadline_ms=20)
    entry = Ledger(lambda: 0).open(b"a", msg, 5_000_000)
    assert (entry.cache_salt, entry.priority, entry.stream, entry.params) == ("s", -3, True, msg.params)
    assert entry.time_left(5_000_000) == 20_000_000
    assert entry.time_left(26_000_000) == -1_000_000


def test_a_request_lives_until_its_last_choice_has_ended() -> None:
    ledger = Ledger(lambda: 0)
    entry = ledger.open(b"a", request(1, n=3), 0)
    first, second, third = entry.choices
    ledger.end(second)
    assert entry.choices == [first, third] and ledger.holds(entry) and ledger.get(second.rid) is None
    ledger.end(first)
    assert (len(ledger), ledger.choices) == (1, 1) and ledger.find(b"a", 1) is entry
    ledger.end(third)
    assert (len(ledger), ledger.choices, ledger.owners) == (0, 0, []) and not ledger.holds(entry)
    successor = ledger.open(b"a", request(1), 0)
    assert ledger.holds(successor) and not ledger.holds(entry), "the id is another request's now"


def test_closing_a_request_tells_which_choices_were_live() -> None:
    ledger = Ledger(lambda: 0)
    entry = ledger.open(b"a", request(1, n=3), 0)
    other = ledger.open(b"b", request(1), 0)
    ended, *live = entry.choices
    ledger.end(ended)
    ledger.close(entry)
    assert entry.choices == live and ledger.choices == 1 and ledger.holds(other)


def test_an_answer_holds_the_bytes_of_its_own_tokens() -> None:
    """A batch has those of all rows: to hold them all would grow with the square of the answers under way."""
    (choice,) = Ledger(lambda: 0).open(b"a", request(1, stream=False), 0).choices
    named = Logprobs(ints(3), array("f", [-1]), ints(2), ints(1), ints(4), array("f", [-0.5]))
    row = TextRow(choice.rid, ints(3), "x", Finish.NONE, 0, Scores(named, named), None, 0)
    of_batch = {token: bytes([token]) for token in range(100)}
    choice.hold(row, of_batch)
    *_, token_bytes = choice.release()
    assert token_bytes == {3: b"\3", 4: b"\4"}


def test_ids_are_unique_over_clients_and_not_reused_at_once() -> None:
    ledger = Ledger(lambda: 0)
    (first,), (second,) = (ledger.open(owner, request(1), 0).choices for owner in (b"a", b"b"))
    assert first.rid != second.rid
    ledger.close(first.entry)
    assert ledger.open(b"a", request(1), 0).choices[0].rid not in (first.rid, second.rid)


def test_an_id_in_use_is_refused() -> None:
    ledger = Ledger(lambda: 0)
    ledger.open(b"a", request(1), 0)
    with pytest.raises(ValueError, match="in use"):
        ledger.open(b"a", request(1), 0)
    assert len(ledger) == ledger.choices == 1


def test_ids_begin_again_after_the_largest_and_skip_live_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenizer_proc.ledger.MAX_RID", 3)
    ledger = Ledger(lambda: 0)
    entries = [ledger.open(b"a", request(n), 0) for n in range(4)]
    ledger.close(entries[1])
    ledger.close(entries[3])
    assert [choice.rid for choice in ledger.open(b"b", request(0, n=2), 0).choices] == [1, 3]


@given(
    st.lists(
        st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.integers(0, 3), st.integers(0, 4), st.integers(1, 3)),
        max_size=60,
    )
)
def test_all_indexes_agree_with_plain_lists(events: list[tuple[bytes, int, int, int]]) -> None:
    ledger = Ledger(lambda: 0)
    model: dict[tuple[bytes, int], tuple[Entry, list[int]]] = {}  # entry, and the indexes of its live choices
    for owner, client_rid, what, n in events:
        entry = ledger.find(owner, client_rid)
        known, live = model.get((owner, client_rid), (None, []))
        assert entry is known
        if what == 4:
            gone = [model.pop(key)[0] for key in list(model) if key[0] == owner]
            assert ledger.close_all_of(owner, ("x", "y")) == gone
        elif entry is None:
            model[owner, client_rid] = ledger.open(owner, request(client_rid, n=n), 0), list(range(n))
        elif what == 3:
            ledger.close(entry)
            del model[owner, client_rid]
        else:
            at = (n - 1) % len(live)
            ledger.end(entry.choices[at])
            del live[at]
            if not live:
                del model[owner, client_rid]
        assert len(ledger) == len(model)
        assert ledger.choices == sum(len(live) for _, live in model.values())
        assert sorted(ledger.owners) == sorted({key[0] for key in model})
        for entry, live in model.values():
            assert ledger.holds(entry) and [choice.index for choice in entry.choices] == live
            assert all(ledger.get(choice.rid) is choice for choice in entry.choices)
