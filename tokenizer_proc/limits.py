"""What a request must keep to, and the refusals that say so."""

from dataclasses import dataclass
from typing import Self

from common.codec import MAX_FRAME_BYTES
from common.config import SchedulerConfig
from common.fields import IntArray
from common.messages import ErrorCode, Go, RequestError

CHARS_PER_TOKEN = 64  # allowed at least, where a tokenizer's longest token is shorter: text may be normalized away
RETRY_AFTER_S = 1.0


class Refused(Exception):
    """A request is refused; the rest of the fields are those of RequestError."""

    def __init__(self, code: ErrorCode, problem: str, field: str = "", limit: int = 0, retry_after_s: float = 0.0):
        super().__init__(problem)
        self.code = code
        self.problem = problem
        self.field = field
        self.limit = limit
        self.retry_after_s = retry_after_s

    def answer(self, rid: int) -> RequestError:
        problem, field = _sendable(self.problem[:4096]), _sendable(self.field[:256])
        return RequestError(rid, self.code, problem, field, self.limit, self.retry_after_s)


def _sendable(text: str) -> str:
    """Without halves of surrogate pairs, which a client's JSON may have escaped and UTF-8 does not know."""
    return text.encode(errors="replace").decode()


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a running cluster. `context_len` and `pool_tokens` hold prompt and answer together."""

    context_len: int
    pool_tokens: int
    vocab_size: int
    max_live: int  # requests, each choice of one counted
    max_choices: int  # of one request
    chars_per_token: int = CHARS_PER_TOKEN

    @classmethod
    def of_cluster(cls, go: Go, scheduler: SchedulerConfig, longest_token: int) -> Self:
        return cls(
            context_len=go.context_len,
            pool_tokens=go.num_pages * go.page_size,
            vocab_size=go.vocab_size,
            max_live=scheduler.max_waiting + scheduler.max_running,
            max_choices=scheduler.max_waiting,  # they arrive together, so an idle cluster must let all of them wait
            chars_per_token=max(CHARS_PER_TOKEN, longest_token),
        )

    @property
    def max_prompt(self) -> int:
        """Tokens that a prompt may have: at least one more must fit."""
        return min(self.context_len, self.pool_tokens) - 1

    @property
    def max_chars(self) -> int:
        """Characters beyond which no text is tokenized: as many of the longest token as could fit."""
        return self.max_prompt * self.chars_per_token

    @property
    def max_frame(self) -> int:
        """Bytes of the largest message that can hold an acceptable request: decoding more would waste memory."""
        return min(MAX_FRAME_BYTES, 2**20 + 4 * self.max_chars)

    def check_live(self, live: int, n: int) -> None:
        """Whether a request with `n` choices has room beside `live` ones of others."""
        if n > self.max_choices:
            problem = f"n: {n} choices are more than the {self.max_choices} requests that may wait in this cluster"
            raise Refused(ErrorCode.INVALID, problem, "n", self.max_choices)
        if live + n > self.max_live:
            problem = f"{live} requests are running or waiting, {self.max_live} is the limit; try again later"
            raise Refused(ErrorCode.OVERLOADED, problem, "max_waiting", self.max_live, RETRY_AFTER_S)

    def check_chars(self, chars: int, field: str) -> None:
        if chars > self.max_chars:
            problem = (
                f"the prompt has {chars} characters or more; with {self._prompt_limit()}, "
                f"more than {self.max_chars} characters are not tokenized"
            )
            raise Refused(ErrorCode.TOO_LONG, problem, field, self.max_chars)

    def too_large(self, problem: str) -> Refused:
        """The refusal of a message that is too large for any prompt that fits; `problem` says how large it is."""
        return Refused(ErrorCode.TOO_LONG, f"{problem}: {self._prompt_limit()}", "", self.max_frame)

    def check_prompt(self, tokens: IntArray, field: str) -> None:
        """Length first: it is cheaper to say and explains more."""
        if not tokens:
            raise Refused(ErrorCode.INVALID, f"{field}: the prompt is empty (it has no tokens)", field, 1)
        if len(tokens) > self.max_prompt:
            problem = f"the prompt has {len(tokens)} tokens; {self._prompt_limit()}"
            raise Refused(ErrorCode.TOO_LONG, problem, field, self.max_prompt)
        self.check_token_ids(tokens, field)

    def check_token_ids(self, tokens: IntArray, field: str) -> None:
        if tokens and max(tokens) >= self.vocab_size:
            index = next(i for i, token in enumerate(tokens) if token >= self.vocab_size)
            field = f"{field}[{index}]"
            problem = f"{field}: token id {tokens[index]} is outside the model's vocabulary of {self.vocab_size}"
            raise Refused(ErrorCode.INVALID, problem, field, self.vocab_size - 1)

    def answer_tokens(self, prompt_tokens: int, wanted: int | None) -> int:
        """How many tokens the answer may have: what was asked for, or as many as fit."""
        room = min(self.context_len, self.pool_tokens) - prompt_tokens
        return room if wanted is None else min(wanted, room)

    def _prompt_limit(self) -> str:
        """In the words of OpenAI and vLLM, by which clients such as litellm know a prompt that is too long."""
        which = "" if self.context_len <= self.pool_tokens else " (the size of the KV cache)"
        return f"this model's maximum context length is {self.max_prompt + 1} tokens{which}, one of them for the answer"
