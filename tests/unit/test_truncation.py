"""Prompts that are cut: the tokens that the tokenizers library itself would keep, and those of vLLM."""

import asyncio
from typing import Any

import pytest
from tokenizers import Tokenizer

from common.messages import ChatMessage, ErrorCode, Generate, RequestError, Tokenize, ints
from common.sampling_params import SamplingParams
from tests.helpers_tokenizers import byte_level, sentence_piece, word_piece
from tests.unit.frontend_world import World, request
from tokenizer_proc.limits import Limits
from tokenizer_proc.prompt import PromptEncoder

TEXT = "the quick brown fox jumps over the lazy dog, and über-naïve 日本 words follow " * 3
LIMITS = Limits(context_len=400, pool_tokens=4096, vocab_size=10**6, max_live=4, max_choices=4)


def generate(text: str, most: int | None, side: str = "") -> Generate:
    return Generate(1, text, None, None, SamplingParams(), truncate_prompt_tokens=most, truncation_side=side)


@pytest.mark.parametrize("make", [byte_level, sentence_piece, word_piece])
@pytest.mark.parametrize("most", [1, 2, 3, 7, 50, 100, 399])
def test_texts_keep_what_the_library_keeps(make: Any, most: int) -> None:
    source = make().to_str()  # two trainings may differ
    tokenizer = Tokenizer.from_str(source)
    whole = tokenizer.encode(TEXT).ids
    encoder = PromptEncoder(tokenizer, None, LIMITS)
    assert list(encoder.encode(generate(TEXT, most, "left"))) == whole[-most:]
    assert list(encoder.encode(generate(TEXT, most, "right"))) == whole[:most]
    reference = Tokenizer.from_str(source)
    reference.enable_truncation(most, direction="left")
    assert list(encoder.encode(generate(TEXT, most))) == reference.encode(TEXT).ids
    asked = encoder.tokenize(Tokenize(1, TEXT, None, truncate_prompt_tokens=most))
    assert list(asked.token_ids) == reference.encode(TEXT).ids


def test_a_text_that_is_longer_than_any_prompt_is_cut_before_it_is_tokenized() -> None:
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    encoder = PromptEncoder(tokenizer, None, Limits(16, 64, 1000, 4, 4))
    most = encoder.encode(generate("x " * 100 + TEXT * 100, -1))
    assert list(most) == [tokenizer.encode("").ids[0], *tokenizer.encode(TEXT, add_special_tokens=False).ids[-14:]]
    assert list(encoder.encode(generate(TEXT * 100, 15, "right"))) == tokenizer.encode(TEXT).ids[:15]


@pytest.mark.parametrize(
    ("more", "kept"),
    [
        ({"text": None, "token_ids": ints(*range(100, 150)), "truncate_prompt_tokens": 5}, [*range(145, 150)]),
        ({"text": None, "token_ids": ints(*range(100, 150)), "truncate_prompt_tokens": -1}, [*range(119, 150)]),
        (
            {
                "text": None,
                "token_ids": ints(*range(100, 150)),
                "truncate_prompt_tokens": 5,
                "truncation_side": "right",
            },
            [*range(100, 105)],
        ),
        ({"text": None, "token_ids": ints(7, 8), "truncate_prompt_tokens": 5, "truncation_side": "right"}, [7, 8]),
        ({"text": None, "chat": (ChatMessage("user", TEXT * 100),), "truncate_prompt_tokens": 6}, None),
    ],
)
def test_ids_and_chats_are_cut_on_their_way_to_the_scheduler(more: dict[str, Any], kept: list[int] | None) -> None:
    async def test() -> None:
        world = World()
        world.receive(request(**{"text": None, **more}))
        await world.settle()
        (added,) = world.added
        if kept is None:
            whole = byte_level().encode(TEXT, add_special_tokens=False).ids
            assert list(added.prompt) == whole[-6:]
        else:
            assert list(added.prompt) == kept

    asyncio.run(test())


@pytest.mark.parametrize(
    ("most", "field", "limit"), [(33, "truncate_prompt_tokens", 32), (0, "token_ids", 1), (32, "token_ids", 31)]
)
def test_refusals(most: int, field: str, limit: int) -> None:
    async def test() -> None:
        world = World()
        world.receive(request(text=None, token_ids=ints(*range(100, 150)), truncate_prompt_tokens=most))
        await world.settle()
        (error,) = world.answers[b"a"]
        assert isinstance(error, RequestError)
        assert (error.field, error.limit) == (field, limit)
        assert error.code == (ErrorCode.TOO_LONG if most == 32 else ErrorCode.INVALID)

    asyncio.run(test())
