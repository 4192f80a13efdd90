"""Log probabilities in the two formats of OpenAI's API, and in vLLM's for prompts, as a server writes them."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.logprobs import TokenLogprobs, TopLogprob


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A prompt's first token, which has no log probability. The id is -1 where nobody asked for it."""

    token_id: int
    token: bytes


Scored = FirstToken | TokenLogprobs


def _text(token: Scored | TopLogprob, as_ids: bool) -> str:
    """The text of one token. Bytes that are no whole UTF-8 character show as replacement characters."""
    return f"token_id:{token.token_id}" if as_ids else token.token.decode(errors="replace")


def chat_logprobs(entries: Sequence[TokenLogprobs], top: int, as_ids: bool) -> dict[str, Any]:
    """`choices[].logprobs` of chat completions, with `top` alternatives per token."""
    content = [
        {**_chat_entry(entry, as_ids), "top_logprobs": [_chat_entry(t, as_ids) for t in entry.top[:top]]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _chat_entry(token: TokenLogprobs | TopLogprob, as_ids: bool) -> dict[str, Any]:
    return {"token": _text(token, as_ids), "logprob": token.logprob, "bytes": list(token.token)}


class CompletionLogprobs:
    """`choices[].logprobs` of completions, for one choice. Each `text_offset` is the number of whole characters before:
    a token inside of one has the offset of that one."""

    def __init__(self, top: int, as_ids: bool):
        self._top = top
        self._as_ids = as_ids
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def take(self, entries: Sequence[Scored]) -> dict[str, Any]:
        """The columns for the next tokens."""
        columns: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for entry in entries:
            columns["text_offset"].append(self._offset)
            self._offset += len(self._decoder.decode(entry.token))
            columns["tokens"].append(_text(entry, self._as_ids))
            scored = None if isinstance(entry, FirstToken) else entry
            columns["token_logprobs"].append(scored and scored.logprob)
            columns["top_logprobs"].append(scored and self._alternatives(scored))
        return columns

    def _alternatives(self, entry: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens and the token itself, as vLLM gives them; of equal texts the likelier one counts."""
        found: dict[str, float] = {}
        for top in entry.top[: self._top]:
            found.setdefault(_text(top, self._as_ids), top.logprob)
        found.setdefault(_text(entry, self._as_ids), entry.logprob)
        return found


def prompt_logprobs(entries: Sequence[TokenLogprobs | None], top: int) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's `prompt_logprobs`: for each prompt token but the first a map from token ids, with `top` alternatives."""
    shown: list[dict[str, dict[str, Any]] | None] = []
    for entry in entries:
        if entry is None:
            shown.append(None)
            continue
        tokens: dict[str, dict[str, Any]] = {}
        tokens[str(entry.token_id)] = {
            "logprob": entry.logprob,
            "rank": entry.rank,
            "decoded_token": _text(entry, False),
        }
        for rank, other in enumerate(entry.top[:top], start=1):
            tokens.setdefault(
                str(other.token_id), {"logprob": other.logprob, "rank": rank, "decoded_token": _text(other, False)}
            )
        shown.append(tokens)
    return shown
