"""The body of /v1/chat/completions."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from common.messages import MAX_CHAT_MESSAGES
from common.sampling_params import MAX_LOGPROBS, MAX_TOKENS
from gateway_proc.errors import refused, unsupported
from gateway_proc.schemas.base import ApiModel, Items
from gateway_proc.schemas.sampling import SamplingFields

MAX_TOOLS = 128
Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class FunctionCall(ApiModel):
    name: Annotated[str, Field(max_length=256)]
    arguments: str


class ToolCall(ApiModel):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Part(ApiModel):
    """A part of a message's content; only text is understood, the rest is refused by its type. Parts of answers that
    are sent back say more of their text."""

    type: Annotated[str, Field(max_length=64)]
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class Message(ApiModel):
    role: Role
    content: str | Items[Part] | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_calls: Annotated[Items[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None

    UNSUPPORTED: ClassVar = {"audio": (), "function_call": ()}

    def text(self, path: str) -> str:
        """The content as one text. Raises ApiError for parts that are not text."""
        if self.content is None:
            if self.role != "assistant":
                raise refused(f"{path}.content", "is required")
            return self.refusal or ""
        if isinstance(self.content, str):
            return self.content
        return joined(self.content, f"{path}.content")


def joined(parts: list[Part], path: str) -> str:
    """The text of parts, which are joined by line breaks, as vLLM joins them. Raises ApiError for others than text."""
    texts = []
    for i, part in enumerate(parts):
        where = f"{path}[{i}]"
        if part.type in ("text", "input_text", "output_text"):
            if part.text is None:
                raise refused(f"{where}.text", "is required")
            texts.append(part.text)
        elif part.type == "refusal":
            texts.append(part.refusal or "")
        else:
            raise unsupported(f"{where}.type", f"{part.type!r} is not supported: this model reads text only")
    return "\n".join(texts)


class FunctionDefinition(ApiModel):
    name: Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\s\"\\]+$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(ApiModel):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(ApiModel):
    name: str


class NamedTool(ApiModel):
    type: Literal["function"] = "function"
    function: NamedFunction


class ChatRequest(SamplingFields):
    messages: Annotated[Items[Message], Field(min_length=1, max_length=MAX_CHAT_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[Items[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    UNSUPPORTED: ClassVar = {
        **SamplingFields.UNSUPPORTED,
        "audio": (),
        "modalities": (["text"], []),
        "prediction": (),
        "web_search_options": (),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "store": (False,),
        "service_tier": ("auto", "default"),
        "verbosity": ("medium",),
        "chat_template": (),
        "documents": ([],),
        "echo": (False,),
        "add_special_tokens": (False,),
        "stream_reasoning": (True,),
        "include": ([],),
        "best_of": (1,),
    }
