"""Log probabilities in the two formats of OpenAI's API, read and written, and in vLLM's for prompts, read."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from common.logprobs import TokenLogprobs, TopLogprob

UNKNOWN = -1  # OpenAI's API names tokens by their text


def logprobs_of(choice: dict[str, Any], top: int) -> tuple[TokenLogprobs, ...] | None:
    """Those of one choice of a chunk or answer, None where it has none; `top` is how many likely tokens were asked for.
    Ids and ranks that it does not tell are unknown. Raises LookupError, TypeError or ValueError for what is in neither
    format."""
    found = choice.get("logprobs")
    if not found:
        return None
    if found.get("content") is not None:  # of chats
        return tuple(_entry(each, [_top(t) for t in each.get("top_logprobs") or ()], top) for each in found["content"])
    if found.get("tokens") is None:
        return None
    columns = zip(
        found["tokens"], found["token_logprobs"], found.get("top_logprobs") or [{}] * len(found["tokens"]), strict=True
    )
    entries = []
    for text, logprob, likeliest in columns:
        likely = sorted((likeliest or {}).items(), key=lambda pair: -pair[1])
        alternatives = [_top({"token": token, "logprob": value}) for token, value in likely]
        entries.append(_entry({"token": text, "logprob": logprob}, alternatives, top))
    return tuple(entries)


def chat_logprobs(entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """`choices[].logprobs` of chats."""
    content = [{**_said(entry), "top_logprobs": [_said(top) for top in entry.top]} for entry in entries]
    return {"content": content, "refusal": None}


def _said(token: TokenLogprobs | TopLogprob) -> dict[str, Any]:
    return {"token": _text(token), "logprob": token.logprob, "bytes": list(token.token)}


def completion_logprobs(entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """`choices[].logprobs` of completions. Of equal texts the likelier one counts; the token itself comes last where it
    is not among the likeliest."""
    texts = [_text(entry) for entry in entries]
    tops: list[dict[str, float]] = []
    for entry in entries:
        found: dict[str, float] = {}
        likely: list[TokenLogprobs | TopLogprob] = [*entry.top, entry]
        for each in likely:
            found.setdefault(_text(each), each.logprob)
        tops.append(found)
    return {
        "text_offset": list(accumulate(map(len, texts), initial=0))[:-1],
        "token_logprobs": [entry.logprob for entry in entries],
        "tokens": texts,
        "top_logprobs": tops,
    }


def _text(token: TokenLogprobs | TopLogprob) -> str:
    return token.token.decode(errors="replace")


def prompt_logprobs_of(said: list[dict[str, dict[str, Any]] | None], top: int) -> tuple[TokenLogprobs | None, ...]:
    """vLLM's `prompt_logprobs`: for each token a map from token ids that begins with the token itself and holds the
    `top` likeliest ones. Raises as `logprobs_of` does."""
    entries: list[TokenLogprobs | None] = []
    for tokens in said:
        if tokens is None:  # the first one, which follows nothing
            entries.append(None)
            continue
        ranked = [(int(each["rank"]), _ranked(token_id, each)) for token_id, each in tokens.items()]
        rank, own = ranked[0]
        likely = tuple(each for at, each in sorted(ranked, key=lambda pair: pair[0]) if at <= top)
        entries.append(TokenLogprobs(own.token_id, own.token, own.logprob, rank, likely))
    return tuple(entries)


def _ranked(token_id: str, said: dict[str, Any]) -> TopLogprob:
    return TopLogprob(int(token_id), str(said["decoded_token"]).encode(), float(said["logprob"]))


def _entry(said: dict[str, Any], ranked: list[TopLogprob], top: int) -> TokenLogprobs:
    own = _top(said)
    likely = tuple(ranked[:top])  # behind them servers append the drawn token, whatever its rank
    rank = next((i for i, each in enumerate(likely, start=1) if each.token == own.token), UNKNOWN)
    return TokenLogprobs(own.token_id, own.token, own.logprob, rank, likely)


def _top(said: dict[str, Any]) -> TopLogprob:
    text, raw = str(said["token"]), said.get("bytes")
    number = text.removeprefix("token_id:")
    token_id = int(number) if number != text and number.isdecimal() else UNKNOWN
    return TopLogprob(token_id, bytes(raw) if raw is not None else text.encode(), float(said["logprob"]))
