"""The request ledger."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages import Generate, ints
from common.sampling_params import SamplingParams
from tokenizer_proc.ledger import Entry, Ledger


def request(rid: int, seed: int | None = None) -> Generate:
    return Generate(rid, None, ints(1, 2), None, SamplingParams(seed=seed))


def test_a_missing_seed_is_drawn_and_a_given_one_kept() -> None:
    ledger = Ledger(lambda: 99)
    assert ledger.open(b"a", request(1)).seed == 99
    assert ledger.open(b"a", request(2, seed=5)).seed == 5
    assert ledger.open(b"a", request(3, seed=0)).seed == 0


def test_ids_are_unique_over_clients_and_not_reused_at_once() -> None:
    ledger = Ledger(lambda: 0)
    first, second = ledger.open(b"a", request(1)), ledger.open(b"b", request(1))
    assert first.rid != second.rid
    ledger.close(first)
    assert ledger.open(b"a", request(1)).rid not in (first.rid, second.rid)


def test_an_id_in_use_is_refused() -> None:
    ledger = Ledger(lambda: 0)
    ledger.open(b"a", request(1))
    with pytest.raises(ValueError, match="in use"):
        ledger.open(b"a", request(1))
    assert len(ledger) == 1


def test_ids_begin_again_after_the_largest_and_skip_live_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenizer_proc.ledger.MAX_RID", 3)
    ledger = Ledger(lambda: 0)
    entries = [ledger.open(b"a", request(n)) for n in range(4)]
    ledger.close(entries[2])
    assert ledger.open(b"b", request(0)).rid == 2


@given(st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.integers(0, 3), st.integers(0, 2)), max_size=60))
def test_all_three_indexes_agree_with_a_plain_list(events: list[tuple[bytes, int, int]]) -> None:
    ledger = Ledger(lambda: 0)
    model: dict[tuple[bytes, int], Entry] = {}
    for owner, client_rid, what in events:
        entry = ledger.find(owner, client_rid)
        assert entry is model.get((owner, client_rid))
        if what == 2:
            gone = {key: model.pop(key) for key in list(model) if key[0] == owner}
            assert ledger.close_all_of(owner) == list(gone.values())
        elif entry is None:
            model[owner, client_rid] = ledger.open(owner, request(client_rid))
        elif what == 1:
            ledger.close(model.pop((owner, client_rid)))
        assert len(ledger) == len(model)
        assert sorted(ledger.owners) == sorted({key[0] for key in model})
        for entry in model.values():
            assert ledger.get(entry.rid) is entry
