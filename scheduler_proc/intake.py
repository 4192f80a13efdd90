"""From a message to a request, or to the reason why it can never be served."""

from array import array
from itertools import chain

from common.fields import IntArray
from common.messages import AddRequest, ErrorCode, RequestError, ints
from scheduler_proc.request import Request


def never_fits(msg: AddRequest, context_len: int, pool_tokens: int, vocab_size: int) -> RequestError | None:
    """What is wrong with a request whatever else runs: its prompt and one token must fit in the window and in the KV
    cache, and the model must have all of its tokens. The tokenizer has checked it, but the workers rely on it here."""
    length = len(msg.prompt)
    if length == 0:
        return RequestError(msg.rid, ErrorCode.INVALID, "the prompt is empty", "prompt", 1)
    for limit, name in ((context_len, "context window"), (pool_tokens, "KV cache")):
        if length + 1 > limit:
            problem = f"the prompt has {length} tokens and the {name} holds {limit}, one of them for the answer"
            return RequestError(msg.rid, ErrorCode.TOO_LONG, problem, "prompt", limit)
    for name, tokens in _tokens_of(msg).items():
        if tokens and max(tokens) >= vocab_size:
            problem = f"token id {max(tokens)} is outside the model's vocabulary of {vocab_size}"
            return RequestError(msg.rid, ErrorCode.INVALID, problem, name, vocab_size - 1)
    return None


def _tokens_of(msg: AddRequest) -> dict[str, IntArray]:
    """The tokens that the workers look up, by the field that names them."""
    edits = msg.draw.edits
    if edits is None:
        return {"prompt": msg.prompt}
    return {
        "prompt": msg.prompt,
        "logit_bias": ints(*edits.logit_bias),
        "stop_token_ids": edits.ends,
        "allowed_token_ids": edits.allowed,
        "bad_words": ints(*chain.from_iterable(edits.bad_words)),
    }


def request_of(msg: AddRequest, seq: int, most: int, now: int) -> Request:
    """The waiting request of a message; `most` tokens are for prompt and answer together, `now` is in ns."""
    prompt_len = len(msg.prompt) - msg.generated
    return Request(
        rid=msg.rid,
        tokens=array("i", msg.prompt),
        prompt_len=prompt_len,
        max_tokens=min(msg.max_tokens, most - prompt_len),
        stop_token_ids=frozenset(msg.stop_token_ids),
        draw=msg.draw,
        salt=msg.salt,
        priority=msg.priority,
        deadline=now + msg.deadline_ms * 10**6 if msg.deadline_ms else 0,
        grammar=msg.grammar,
        ignore_eos=msg.ignore_eos,
        arrival=now,
        since=now - msg.waited_ms * 10**6,
        seq=seq,
        counted=msg.counted,
        scored=msg.scored,
    )
