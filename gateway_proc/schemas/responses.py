"""The body of /v1/responses: answers with text, without state on the server."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from common.messages import MAX_CHAT_MESSAGES
from common.sampling_params import MAX_TOKENS
from gateway_proc.schemas.base import ApiModel, Items, within, within_generate
from gateway_proc.schemas.chat import ChatRequest, Effort, Message
from gateway_proc.schemas.sampling import CacheSalt, Seed

SHARED = (
    "model", "stream", "user", "temperature", "top_p", "top_k", "min_p", "seed", "priority", "cache_salt",
    "deadline_ms",
)  # fmt: skip


class InputMessage(Message):
    """A message; answers that are sent back as they came have an id and a status too, and OpenAI's clients add more."""

    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class TextFormat(ApiModel):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(ApiModel):
    format: TextFormat | None = None

    UNSUPPORTED: ClassVar = {"verbosity": ("medium",)}


class ReasoningOptions(ApiModel):
    effort: Effort | None = None

    UNSUPPORTED: ClassVar = {"summary": (), "generate_summary": ()}


class ResponsesRequest(ApiModel):
    model: str | None = None
    input: str | Annotated[Items[InputMessage], Field(min_length=1, max_length=MAX_CHAT_MESSAGES - 1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    temperature: Annotated[float | None, within("temperature")] = None
    top_p: Annotated[float | None, within("top_p")] = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float | None, within("min_p")] = None
    seed: Seed | None = None
    priority: Annotated[int | None, within_generate("priority")] = None
    cache_salt: CacheSalt | None = None
    deadline_ms: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None

    UNSUPPORTED: ClassVar = {
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "include": ([],),
        "max_tool_calls": (),
        "parallel_tool_calls": (True, False),  # there are no tools
        "previous_response_id": (),
        "prompt": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "stream_options": ({}, {"include_obfuscation": False}),
        "tool_choice": ("auto", "none"),
        "tools": ([],),
        "top_logprobs": (0,),
    }

    def as_chat(self) -> ChatRequest:
        """The same as a chat. Raises ApiError for parts that are not text."""
        messages = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            messages += [{"role": m.role, "content": m.text(f"input[{i}]")} for i, m in enumerate(self.input)]
        fields: dict[str, Any] = {name: getattr(self, name) for name in SHARED}
        fields |= {"messages": messages, "max_completion_tokens": self.max_output_tokens, "include_reasoning": False}
        if self.truncation == "auto":
            fields["truncate_prompt_tokens"] = -1
        fields["reasoning_effort"] = self.reasoning.effort if self.reasoning else None
        form = self.text.format if self.text else None
        if form is not None:
            fields["response_format"] = {"type": form.type}
            if form.type == "json_schema":
                fields["response_format"]["json_schema"] = {"name": form.name, "schema": form.schema_}
        return ChatRequest.model_validate(fields)
