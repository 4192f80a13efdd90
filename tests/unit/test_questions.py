"""Questions about tokens and about the cluster, through the Frontend without sockets."""

import asyncio
import threading
from dataclasses import replace

import pytest

from common.messages import (
    ChatMessage,
    Detokenize,
    ErrorCode,
    GetInfo,
    RequestError,
    Text,
    Tokenize,
    Tokens,
    ints,
)
from tests.unit.frontend_world import INFO, World, run, tokenizer
from tokenizer_proc import questions
from tokenizer_proc.clients import Sent
from tokenizer_proc.limits import Limits
from tokenizer_proc.prompt import PromptEncoder


def test_a_text_is_tokenized_and_detokenized() -> None:
    async def test() -> None:
        world = World()
        text = "a" * 40  # more tokens than the context window has
        world.receive(Tokenize(3, text, None, with_pieces=True))
        world.receive(Tokenize(4, "", None))
        await world.settle()
        tokens, empty = world.answers[b"a"]
        expected = tokenizer().encode(text)
        assert tokens == Tokens(3, ints(*expected.ids), tuple(expected.tokens)) and len(expected.ids) == 41
        assert empty == Tokens(4, ints(1))  # the tokenizer adds this token to every text
        world.receive(Detokenize(5, tokens.token_ids[1:]))
        await world.settle()
        assert world.answers[b"a"][-1] == Text(5, text)

    run(test)


def test_special_tokens() -> None:
    async def test() -> None:
        world = World()
        special = next(t for t in tokenizer().get_added_tokens_decoder().values() if t.special).content
        world.receive(Tokenize(1, special + "x", None, add_special_tokens=False))
        await world.settle()
        tokens = world.answers[b"a"][-1].token_ids
        for skip in (False, True):
            world.receive(Detokenize(2, tokens, skip_special_tokens=skip))
            await world.settle()
            assert world.answers[b"a"][-1] == Text(2, "x" if skip else special + "x")

    run(test)


def test_a_chat_is_rendered() -> None:
    async def test() -> None:
        world = World()
        world.receive(Tokenize(3, None, (ChatMessage("user", "hi"),)))
        await world.settle()
        assert world.answers[b"a"] == [Tokens(3, ints(*tokenizer().encode("hi").ids[1:]))]

    run(test)


@pytest.mark.parametrize(
    ("question", "code", "field"),
    [
        (Tokenize(7, "x" * 3000, None), ErrorCode.TOO_LONG, "text"),
        (Detokenize(7, ints(1, 1000)), ErrorCode.INVALID, "token_ids[1]"),
        (Detokenize(7, ints(*[1] * 3000)), ErrorCode.TOO_LONG, "token_ids"),
        (Tokenize(7, None, (ChatMessage("user", "hi"),)), ErrorCode.INVALID, "chat"),
    ],
)
def test_refusals_name_the_field(question: Tokenize | Detokenize, code: ErrorCode, field: str) -> None:
    async def test() -> None:
        world = World(template=None)
        world.receive(question)
        await world.settle()
        (error,) = world.answers[b"a"]
        assert isinstance(error, RequestError) and (error.rid, error.code, error.field) == (7, code, field)

    run(test)


def test_the_cluster_is_described() -> None:
    async def test() -> None:
        world = World()
        world.receive(GetInfo(9))
        assert world.answers[b"a"] == [replace(INFO, rid=9)]

    run(test)


def test_questions_in_work_are_bounded_and_a_client_may_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "MAX_OPEN_CHARS", 10)

    async def test() -> None:
        world = World()
        gate = threading.Event()
        world.pool.submit(gate.wait, 10)
        world.receive(Tokenize(1, "x" * 20, None))  # alone it may be of any size
        world.receive(Tokenize(2, "y", None), b"b")
        (refusal,) = world.answers[b"b"]
        assert (refusal.rid, refusal.code) == (2, ErrorCode.OVERLOADED) and refusal.retry_after_s > 0
        world.state[b"a"] = Sent.GONE
        gate.set()
        await world.settle()
        for rid in (3, 4):  # together, as what was answered counts no more
            world.receive(Tokenize(rid, "y", None), b"b")
        await world.settle()
        assert [(type(m), m.rid) for m in world.answers[b"b"][1:]] == [(Tokens, 3), (Tokens, 4)]
        assert b"a" not in world.answers
        monkeypatch.setattr(questions, "MAX_OPEN", 1)
        for rid in (5, 6):
            world.receive(Tokenize(rid, "y", None), b"b")
        await world.settle()
        assert [(type(m), m.rid) for m in world.answers[b"b"][3:]] == [(RequestError, 6), (Tokens, 5)]

    run(test)


@pytest.mark.parametrize("large", ["tools", "extra"])
def test_all_of_a_chat_counts_among_the_questions_in_work(large: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "MAX_OPEN_CHARS", 10)

    async def test() -> None:
        world = World()
        gate = threading.Event()
        world.pool.submit(gate.wait, 10)
        world.receive(Tokenize(1, "x", None))
        extra, tools = (" " * 20, "") if large == "extra" else ("", " " * 20)
        world.receive(Tokenize(2, None, (ChatMessage("user", "y", extra),), tools=tools), b"b")
        assert [(m.rid, m.code) for m in world.answers.get(b"b", ())] == [(2, ErrorCode.OVERLOADED)]
        gate.set()
        await world.settle()

    run(test)


def test_an_answer_larger_than_a_frame_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        world = World()
        monkeypatch.setattr("common.codec.MAX_FRAME_BYTES", 300)
        world.receive(Tokenize(1, "x" * 90, None))
        await world.settle()
        (error,) = world.answers[b"a"]
        assert isinstance(error, RequestError) and error.code == ErrorCode.TOO_LONG
        await asyncio.sleep(0)

    run(test)


def test_long_texts_leave_other_threads_their_turns() -> None:
    """The library's calls for one text keep every other thread of the process waiting, the event loop among them."""
    limits = Limits(2**20, 2**20, vocab_size=1000, max_live=1, max_choices=1)
    encoder = PromptEncoder(tokenizer(), None, limits)
    turns, done = 0, threading.Event()

    def others() -> None:
        nonlocal turns
        while not done.wait(0.001):
            turns += 1

    thread = threading.Thread(target=others)
    thread.start()
    try:
        before = turns
        tokens = encoder.tokenize(Tokenize(1, "fox dog " * 100_000, None)).token_ids
        assert turns - before > 20
        before = turns
        assert encoder.detokenize(Detokenize(2, tokens[1:])).text == "fox dog " * 100_000
        assert turns - before > 5
    finally:
        done.set()
        thread.join()
