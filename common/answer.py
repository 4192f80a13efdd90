"""The rows of a request put together: what a client prints, and a benchmark counts."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from common.logprobs import TokenLogprobs
from common.messages import Finish
from common.rows import Row


@dataclass(slots=True)
class Answer:
    """The rows of one choice of a request, put together, and their timing as the client saw it."""

    sent_ns: int = field(default_factory=time.monotonic_ns)
    first_ns: int = 0
    last_ns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    finish: Finish = Finish.NONE
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)  # where they are told from the texts
    tokens_so_far: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    stop_reason: int | str | None = None

    def add(self, row: Row) -> None:
        if not self.first_ns and (row.token_ids or row.text or row.reasoning):
            self.first_ns = row.received_ns
        if row.tokens_so_far is not None:
            self.tokens_so_far = row.tokens_so_far
        if row.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *row.logprobs]
        self.prompt_logprobs = row.prompt_logprobs or self.prompt_logprobs
        self.stop_reason = row.stop_reason
        self.last_ns = row.received_ns
        self.texts.append(row.text)
        if row.reasoning:
            self.thoughts.append(row.reasoning)
        self.token_ids.extend(row.token_ids)
        self.prompt_tokens, self.cached_tokens, self.finish = row.prompt_tokens, row.cached_tokens, row.finish

    @property
    def tokens(self) -> int | None:
        """How many tokens came, None where the transport does not tell."""
        if self.tokens_so_far is not None:
            return self.tokens_so_far
        return None if not self.token_ids and any((*self.texts, *self.thoughts)) else len(self.token_ids)

    def as_dict(self) -> dict[str, object]:
        """JSON-ready: times in milliseconds; `itl_ms` is the mean time between tokens, None below two tokens. Log
        probabilities are there if they were asked for, reasoning where the text is without it."""
        tokens = self.tokens
        ttft_ms = (self.first_ns - self.sent_ns) / 1e6 if self.first_ns else None
        itl_ms = (self.last_ns - self.first_ns) / 1e6 / (tokens - 1) if tokens is not None and tokens > 1 else None
        result: dict[str, object] = {
            "text": "".join(self.texts),
            "token_ids": self.token_ids,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": tokens,
            "cached_tokens": self.cached_tokens,
            "finish_reason": self.finish.name.lower(),
            "ttft_ms": None if ttft_ms is None else round(ttft_ms, 3),
            "itl_ms": None if itl_ms is None else round(itl_ms, 3),
            "e2e_ms": round((self.last_ns - self.sent_ns) / 1e6, 3),
        }
        if self.thoughts:
            result["reasoning"] = "".join(self.thoughts)
        if self.logprobs is not None:
            result["logprobs"] = [entry.as_dict() for entry in self.logprobs]
        if self.prompt_logprobs is not None:
            result["prompt_logprobs"] = [entry and entry.as_dict() for entry in self.prompt_logprobs]
        return result


def tokens_of(answers: Sequence[Answer]) -> int | None:
    """How many tokens the choices of a request have together, None where the transport does not tell."""
    counted = [answer.tokens_so_far for answer in answers if answer.tokens_so_far is not None]
    if counted:
        return max(counted)
    named = [answer.tokens for answer in answers]
    return None if None in named else sum(count for count in named if count is not None)


def result_of(answers: Sequence[Answer]) -> dict[str, object]:
    """A request as JSON-ready values: those of its first choice with the tokens of all of them together, and where it
    has several, all of them in `choices`."""
    if len(answers) == 1:
        return answers[0].as_dict()
    shown = ("text", "reasoning", "token_ids", "finish_reason", "cached_tokens", "logprobs")
    each = [replace(answer, tokens_so_far=None).as_dict() for answer in answers]  # it counts all choices together
    choices = [{"index": i} | {name: values[name] for name in shown if name in values} for i, values in enumerate(each)]
    return {**each[0], "completion_tokens": tokens_of(answers), "choices": choices}
