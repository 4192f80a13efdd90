"""Answers to clients that read slowly, not at all, or are gone."""

from collections import Counter

import pytest

from common.codec import decode, encode
from common.messages import Beat, ErrorCode, RequestError
from tokenizer_proc import clients as clients_module
from tokenizer_proc.clients import Clients, Delivery, Sent


class Peers:
    """In the place of the ROUTER socket: each peer takes as many messages as it has room for."""

    def __init__(self) -> None:
        self.room: Counter[bytes] = Counter()
        self.gone: set[bytes] = set()
        self.got: list[tuple[bytes, int]] = []

    def send(self, owner: bytes, frame: bytes) -> Sent:
        if owner in self.gone:
            return Sent.GONE
        if self.room[owner] == 0:
            return Sent.FULL
        self.room[owner] -= 1
        msg = decode(frame, {RequestError, Beat})
        self.got.append((owner, msg.rid if isinstance(msg, RequestError) else -1))
        return Sent.YES


def error(rid: int) -> RequestError:
    return RequestError(rid, ErrorCode.INVALID, "x" * 50)


@pytest.fixture
def peers() -> Peers:
    return Peers()


def test_order_is_kept_over_a_backlog_and_others_are_not_held_up(peers: Peers) -> None:
    clients = Clients(peers.send)
    peers.room.update({b"slow": 1, b"fast": 9})
    for rid in range(4):
        assert clients.send(b"slow", error(rid)) is Delivery.DONE
        assert clients.send(b"fast", error(rid)) is Delivery.DONE
    assert [rid for owner, rid in peers.got if owner == b"fast"] == [0, 1, 2, 3]
    assert clients.backlogs == 1
    peers.room[b"slow"] = 2
    assert clients.flush() == []
    assert clients.send(b"slow", error(4)) is Delivery.DONE
    peers.room[b"slow"] = 9
    assert clients.flush() == [] and clients.backlogs == 0
    assert [rid for owner, rid in peers.got if owner == b"slow"] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("bound", ["MAX_BACKLOG_MESSAGES", "MAX_BACKLOG_BYTES"])
def test_the_backlog_is_bounded_and_nothing_in_it_is_lost(
    peers: Peers, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(clients_module, bound, 3 if bound == "MAX_BACKLOG_MESSAGES" else 3 * 70)
    clients = Clients(peers.send)
    for rid in range(4):
        assert not clients.overflowing(b"a")
        assert clients.send(b"a", error(rid)) is (Delivery.DONE if rid < 3 else Delivery.OVERFLOW)
    assert clients.overflowing(b"a") and not clients.overflowing(b"b")
    assert clients.send(b"a", error(4)) is Delivery.OVERFLOW
    peers.room[b"a"] = 2
    clients.flush()
    assert not clients.overflowing(b"a"), "what was read counts no more"
    peers.room[b"a"] = 9
    clients.flush()
    assert not clients.overflowing(b"a")
    assert [rid for _, rid in peers.got] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("bound", ["MAX_BACKLOG_MESSAGES", "MAX_BACKLOG_BYTES"])
def test_who_is_deaf(peers: Peers, monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    """Messages that are few and large count, too."""
    monkeypatch.setattr(clients_module, bound, 3 if bound == "MAX_BACKLOG_MESSAGES" else 3 * len(encode(error(0))))
    clients = Clients(peers.send)
    deaf = []
    for rid in range(14):
        clients.send(b"a", error(rid))
        deaf.append(clients.deaf(b"a"))
    assert deaf == [False] * 12 + [True] * 2 and not clients.deaf(b"b")


def test_clients_that_are_gone(peers: Peers) -> None:
    clients = Clients(peers.send)
    clients.send(b"a", error(1))
    peers.gone.update({b"a", b"b"})
    assert clients.send(b"b", Beat()) is Delivery.GONE
    assert clients.flush() == [b"a"]
    clients.forget(b"a")
    assert clients.backlogs == 0


def test_who_got_something(peers: Peers) -> None:
    clients = Clients(peers.send)
    peers.room.update({b"a": 1})
    clients.send(b"a", error(1))
    clients.send(b"b", error(1))
    assert clients.take_fed() == {b"a"}
    peers.room[b"b"] = 1
    clients.flush()
    assert clients.take_fed() == {b"b"} and clients.take_fed() == set()
    peers.room[b"a"] = 1
    clients.send(b"a", error(2))
    clients.forget(b"a")
    assert clients.take_fed() == set(), "who is gone needs no more"
