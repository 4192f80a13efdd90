"""What can be wrong with a request's sampling parameters beyond the range of each, and what they say about its end."""

from common.fields import IntArray
from common.messages import ErrorCode, Generate, ints
from common.sampling_params import MAX_DRAW_LOGPROBS, SamplingParams
from tokenizer_proc.beam_search import candidates_per_beam
from tokenizer_proc.limits import Limits, Refused

MAX_PROMPT_LOGPROBS = 2**21  # tokens named in log probabilities that come together: some 40 MB at the client
_DEFAULTS = SamplingParams()
_NOT_WITH_BEAMS = (
    "top_k", "top_p", "min_p", "seed", "stop", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "min_tokens", "prompt_logprobs", "grammar", "include_stop_str_in_output",
    "allowed_token_ids", "bad_words",
)  # fmt: skip
_ONLY_WITH_BEAMS = ("length_penalty", "early_stopping")


def check_sampling(msg: Generate, limits: Limits, eos: IntArray) -> None:
    """Raises Refused with the field that does not fit the model or the other fields."""
    params = msg.params
    if params.use_beam_search:
        _check_beams(params, msg.n, limits, len(ends_of(params, eos)))
    for name in () if params.use_beam_search else _ONLY_WITH_BEAMS:
        if _given(params, name):
            raise _refused(name, "goes only with use_beam_search")
    limits.check_token_ids(params.stop_token_ids, "params.stop_token_ids")
    limits.check_token_ids(ints(*params.logit_bias), "params.logit_bias")
    allowed = params.allowed_token_ids
    limits.check_token_ids(allowed or ints(), "params.allowed_token_ids")
    if params.min_tokens and allowed is not None and set(allowed) <= set(excluded_at_first(params, eos)):
        raise _refused("min_tokens", "excludes at first all of allowed_token_ids, which only end the answer")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        problem = f"{params.min_tokens} is more than max_tokens, which is {params.max_tokens}"
        raise _refused("min_tokens", problem, params.max_tokens)


def _check_beams(params: SamplingParams, width: int, limits: Limits, num_ends: int) -> None:
    for name in _NOT_WITH_BEAMS:
        if _given(params, name):
            raise _refused(name, "does not go with use_beam_search")
    if params.temperature not in (0.0, 1.0):
        raise _refused("temperature", "does not go with use_beam_search, but for 1 and 0")
    most = min(MAX_DRAW_LOGPROBS, limits.vocab_size)
    if candidates_per_beam(width, num_ends) > most:
        widest = most // candidates_per_beam(1, num_ends)
        problem = f"n: {width} beams are too many for beam search with {num_ends} tokens that end a sequence"
        raise Refused(ErrorCode.INVALID, f"{problem}; {widest} are possible", "n", widest)


def _given(params: SamplingParams, name: str) -> bool:
    value: object = getattr(params, name)
    return bool(value != getattr(_DEFAULTS, name))


def check_prompt_logprobs(params: SamplingParams, prompt_tokens: int) -> None:
    """Raises Refused when the log probabilities of a prompt would be too many to hold."""
    scored = prompt_tokens - params.unscored(prompt_tokens)
    _check_named("prompt_logprobs", params.prompt_logprobs, scored, f"{scored} tokens")


def check_beam_logprobs(params: SamplingParams, width: int, max_tokens: int) -> None:
    """Raises Refused when the log probabilities of all beams, which are kept to the end, would be too many to hold."""
    _check_named("logprobs", params.logprobs, width * max_tokens, f"{max_tokens} tokens of {width} beams")


def _check_named(name: str, top: int | None, tokens: int, shown: str) -> None:
    """Each of the tokens is named itself, too."""
    if top is not None and tokens * (1 + top) > MAX_PROMPT_LOGPROBS:
        most = max(0, MAX_PROMPT_LOGPROBS // tokens - 1)
        raise _refused(name, f"{top} alternatives for {shown} are too many", most)


def ends_of(params: SamplingParams, eos: IntArray) -> IntArray:
    """The tokens that end an answer.

    A complete answer under a grammar can only end, with `ignore_eos` too: the worker holds the end back until then.
    """
    goes_on = params.ignore_eos and params.grammar is None
    return ints(*sorted({*params.stop_token_ids, *(() if goes_on else eos)}))


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
