"""Log probabilities in the two formats of OpenAI's API, and in vLLM's for prompts, read as those of a cluster."""

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
