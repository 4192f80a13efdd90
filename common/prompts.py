"""A prompt as callers give it, and as Generate carries it."""

from array import array
from collections.abc import Sequence
from typing import cast

from common.fields import IntArray
from common.messages import ChatMessage

Prompt = str | Sequence[int] | Sequence[ChatMessage]


def prompt_fields(prompt: Prompt) -> tuple[str | None, IntArray | None, tuple[ChatMessage, ...] | None]:
    """`text`, `token_ids` and `chat` of Generate, one of which is given."""
    if isinstance(prompt, str):
        return prompt, None, None
    if prompt and isinstance(prompt[0], ChatMessage):
        return None, None, tuple(cast(Sequence[ChatMessage], prompt))
    return None, array("i", cast(Sequence[int], prompt)), None
