"""What can be wrong with a request's sampling parameters beyond the range of each."""

from common.messages import ErrorCode, Generate
from common.sampling_params import SamplingParams
from tokenizer_proc.limits import Limits, Refused

_DEFAULTS = SamplingParams()
_NOT_BUILT = (
    "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens", "logprobs",
    "prompt_logprobs", "use_beam_search", "length_penalty", "early_stopping", "grammar",
)  # fmt: skip


def check_sampling(msg: Generate, limits: Limits) -> None:
    """Raises Refused with the field that does not fit the model or the other fields."""
    params = msg.params
    for name in _NOT_BUILT:
        if getattr(params, name) != getattr(_DEFAULTS, name):
            raise _refused(name, "is not supported yet")
    limits.check_token_ids(params.stop_token_ids, "params.stop_token_ids")


def _refused(name: str, problem: str, limit: int = 0) -> Refused:
    field = f"params.{name}"
    return Refused(ErrorCode.INVALID, f"{field}: {problem}", field, limit)
