"""Inbox and Outbox on real sockets: what is refused is counted, order is kept, a stalled peer is an error."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from common.codec import PROTOCOL_VERSION, Message, encode
from common.messages import Abort, Beat, ErrorCode, GetStats, RequestError
from common.sockets import HIGH_WATER_MARK, MAX_IPC_PATH, Endpoints, Inbox, Outbox, PeerStalled, open_socket
from common.stamps import Lost

WAIT_MS = 20_000


@pytest.fixture(scope="module")
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    yield made
    made.destroy(linger=0)


Pair = tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"]


@pytest.fixture
def pair(context: "zmq.Context[zmq.Socket[bytes]]", short_dir: Path) -> Iterator[Pair]:
    """A connected PUSH and PULL socket over ipc."""
    address = Endpoints(short_dir).scheduler(0)
    receiving = open_socket(context, zmq.PULL, bind=address)
    sending = open_socket(context, zmq.PUSH, connect=address)
    yield sending, receiving
    sending.close(linger=0)
    receiving.close(linger=0)


def receive(inbox: Inbox, until: Message) -> list[Message]:
    """Messages up to the one that ends the test, waiting for them."""
    found: list[Message] = []
    while until not in found:
        assert inbox.socket.poll(WAIT_MS), f"only {len(found)} messages came"
        found += inbox.drain()
    return found


def test_bad_frames_are_counted_and_the_rest_arrives(pair: Pair) -> None:
    sending, receiving = pair
    inbox = Inbox(receiving, Abort, max_frame=1000)
    bad = [
        b"",
        b"\xc1",
        encode(GetStats(1)),
        bytes(1001),
        encode(Abort(1))[:-1],
        bytes([0x93, PROTOCOL_VERSION + 1, Abort.TAG, 1]),
        bytes([0x93, PROTOCOL_VERSION, Abort.TAG, 0xFF]),
    ]
    for number, frame in enumerate(bad):
        sending.send(frame)
        sending.send(encode(Abort(number)))
    sending.send_multipart([b"each part", encode(Abort(98))])  # is a frame
    sending.send(encode(Abort(99)))
    assert receive(inbox, Abort(99)) == [*(Abort(n) for n in range(len(bad))), Abort(98), Abort(99)]
    causes = {"malformed": 4, "unknown": 1, "oversized": 1, "version": 1, "invalid": 1}
    assert (inbox.refused.by_cause, inbox.refused.total) == (causes, 8)


def test_what_a_partner_says_is_lost_rather_than_skipped(pair: Pair) -> None:
    """But for what another version says, perhaps, which nobody waits for."""
    inbox = Inbox(pair[1], RequestError, max_frame=1000, private=True)
    for problem, field in (("too large a frame", 999 * "x"), ("too long a field", 300 * "x")):
        lost = inbox.parse(encode(RequestError(7, ErrorCode.INTERNAL, problem, field)))
        assert isinstance(lost, Lost) and lost.rids == (7,), problem
    assert inbox.parse(encode(Abort(1))) is None and inbox.refused.total == 3


def test_random_frames_never_stop_an_inbox(pair: Pair) -> None:
    sending, receiving = pair
    inbox = Inbox(receiving, Abort, Beat)

    @settings(max_examples=50)
    @given(st.lists(st.binary(max_size=60), max_size=20))
    def check(frames: list[bytes]) -> None:
        before = inbox.refused.total
        for frame in frames:
            sending.send(frame)
        sending.send(encode(Abort(7)))
        passed = receive(inbox, Abort(7))
        assert len(passed) - 1 + inbox.refused.total - before == len(frames)

    check()


def test_a_frame_beyond_all_limits_costs_its_sender_the_connection_only(
    context: "zmq.Context[zmq.Socket[bytes]]", short_dir: Path
) -> None:
    """ZeroMQ cuts it off before it is in memory; a sender that behaves is served on, and the culprit may come back."""
    address = Endpoints(short_dir).frontend
    receiving = open_socket(context, zmq.PULL, bind=address, max_frame=1000)
    inbox = Inbox(receiving, Abort, max_frame=1000)
    good, culprit = (open_socket(context, zmq.PUSH, connect=address) for _ in range(2))
    monitor = culprit.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    culprit.send(encode(Abort(1)))
    assert receive(inbox, Abort(1)) == [Abort(1)]
    culprit.send(bytes(4001))
    assert monitor.poll(WAIT_MS), "the connection was not cut"
    good.send(encode(Abort(2)))
    assert receive(inbox, Abort(2)) == [Abort(2)]
    culprit.send(encode(Abort(3)))  # ZeroMQ connects again by itself
    assert receive(inbox, Abort(3)) == [Abort(3)]
    culprit.disable_monitor()
    for socket in (good, culprit, receiving):
        socket.close(linger=0)


def test_drain_takes_no_more_than_its_limit(pair: Pair) -> None:
    sending, receiving = pair
    inbox = Inbox(receiving, Abort)
    for number in range(10):
        sending.send(b"bad" if number == 1 else encode(Abort(number)))
    found: list[Message] = []
    while Abort(9) not in found:
        assert receiving.poll(WAIT_MS)
        batch = list(inbox.drain(limit=3))
        assert len(batch) <= 3
        found += batch
    assert found == [Abort(n) for n in range(10) if n != 1]
    assert list(inbox.drain()) == []


def test_outbox_keeps_order_with_a_slow_reader(pair: Pair) -> None:
    """More than ZeroMQ's own queues hold: the rest waits in the backlog, and nothing is lost or swapped."""
    sending, receiving = pair
    total = 4 * HIGH_WATER_MARK
    outbox = Outbox(sending, "reader", limit=total)
    for number in range(total):
        outbox.send(Abort(number))
    assert outbox.backlog > 0, "the queues took everything: the test needs more messages"
    inbox = Inbox(receiving, Abort)
    expected = 0
    while expected < total:
        assert receiving.poll(WAIT_MS)
        for msg in inbox.drain():
            assert msg == Abort(expected)
            expected += 1
        outbox.flush()
    assert outbox.backlog == 0


def test_outbox_raises_at_its_limit_and_names_the_peer(
    context: "zmq.Context[zmq.Socket[bytes]]", short_dir: Path
) -> None:
    """With nobody there, a PUSH socket that binds takes nothing at all."""
    sending = open_socket(context, zmq.PUSH, bind=Endpoints(short_dir).results(0))
    outbox = Outbox(sending, "worker-0", limit=5)
    for number in range(5):
        outbox.send(Abort(number))
    with pytest.raises(PeerStalled, match="worker-0"):
        outbox.send(Abort(5))
    receiving = open_socket(context, zmq.PULL, connect=Endpoints(short_dir).results(0))
    assert sending.poll(WAIT_MS, zmq.POLLOUT)
    outbox.flush()
    assert receive(Inbox(receiving, Abort), Abort(5)) == [Abort(n) for n in range(6)]
    sending.close(linger=0)
    receiving.close(linger=0)


def test_a_router_reports_a_peer_that_is_gone(context: "zmq.Context[zmq.Socket[bytes]]", short_dir: Path) -> None:
    router = open_socket(context, zmq.ROUTER, bind=Endpoints(short_dir).frontend)
    with pytest.raises(zmq.ZMQError) as caught:
        router.send_multipart([b"nobody", encode(Beat())], zmq.NOBLOCK)
    assert caught.value.errno == zmq.EHOSTUNREACH
    router.close(linger=0)


@pytest.mark.parametrize("kind", [zmq.PUSH, zmq.PULL, zmq.DEALER, zmq.ROUTER])
def test_every_socket_has_limits(context: "zmq.Context[zmq.Socket[bytes]]", kind: int) -> None:
    socket = open_socket(context, kind, max_frame=1000)
    assert socket.get(zmq.SNDHWM) == socket.get(zmq.RCVHWM) == HIGH_WATER_MARK
    assert socket.get(zmq.MAXMSGSIZE) == 4000
    assert 0 <= socket.get(zmq.LINGER) <= 1000
    socket.close()


def names(endpoints: Endpoints) -> list[str]:
    addresses = [endpoints.control, endpoints.frontend]
    for number in (0, 1, 10**6):
        addresses += [endpoints.tokenizer(number), endpoints.detokenizer(number), endpoints.scheduler(number)]
        addresses += [endpoints.results(number), endpoints.plan(0, number), endpoints.plan(9999, number)]
    return addresses


def test_endpoints_are_distinct_and_can_be_bound_in_the_longest_directory(
    context: "zmq.Context[zmq.Socket[bytes]]", short_dir: Path
) -> None:
    room = MAX_IPC_PATH - len("/detokenizer-1000000.sock") - len(str(short_dir)) - 1
    path = short_dir / ("d" * room)
    path.mkdir()
    addresses = names(Endpoints(path))
    assert len(set(addresses)) == len(addresses)
    for address in addresses:
        open_socket(context, zmq.PULL, bind=address).close()
    with pytest.raises(ValueError, match="too long for Unix sockets"):
        Endpoints(short_dir / ("d" * (room + 1)))
    with pytest.raises(ValueError, match="too long for Unix sockets"):
        Endpoints(short_dir / ("é" * (room - 5)))
    with pytest.raises(ValueError, match="must be a path in UTF-8"):
        Endpoints(short_dir / "d\udcff")
