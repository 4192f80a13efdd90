"""The prompts of a request as they are shown with its answers: texts, and first tokens, which nothing predicts."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

from common.async_connection import AsyncConnection
from common.logprobs import TokenLogprobs
from common.openai_logprobs import FirstToken, Scored
from common.prompts import kept
from gateway_proc.errors import told_by_cluster
from gateway_proc.generation import Prompt

AT_ONCE = 16  # questions to the tokenizer, which has many clients


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as a text and as tokens; empty where nobody asked for them."""

    text: str = ""
    token_ids: Sequence[int] = ()

    def scored(self, entries: Sequence[TokenLogprobs | None] | None) -> list[Scored]:
        """The prompt's log probabilities from its first token on, of which the cluster says None."""
        if not entries:
            return []
        others = [entry for entry in entries if entry is not None]
        first_id = self.token_ids[0] if self.token_ids else -1
        return [FirstToken(first_id, self._without(b"".join(entry.token for entry in others))), *others]

    def _without(self, others: bytes) -> bytes:
        """What other tokens leave of the text."""
        text = self.text.encode()
        if not text.endswith(others):  # bytes that are no characters stand as replacement characters in the text
            others = others.decode(errors="replace").encode()
        return text.removesuffix(others) if text.endswith(others) else b""


async def echoes_of(
    connection: AsyncConnection,
    prompts: Sequence[Prompt],
    names: Mapping[str, str],
    *,
    with_texts: bool,
    with_ids: bool,
    add_special_tokens: bool = True,
    truncation: Mapping[str, Any] = MappingProxyType({}),
) -> list[Echo]:
    """All prompts; `add_special_tokens` lets the tokenizer add its own to texts. `truncation` says how prompts are cut:
    then their tokens are found, and their texts are those of the tokens that are left. Raises ApiError."""
    found: list[Echo] = []
    with told_by_cluster(names):
        for at in range(0, len(prompts), AT_ONCE):
            some = prompts[at : at + AT_ONCE]
            found += await asyncio.gather(
                *(_echo(connection, p, with_texts, with_ids, add_special_tokens, truncation) for p in some)
            )
    return found


async def _echo(
    connection: AsyncConnection,
    prompt: Prompt,
    with_text: bool,
    with_ids: bool,
    add_special_tokens: bool,
    truncation: Mapping[str, Any],
) -> Echo:
    if isinstance(prompt, str):
        ids: Sequence[int] = ()
        if with_ids or truncation:
            found = await connection.tokenize(prompt, add_special_tokens=add_special_tokens, **truncation)
            ids = list(found.token_ids)
        if not truncation:
            return Echo(prompt if with_text else "", ids)
    else:
        given = cast(list[int], prompt)
        ids = kept(given, truncation["truncate_prompt_tokens"], truncation["truncation_side"]) if truncation else given
    return Echo(await connection.detokenize(ids) if with_text else "", ids)
