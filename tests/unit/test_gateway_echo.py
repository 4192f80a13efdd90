"""Prompts that are shown with their answers, or alone: texts, log probabilities from the first token on, offsets."""

from array import array
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.logprobs import LogprobRows, Logprobs
from common.messages import Detokenize, Finish, Generate, RequestError, Stopped, Text, Tokenize, Tokens, ints
from tests.unit.fake_frontend import rows
from tests.unit.gateway_world import World, answering, events, play, words

VOCABULARY = {1: "é".encode()[:1], 2: "é".encode()[1:], 3: b" x", 4: b"def", 5: b"!", 6: b" y"}
PROMPTS = {"def": [4], "é x": [1, 2, 3], "def x": [4, 3]}
TOP = 2  # alternatives that this model knows
PATH = "/v1/completions"


def scores(tokens: list[int], top: int) -> Logprobs:
    count = len(tokens)
    tops = [5, 6][:top] * count
    return Logprobs(
        array("i", tokens), array("f", [-0.5] * count), array("i", [1] * count), array("i", [min(top, TOP)] * count),
        array("i", tops), array("f", [-0.5] * len(tops)),
    )  # fmt: skip


def generate(msg: Generate) -> Iterable[Any]:
    """One token, `!`, that ends the answer as a stop token."""
    prompt = PROMPTS[msg.text] if msg.text is not None else list(msg.token_ids or ())
    top, prompt_top = msg.params.logprobs, msg.params.prompt_logprobs
    for choice in range(msg.n):
        yield replace(
            rows(msg.rid, "!", 5, finish=Finish.STOP, choice=choice),
            logprobs=None if top is None else LogprobRows.of({0: scores([5], top)}),
            prompt_logprobs=None if prompt_top is None else LogprobRows.of({0: scores(prompt[1:], prompt_top)}),
            token_bytes=VOCABULARY,
            stopped=(Stopped(0, 5),),
        )


def cluster(msg: Any) -> Iterable[Any]:
    match msg:
        case Tokenize():
            yield Tokens(msg.rid, ints(*PROMPTS[msg.text or ""]))
        case Detokenize():
            yield Text(msg.rid, b"".join(VOCABULARY[t] for t in msg.token_ids).decode(errors="replace"))
        case _:
            yield from answering(generate)(msg)


async def choice(world: World, path: str = PATH, **fields: Any) -> dict[str, Any]:
    response = await world.post(path, fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer["choices"][0] if path == PATH else answer


@pytest.mark.parametrize(
    ("prompt", "tokens", "offsets", "ids"),
    [
        ("def", ["def", "!"], [0, 3], [4, 5]),
        ([4], ["def", "!"], [0, 3], [4, 5]),
        ("def x", ["def", " x", "!"], [0, 3, 5], [4, 3, 5]),
        ("é x", ["\ufffd", "\ufffd", " x", "!"], [0, 0, 1, 3], [1, 2, 3, 5]),
        ([1, 2, 3], ["\ufffd", "\ufffd", " x", "!"], [0, 0, 1, 3], [1, 2, 3, 5]),
        ([2, 3], ["\ufffd", " x", "!"], [0, 1, 3], [2, 3, 5]),
        ([4, 1], ["def", "\ufffd", "!"], [0, 3, 3], [4, 1, 5]),
    ],
)
def test_log_probabilities_begin_with_the_first_token(
    short_dir: Path, prompt: Any, tokens: list[str], offsets: list[int], ids: list[int]
) -> None:
    async def test(world: World) -> None:
        body = {"prompt": prompt, "echo": True, "logprobs": 1}
        found = (await choice(world, **body))["logprobs"]
        assert (found["tokens"], found["text_offset"]) == (tokens, offsets)
        assert found["token_logprobs"] == [None, *[-0.5] * (len(tokens) - 1)] and found["top_logprobs"][0] is None
        named = (await choice(world, **body, return_tokens_as_token_ids=True))["logprobs"]
        assert named["tokens"] == [f"token_id:{token}" for token in ids] and named["text_offset"] == offsets
        chunks = [e["choices"][0]["logprobs"] for e in events(await world.post(PATH, body | {"stream": True}))]
        assert [c["tokens"] for c in chunks] == [tokens] and chunks[0]["text_offset"] == offsets

    play(short_dir, cluster, test)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_alone_says_nothing_of_an_answer(short_dir: Path, stream: bool) -> None:
    async def test(world: World) -> None:
        body = {
            "prompt": "def x", "echo": True, "max_tokens": 0, "logprobs": 1, "return_token_ids": True, "n": 2,
            "stop_token_ids": [5], "stream": stream,
        }  # fmt: skip
        response = await world.post(PATH, body | ({"stream_options": {"include_usage": True}} if stream else {}))
        answers = events(response) if stream else [response.json()]
        choices = [c for answer in answers for c in answer["choices"]]
        assert len(choices) == 2
        for found in choices:
            assert (found["text"], found["token_ids"]) == ("def x", [])
            assert (found["finish_reason"], found["stop_reason"]) == ("length", None)
            assert found["logprobs"]["tokens"] == ["def", " x"]
        assert answers[-1]["usage"]["completion_tokens"] == 0

    play(short_dir, cluster, test)


@pytest.mark.parametrize("echo", [False, True])
def test_ids_of_prompts_come_with_those_of_answers(short_dir: Path, echo: bool) -> None:
    async def test(world: World) -> None:
        for prompts, ids in ((["def", "def x"], [[4], [4, 3]]), ([[4, 1], [3]], [[4, 1], [3]])):
            body = {"prompt": prompts, "return_token_ids": True, "n": 2, "echo": echo}
            expected = [ids[0], ids[0], ids[1], ids[1]]
            choices = (await world.post(PATH, body)).json()["choices"]
            assert [c["prompt_token_ids"] for c in choices] == expected
            assert all(c["token_ids"] == [5] and (c["text"] != "!") == echo for c in choices)
            chunks = [e["choices"][0] for e in events(await world.post(PATH, body | {"stream": True}))]
            assert {c["index"]: c["prompt_token_ids"] for c in chunks} == dict(enumerate(expected))
        plain = await world.post(PATH, {"prompt": "def", "return_token_ids": False})
        assert "prompt_token_ids" not in plain.json()["choices"][0]

    play(short_dir, cluster, test)


def test_texts_without_special_tokens_are_generated_from_as_they_are(short_dir: Path) -> None:
    def answer(msg: Any) -> Iterable[Any]:
        if isinstance(msg, Tokenize):
            assert not msg.add_special_tokens
        yield from cluster(msg)

    async def test(world: World) -> None:
        for prompt, ids in (("def x", [[4, 3]]), (["def", "é x"], [[4], [1, 2, 3]]), ([[4, 1]], [[4, 1]])):
            for more in ({}, {"return_token_ids": True}, {"echo": True, "logprobs": 1}):
                body = {"prompt": prompt, "add_special_tokens": False, **more}
                response = await world.post(PATH, body)
                assert response.status_code == 200, response.text
                asked = [await world.generated() for _ in ids]
                assert [(m.text, list(m.token_ids or ())) for m in asked] == [(None, each) for each in ids]
                choices = response.json()["choices"]
                assert all(("prompt_token_ids" in c) == ("return_token_ids" in more) for c in choices)
        for kept in (True, None):
            await world.post(PATH, {"prompt": "def x", "add_special_tokens": kept})
            assert (await world.generated()).text == "def x"

    play(short_dir, answer, test)


def test_sglang_scores_prompts(short_dir: Path) -> None:
    async def test(world: World) -> None:
        body: dict[str, Any] = {
            "input_ids": [4, 3], "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1,
            "return_text_in_logprobs": True, "sampling_params": {"max_new_tokens": 0},
        }  # fmt: skip
        answer = await choice(world, "/generate", **body)
        meta = answer["meta_info"]
        assert (answer["text"], answer["output_ids"], meta["completion_tokens"]) == ("", [], 0)
        assert meta["finish_reason"] == {"type": "length", "length": 0}
        assert meta["input_token_logprobs"] == [[None, 4, "def"], [-0.5, 3, " x"]]
        assert meta["input_top_logprobs"] == [None, [[-0.5, 5, "!"]]] and meta["output_token_logprobs"] == []
        assert (await world.generated()).params.max_tokens == 1
        later = await choice(world, "/generate", **body | {"logprob_start_len": 1, "input_ids": None, "text": "def x"})
        assert later["meta_info"]["input_token_logprobs"] == [[-0.5, 3, " x"]]
        assert (await world.generated()).params.prompt_logprobs_start == 1
        silent = {"input_ids": None, "text": "def", "return_text_in_logprobs": False}
        told = await choice(world, "/generate", **body | silent)
        assert told["meta_info"]["input_token_logprobs"] == [[None, 4, None]]

    play(short_dir, cluster, test)


def test_alternatives_are_those_of_each_field(short_dir: Path) -> None:
    async def test(world: World) -> None:
        for top, prompt_top in ((2, 0), (0, 2), (2, 1)):
            found = await choice(world, prompt="def x", echo=True, logprobs=top, prompt_logprobs=prompt_top)
            assert (await world.generated()).params.prompt_logprobs == 2
            assert len(found["logprobs"]["top_logprobs"][1]) == top + 1  # and the token itself
            assert len(found["prompt_logprobs"][1]) == prompt_top + 1

    play(short_dir, cluster, test)


def test_many_prompts_are_turned_into_text_side_by_side(short_dir: Path) -> None:
    asked: list[Detokenize] = []

    def slow(msg: Any) -> Iterable[Any]:
        """Answers questions when there are several."""
        if isinstance(msg, Detokenize):
            asked.append(msg)
            for held in asked if len(asked) == 2 else ():
                yield Text(held.rid, "def")
            if len(asked) == 2:
                asked.clear()
        else:
            yield from cluster(msg)

    async def test(world: World) -> None:
        response = await world.post(PATH, {"prompt": [[4]] * 40, "echo": True})
        assert [c["text"] for c in response.json()["choices"]] == ["def!"] * 40

    play(short_dir, slow, test)


def test_a_prompt_that_has_no_text_is_refused(short_dir: Path) -> None:
    def refusing(msg: Any) -> Iterable[Any]:
        if isinstance(msg, Detokenize):
            yield RequestError(msg.rid, 1, "token_ids[1]: is not a token", "token_ids[1]")
        else:
            yield from cluster(msg)

    async def test(world: World) -> None:
        response = await world.post(PATH, {"prompt": [[4], [4, 9]], "echo": True})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt[1]")

    play(short_dir, refusing, test)


def test_chunks_with_usage_have_choices(short_dir: Path) -> None:
    """Also those for tokens whose text is held back."""

    async def test(world: World) -> None:
        options = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
        found = events(await world.post(PATH, {"prompt": "x", **options}))
        assert [chunk["choices"][0]["text"] for chunk in found] == ["He", "", "llo"]
        assert [chunk["usage"]["completion_tokens"] for chunk in found] == [1, 2, 3]

    play(short_dir, answering(words("He", "", "llo")), test)
