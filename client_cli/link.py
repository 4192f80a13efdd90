"""What commands need of a connection, whatever it is made of: `LocalLink` or `HttpLink`."""

from collections.abc import Sequence
from typing import Protocol

from common.connection import Row
from common.messages import ChatMessage, RequestError
from common.sampling_params import SamplingParams


class Link(Protocol):
    """One thread submits requests and polls for their rows. See `Connection` for the meaning of each method.

    Rows of answers to chats have the model's reasoning apart from the text, as far as it can be told from it.
    """

    @property
    def live(self) -> int: ...

    def submit(
        self,
        prompt: str | Sequence[int] | Sequence[ChatMessage],
        params: SamplingParams,
        *,
        stream: bool = True,
        n: int = 1,
        cache_salt: str = "",
        priority: int = 0,
        deadline_ms: int = 0,
        tools: str = "",
        template_args: str = "",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        truncate_prompt_tokens: int | None = None,
        truncation_side: str = "",
    ) -> int: ...

    def abort(self, rid: int) -> None: ...

    def abort_all(self) -> None: ...

    def poll(self, timeout_s: float) -> list[Row | RequestError]: ...

    def close(self) -> None: ...
