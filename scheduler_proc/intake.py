"""From a message to a request, or to the reason why it can never be served."""

from array import array

from common.messages import AddRequest, ErrorCode, RequestError
from scheduler_proc.request import Request


def never_fits(msg: AddRequest, context_len: int, pool_tokens: int) -> RequestError | None:
    """What is wrong with a prompt whatever else runs: it and one token must fit in the window and in the KV cache."""
    length = len(msg.prompt)
    if length == 0:
        return RequestError(msg.rid, ErrorCode.INVALID, "the prompt is empty", "prompt", 1)
    for limit, name in ((context_len, "context window"), (pool_tokens, "KV cache")):
        if length + 1 > limit:
            problem = f"the prompt has {length} tokens and the {name} holds {limit}, one of them for the answer"
            return RequestError(msg.rid, ErrorCode.TOO_LONG, problem, "prompt", limit)
    return None


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
        seq=seq,
        scored=msg.scored,
    )
