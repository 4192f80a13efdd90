"""The scheduler decides for itself what it admits: it relies on nobody's checks."""

import pytest
from hypothesis import given

from common.codec import FrameError, decode, encode
from common.messages import AddRequest, ErrorCode, RequestError, ints
from common.sampling_params import DrawParams, LogitEdits
from tests.paper_worker import solo_output
from tests.rig import Rig
from tests.unit.wire_strategies import messages_of


@pytest.mark.parametrize(
    ("msg", "code", "field", "limit"),
    [
        ({"prompt": ints()}, ErrorCode.INVALID, "prompt", 1),
        ({"prompt": ints(*range(40))}, ErrorCode.TOO_LONG, "prompt", 40),
        ({"prompt": ints(1, 50)}, ErrorCode.INVALID, "prompt", 49),
        ({"draw": DrawParams(edits=LogitEdits(logit_bias={50: 1.0}))}, ErrorCode.INVALID, "logit_bias", 49),
        ({"draw": DrawParams(edits=LogitEdits(ends=ints(50)))}, ErrorCode.INVALID, "stop_token_ids", 49),
    ],
)
def test_what_the_workers_could_not_do_is_refused(
    msg: dict[str, object], code: ErrorCode, field: str, limit: int
) -> None:
    rig = Rig(context=40, vocab=50)
    base = {"rid": 1, "prompt": ints(1, 2), "max_tokens": 5, "stop_token_ids": ints(), "draw": DrawParams()}
    (error,) = rig.scheduler.handle(AddRequest(**base | msg), 1)  # type: ignore[arg-type]
    assert isinstance(error, RequestError) and (error.code, error.field, error.limit) == (code, field, limit)
    assert not rig.scheduler.has_work


def test_a_full_queue_and_an_id_in_use() -> None:
    rig = Rig(max_waiting=3, max_running=1)
    rig.add(0, [1, 2], 50)
    rig.step()
    for rid in range(1, 4):
        assert rig.add(rid, [rid], 5) == []
    (full,) = rig.add(4, [4], 5)
    assert full.code == ErrorCode.OVERLOADED and full.limit == 3
    assert rig.add(5, [5], 5, waited_ms=1) == [], "it had passed the limit before"
    (twice,) = rig.add(1, [1], 5)
    assert twice.code == ErrorCode.INTERNAL
    rig.run()
    assert rig.out[1] == solo_output([1], 5), "a replay has not touched the first one"


def test_an_answer_is_no_longer_than_what_fits() -> None:
    rig = Rig(context=10)
    rig.add(1, [1, 2, 3], 2**20)
    rig.run()
    assert len(rig.out[1]) == 7


@given(messages_of(AddRequest))
def test_whatever_the_wire_lets_pass_is_served_or_refused(msg: AddRequest) -> None:
    """Straight to the scheduler: nothing raises, and every request ends."""
    rig = Rig(context=64, vocab=50)
    try:
        decoded = decode(encode(msg), {AddRequest})
    except FrameError:
        return
    rig.take(rig.scheduler.handle(decoded, rig.now))
    if rig.errors:
        assert not rig.scheduler.has_work
        return
    assert max(msg.prompt) < 50
    if msg.grammar is None and msg.draw.prompt_logprobs is None:
        rig.run()
        assert not rig.scheduler.has_work
