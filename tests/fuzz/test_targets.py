"""The fuzzing targets with what they begin from, and with hypothesis' bytes; tests/fuzz/wire.py goes deeper."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.fuzz.targets import TARGETS
from tests.fuzz.wire import seeds


@pytest.mark.parametrize("name", TARGETS)
def test_targets_stand(name: str) -> None:
    target, chance = TARGETS[name], random.Random(name)
    for seed in seeds(name):
        target(seed)
        for _ in range(30):
            at = chance.randrange(len(seed))
            target(seed[:at] + bytes([chance.randrange(256)]) + seed[at + chance.randrange(2) :])

    @settings(max_examples=examples(150))
    @given(st.binary(max_size=200))
    def any_bytes(data: bytes) -> None:
        target(data)

    any_bytes()


def test_a_target_notices_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fuzz.targets.decode", lambda data, allowed: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        TARGETS["frame"](b"")
