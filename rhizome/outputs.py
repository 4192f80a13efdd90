"""Results, with vLLM's names where they mean the same."""

from collections.abc import Sequence
from dataclasses import dataclass

from common.answer import Answer
from common.logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer to a prompt. `finish_reason` is stop, length or abort; `stop_reason` the stop token or stop string
    that ended it, None for the model's own end. `logprobs` has an entry per token where they were asked for. Of a chat
    `text` is the answer alone and `reasoning` what the model thought before, None where it did not; `token_ids` are
    those of both."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    reasoning: str | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """The log probability of the whole answer, or None without `logprobs`."""
        return None if self.logprobs is None else sum(entry.logprob for entry in self.logprobs)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What came of a prompt. `prompt` and `prompt_token_ids` are what was given: one of them is None, both are for a
    chat. `cached_tokens` of the `prompt_tokens` came from the prefix cache."""

    prompt: str | None
    prompt_token_ids: list[int] | None
    outputs: list[CompletionOutput]
    prompt_tokens: int
    cached_tokens: int
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def num_cached_tokens(self) -> int:
        """`cached_tokens`, under vLLM's name."""
        return self.cached_tokens


@dataclass(frozen=True, slots=True)
class StreamOutput:
    """New text, reasoning and tokens of one answer to one prompt. `finish_reason`, and `stop_reason` where there is
    one, are set in its last one, `prompt_logprobs` in its first one, where they were asked for."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    prompt_tokens: int
    cached_tokens: int
    logprobs: list[TokenLogprobs] | None = None
    reasoning: str = ""
    stop_reason: int | str | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


def to_output(prompt: str | None, token_ids: Sequence[int] | None, answers: Sequence[Answer]) -> RequestOutput:
    """The result of a request whose choices have all ended."""
    outputs = [
        CompletionOutput(
            index, "".join(a.texts), list(a.token_ids), a.finish.name.lower(), a.stop_reason, a.logprobs,
            "".join(a.thoughts) or None,
        )
        for index, a in enumerate(answers)
    ]  # fmt: skip
    first = answers[0]
    of_prompt = next((list(a.prompt_logprobs) for a in answers if a.prompt_logprobs is not None), None)
    given = None if token_ids is None else list(token_ids)
    return RequestOutput(prompt, given, outputs, first.prompt_tokens, first.cached_tokens, of_prompt)
