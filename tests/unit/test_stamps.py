"""Stamps: a partner's frames are heard once and in order, and what is missing or damaged is known."""

from collections import Counter

import zmq
from hypothesis import given
from hypothesis import strategies as st

from common.codec import encode
from common.messages import Abort, AddRequest, GetStats, RequestError, Text, TextBatch, ints
from common.sampling_params import DrawParams
from common.sockets import Inbox
from common.stamps import Lost, StampCheck, Stamper, Verdict, conversation

HERE = "ipc:///run/scheduler-3.sock"


def inbox(*senders: str) -> Inbox:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    with context.socket(zmq.PULL) as socket:  # only `parse` is used
        return Inbox(socket, Abort, AddRequest, GetStats, senders=senders or ("tokenizer",), address=HERE)


def test_each_sender_counts_for_itself() -> None:
    box = inbox("tokenizer", "gateway")
    first, second = Stamper("tokenizer", HERE), Stamper("gateway", HERE)
    for n in range(3):
        assert box.parse(first.stamp() + encode(Abort(n))) == Abort(n)
        assert box.parse(second.stamp() + encode(Abort(n))) == Abort(n)
    assert box.refused.total == 0


def test_what_is_nobodys_or_old_is_refused_and_changes_nothing() -> None:
    box, stamper = inbox(), Stamper("tokenizer", HERE)
    stamp = stamper.stamp()
    old = stamp + encode(Abort(0))
    assert box.parse(old) == Abort(0)
    other_term = Stamper("tokenizer", HERE.replace("3", "2")).stamp()
    frame = encode(Abort(1))
    for stranger in (old, other_term + frame, frame, bytes(16) + frame, stamp, stamp + frame, stamp[:-1], b""):
        assert box.parse(stranger) is None
    assert box.refused.by_cause == Counter(replayed=3, foreign=5)
    late = Stamper("tokenizer", HERE)
    for _ in range(5):
        late.stamp()
    assert box.parse(late.stamp() + b"\xc1") is None, "no frame of ours"
    assert box.parse(stamper.stamp() + frame) == Abort(1)


def test_a_frame_that_cannot_be_read_is_told_with_its_requests_and_ends_the_conversation() -> None:
    box, stamper = inbox(), Stamper("tokenizer", HERE)
    frame = bytearray(encode(AddRequest(7, ints(1), 5, ints(), DrawParams())))
    frame[4] = 0xC3  # the prompt is a bool now, and what follows is too much
    lost = box.parse(stamper.stamp() + bytes(frame))
    assert isinstance(lost, Lost) and lost.sender == "tokenizer"
    assert box.parse(stamper.stamp() + encode(Abort(1))) is None, "the rest makes no sense without it"
    assert box.refused.total == 1


def test_missing_frames_are_told_at_the_next_one() -> None:
    box, stamper = inbox(), Stamper("tokenizer", HERE)
    stamper.stamp()
    lost = box.parse(stamper.stamp() + encode(Abort(1)))
    assert isinstance(lost, Lost) and "missing" in lost.problem and not lost.rids


def test_requests_of_an_unreadable_batch_are_named() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    with context.socket(zmq.DEALER) as socket:
        box = Inbox(socket, TextBatch, RequestError, private=True)
    assert box.parse(encode(Text(1, "other"))) is None, "perhaps of a newer version"
    good = encode(RequestError(5, 1, "x"))
    bad = good.replace(b"\xa1x", b"\xc3")
    lost = box.parse(bad)
    assert isinstance(lost, Lost) and lost.rids == (5,) and "problem" in lost.problem
    assert box.parse(good) == RequestError(5, 1, "x"), "a client's connection goes on"


def test_conversations_have_names_of_their_own() -> None:
    names = {conversation(who, f"ipc:///a/{where}") for who in ("x", "y") for where in ("s-0.sock", "s-1.sock")}
    assert len(names) == 4


@given(st.lists(st.integers(0, 6), max_size=30))
def test_numbers_are_taken_once_in_order(numbers: list[int]) -> None:
    check, stamps = StampCheck(HERE, ["a"]), []
    stamper = Stamper("a", HERE)
    stamps = [stamper.stamp() for _ in range(7)]
    due = 0
    for number in numbers:
        verdict, sender = check.check(stamps[number])
        assert sender == "a"
        assert verdict is (Verdict.NEXT if number == due else Verdict.AGAIN if number < due else Verdict.LATER)
        if verdict is Verdict.NEXT:
            check.take(stamps[number])
            due += 1
