"""What the tokenizer does about clients that are gone, silent, or do not read."""

import pytest

from common.messages import Abort, Beat, ErrorCode, Finish, GetStats, Stats, TextBatch, Tokenize
from tests.unit.frontend_world import World, request, run, text_batch
from tokenizer_proc import clients as clients_module
from tokenizer_proc.clients import Sent


def test_requests_of_a_client_that_is_gone_are_aborted() -> None:
    async def test() -> None:
        world = World()
        for rid in (1, 2):
            world.receive(request(rid))
        world.receive(request(1), b"b")
        await world.settle()
        gone = [m.rid for m in world.scheduler[:2]]  # type: ignore[attr-defined]
        world.state[b"a"] = Sent.GONE
        world.frontend.beat()
        assert world.scheduler[3:] == [Abort(rid) for rid in gone]
        assert world.answers == {b"b": [Beat()]}
        world.frontend.on_detokenizer(text_batch(gone[0], "late"))
        assert b"a" not in world.answers
        world.state[b"b"] = Sent.FULL
        world.frontend.on_detokenizer(text_batch(world.added[2].rid, "kept"))
        assert world.frontend.has_backlog
        world.state[b"b"] = Sent.GONE
        world.frontend.flush()
        assert world.scheduler[-1] == Abort(world.added[2].rid) and not world.frontend.has_backlog

    run(test)


def test_beats_are_for_silent_clients_with_live_requests() -> None:
    async def test() -> None:
        world = World()
        world.receive(request(1))
        world.receive(request(1), b"b")
        await world.settle()
        rid = world.live_rid()
        world.frontend.on_detokenizer(text_batch(rid, "x"))
        world.frontend.beat()
        assert [type(m) for m in world.answers[b"a"]] == [Beat]
        assert [type(m) for m in world.answers[b"b"]] == [TextBatch]
        world.frontend.beat()
        assert [type(m) for m in world.answers[b"b"]] == [TextBatch, Beat]
        assert [type(m) for m in world.answers[b"a"]] == [Beat, Beat], "a beat itself does not count"
        world.frontend.on_detokenizer(text_batch(rid, "x", Finish.STOP))
        world.frontend.beat()
        world.frontend.beat()
        assert [type(m) for m in world.answers[b"b"]] == [TextBatch, Beat, TextBatch]

    run(test)


def test_a_client_that_does_not_read_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients_module, "MAX_BACKLOG_MESSAGES", 2)

    async def test() -> None:
        world = World()
        world.receive(request(1))
        world.receive(request(2))
        world.receive(request(1), b"b")
        await world.settle()
        first, second, other = (m.rid for m in world.scheduler)  # type: ignore[attr-defined]
        world.state[b"a"] = Sent.FULL
        for _ in range(2):
            world.frontend.on_detokenizer(text_batch(first, "t"))
            world.frontend.on_detokenizer(text_batch(other, "t"))
        assert len(world.scheduler) == 3
        world.frontend.on_detokenizer(text_batch(second, "end", Finish.LENGTH))
        assert world.scheduler[3:] == [Abort(first)]
        world.receive(request(3))
        world.receive(GetStats(4))
        world.receive(Tokenize(5, "x", None))
        assert len(world.scheduler) == 4 and len(world.answers[b"b"]) == 2
        world.state[b"a"] = Sent.YES
        world.frontend.flush()
        texts, end, *refused = world.answers[b"a"][:2], *world.answers[b"a"][2:]
        assert [m.texts for m in texts] == [("t",), ("t",)]
        assert (list(end.rids), end.finish) == ([2], bytes([Finish.LENGTH]))
        assert [(m.rid, m.code) for m in refused] == [(rid, ErrorCode.OVERLOADED) for rid in (1, 3, 5)]
        world.receive(GetStats(4))
        world.frontend.on_detokenizer(Stats(world.scheduler[-1].query))  # type: ignore[attr-defined]
        assert world.answers[b"a"][-1].values["tokenizer.ignored_frames"] == 1, "the question from before"

    run(test)


def test_a_client_that_only_talks_is_not_answered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients_module, "MAX_BACKLOG_MESSAGES", 2)

    async def test() -> None:
        world = World()
        world.frontend.drain()
        world.state[b"a"] = Sent.FULL
        for rid in range(20):
            world.receive(request(rid))
        world.state[b"a"] = Sent.YES
        world.frontend.flush()
        assert [m.rid for m in world.answers[b"a"]] == list(range(9)), "what it was told before is kept"
        world.receive(GetStats(4))
        world.frontend.on_detokenizer(Stats(world.scheduler[-1].query))  # type: ignore[attr-defined]
        assert world.answers[b"a"][-1].values["tokenizer.ignored_frames"] == 20 - 9

    run(test)
