"""The body of /v1/completions."""

from typing import Annotated, ClassVar

from pydantic import Field, field_validator

from common.messages import MAX_CHOICES
from common.sampling_params import MAX_LOGPROBS, MAX_TOKEN_ID, MAX_TOKENS
from gateway_proc.schemas.base import Items
from gateway_proc.schemas.sampling import SamplingFields

MAX_PROMPTS = 1024
MAX_TOKENS_UNSAID = 16  # OpenAI's default
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
Several = Field(min_length=1, max_length=MAX_PROMPTS)


class CompletionRequest(SamplingFields):
    prompt: (
        str
        | Annotated[Items[TokenId], Field(min_length=1)]
        | Annotated[Items[str], Several]
        | Annotated[Items[Annotated[Items[TokenId], Field(min_length=1)]], Several]
    )
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = MAX_TOKENS_UNSAID
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @field_validator("max_tokens")
    @classmethod
    def null_says_nothing(cls, value: int | None) -> int:
        return MAX_TOKENS_UNSAID if value is None else value

    UNSUPPORTED: ClassVar = {**SamplingFields.UNSUPPORTED, "suffix": ("",)}
