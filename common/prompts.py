"""A prompt as callers give it, and as Generate carries it; and what is kept of one that is cut."""

from array import array
from collections.abc import Sequence
from typing import TypeVar, cast

from common.fields import IntArray
from common.messages import ChatMessage

Prompt = str | Sequence[int] | Sequence[ChatMessage]
_Tokens = TypeVar("_Tokens", IntArray, list[int])


def prompt_fields(prompt: Prompt) -> tuple[str | None, IntArray | None, tuple[ChatMessage, ...] | None]:
    """`text`, `token_ids` and `chat` of Generate, one of which is given."""
    if isinstance(prompt, str):
        return prompt, None, None
    if prompt and isinstance(prompt[0], ChatMessage):
        return None, None, tuple(cast(Sequence[ChatMessage], prompt))
    return None, array("i", cast(Sequence[int], prompt)), None


def kept(tokens: _Tokens, most: int, side: str) -> _Tokens:
    """At most the last `most` tokens, or the first ones where `side`, from which they are cut, is right."""
    if len(tokens) <= most:
        return tokens
    return tokens[:most] if side == "right" else tokens[len(tokens) - most :]
