"""What can be wrong with a request's sampling parameters beyond the range of each, and what they say about its end."""

from common.fields import IntArray
from common.messages import ErrorCode, Generate, ints
from common.sampling_params import SamplingParams
from tokenizer_proc.limits import Limits, Refused

MAX_PROMPT_LOGPROBS = 2**21  # tokens named in the prompt's log probabilities: some 40 MB at the client
_DEFAULTS = SamplingParams()
_NOT_BUILT = ("use_beam_search", "length_penalty", "early_stopping", "grammar")


def check_sampling(msg: Generate, limits: Limits) -> None:
    """Raises Refused with the field that does not fit the model or the other fields."""
    params = msg.params
    for name in _NOT_BUILT:
        if getattr(params, name) != getattr(_DEFAULTS, name):
            raise _refused(name, "is not supported yet")
    limits.check_token_ids(params.stop_token_ids, "params.stop_token_ids")
    limits.check_token_ids(ints(*params.logit_bias), "params.logit_bias")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        problem = f"{params.min_tokens} is more than max_tokens, which is {params.max_tokens}"
        raise _refused("min_tokens", problem, params.max_tokens)


def check_prompt_logprobs(params: SamplingParams, prompt_tokens: int) -> None:
    """Raises Refused when the log probabilities of a prompt would be too many to hold."""
    if params.prompt_logprobs is not None:
        named = prompt_tokens * (1 + params.prompt_logprobs)
        if named > MAX_PROMPT_LOGPROBS:
            problem = f"{params.prompt_logprobs} alternatives for {prompt_tokens} tokens are too many"
            raise _refused("prompt_logprobs", problem, MAX_PROMPT_LOGPROBS // prompt_tokens)


def ends_of(params: SamplingParams, eos: IntArray) -> IntArray:
    """The tokens that end an answer."""
    return ints(*sorted({*params.stop_token_ids, *(() if params.ignore_eos else eos)}))


def excluded_at_first(params: SamplingParams, eos: IntArray) -> IntArray:
    """The tokens that `min_tokens` excludes."""
    return ints(*sorted({*params.stop_token_ids, *eos}))


def stop_token(params: SamplingParams, eos: IntArray, tokens: IntArray) -> int | None:
    """The stop token that ended an answer of these tokens, unless it is an end-of-sequence token of the model."""
    last = tokens[-1] if tokens else -1
    own = last in eos and not params.ignore_eos
    return last if last in params.stop_token_ids and not own else None


def _refused(name: str, problem: str, limit: int = 0) -> Refused:
    field = f"params.{name}"
    return Refused(ErrorCode.INVALID, f"{field}: {problem}", field, limit)
