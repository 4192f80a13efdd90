"""The bodies of /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API, and the same as a chat."""

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from common.messages import MAX_CHAT_MESSAGES
from common.sampling_params import MAX_STOP_STRINGS, MAX_TOKENS
from gateway_proc.conversation import takes_effort, thinking_switch
from gateway_proc.errors import refused, unsupported
from gateway_proc.schemas.base import ApiModel, Items, within, within_generate
from gateway_proc.schemas.chat import MAX_TOOLS, ChatRequest
from gateway_proc.schemas.sampling import CacheSalt, Seed, StopString

SHARED = (
    "model", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "priority", "cache_salt",
    "deadline_ms",
)  # fmt: skip
# What Claude Code writes before its system prompt: other with every request, so that no prefix would be found again.
BILLING = "x-anthropic-billing-header"
ROLES = {"tool_result": "user", "tool_use": "assistant", "thinking": "assistant", "redacted_thinking": "assistant"}
Name = Annotated[str, Field(min_length=1, max_length=256)]
Anything = dict[str, Any]


class TextBlock(ApiModel):
    """A block that must be text; the rest is refused by its type. `cache_control` means nothing: every prefix is kept
    as long as there is room."""

    type: Annotated[str, Field(max_length=64)]
    text: str | None = None
    cache_control: Anything | None = None
    citations: list[Any] | None = None


class Block(TextBlock):
    """A block of a message."""

    id: Name | None = None
    name: Name | None = None
    input: Anything | None = None
    tool_use_id: Name | None = None
    content: str | Items[TextBlock] | None = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None

    # of Anthropic's own tools; a call says that it is none of theirs
    UNSUPPORTED: ClassVar = {"caller": ({"type": "direct"},), "toolset_name": ()}


class Turn(ApiModel):
    role: Literal["user", "assistant", "system"]
    content: str | Items[Block]

    def as_messages(self, where: str) -> list[Anything]:
        """The messages of a chat that say the same: results of tools each in one of its own, before what the user says
        to them. Raises ApiError for blocks that are not understood."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        results: list[Anything] = []
        texts, thoughts, calls = [], [], []
        for i, block in enumerate(self.content):
            place = f"{where}.content[{i}]"
            if ROLES.get(block.type, self.role) != self.role:
                raise refused(f"{place}.type", f"{block.type!r} is only allowed where the role is {ROLES[block.type]}")
            match block.type:
                case "text":
                    texts.append(_needed(block, "text", place))
                case "thinking":
                    thoughts.append(_needed(block, "thinking", place))
                case "redacted_thinking":
                    pass  # nobody here can read it
                case "tool_use":
                    function = {"name": _needed(block, "name", place), "arguments": _json(block, place)}
                    calls.append({"id": _needed(block, "id", place), "type": "function", "function": function})
                case "tool_result":
                    text = text_of(block.content or "", f"{place}.content")
                    results.append(
                        {"role": "tool", "tool_call_id": _needed(block, "tool_use_id", place), "content": text}
                    )
                case other:
                    raise unsupported(f"{place}.type", f"{other[:64]!r} is not supported: this model reads text only")
        if len(calls) > MAX_TOOLS:
            raise refused(
                f"{where}.content", f"must have at most {MAX_TOOLS} blocks of type tool_use, got {len(calls)}"
            )
        if results and not texts:
            return results
        message: Anything = {"role": self.role, "content": "\n".join(texts)}
        if calls:
            message["tool_calls"] = calls
        if thoughts:
            message["reasoning_content"] = "".join(thoughts)
        return [*results, message]


class CustomTool(ApiModel):
    """A tool of the client; those that run at Anthropic are refused by their type."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\s\"\\]+$")]
    description: str | None = None
    input_schema: Anything
    strict: bool | None = None
    cache_control: Anything | None = None

    def as_chat(self) -> Anything:
        function = {"name": self.name, "description": self.description, "strict": self.strict}
        given = {name: value for name, value in function.items() if value is not None}
        return {"type": "function", "function": {**given, "parameters": self.input_schema}}


class ToolChoice(ApiModel):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(ApiModel):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted", "updates"] | None = None


class OutputFormat(ApiModel):
    type: Literal["json_schema"]
    schema_: Anything = Field(alias="schema")


class OutputConfig(ApiModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(ApiModel):
    """What makes a prompt."""

    model: str | None = None
    messages: Annotated[Items[Turn], Field(min_length=1, max_length=MAX_CHAT_MESSAGES)]
    system: str | Items[TextBlock] | None = None
    tools: Annotated[Items[CustomTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Anything | None = None
    thread: Anything | None = None

    UNSUPPORTED: ClassVar = {"mcp_servers": ([],), "container": ()}

    def as_chat(self, template: str) -> tuple[ChatRequest, list[str]]:
        """The same as a chat for a model with this chat template, and the fields that it has no use for. Raises
        ApiError."""
        if self.thread is not None:  # by this code Anthropic's SDK knows to send the whole conversation each time
            problem = "is not supported: no conversation is kept here, each request must hold the whole one"
            raise refused("thread", problem, "thread_unsupported_request")
        fields = {name: getattr(self, name) for name in SHARED if name in type(self).model_fields}
        fields |= {"messages": self._messages(), **self._tools()}
        if fields["messages"][-1]["role"] == "assistant" and not fields["messages"][-1].get("tool_calls"):
            fields["continue_final_message"] = True  # Anthropic's way to say how an answer begins
        more, unused = self._manner(template)
        return ChatRequest.model_validate(fields | more), unused

    def _messages(self) -> list[Anything]:
        system = text_of(self.system or "", "system")
        messages: list[Anything] = [{"role": "system", "content": system}] if system else []
        for i, turn in enumerate(self.messages):
            messages += turn.as_messages(f"messages[{i}]")
        if len(messages) > MAX_CHAT_MESSAGES:
            problem = f"must make at most {MAX_CHAT_MESSAGES} messages, with the system's and each tool_result as one"
            raise refused("messages", problem)
        return messages

    def _tools(self) -> Anything:
        fields: Anything = {}
        if self.tools is not None:
            fields["tools"] = [tool.as_chat() for tool in self.tools]
        choice = self.tool_choice
        if choice is None:
            return fields
        if choice.disable_parallel_tool_use is not None:
            fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if choice.type == "tool":
            if choice.name is None:
                raise refused("tool_choice.name", "is required when type is tool")
            if self.tools and all(tool.name != choice.name for tool in self.tools):
                raise refused("tool_choice.name", f"{choice.name[:64]!r} is not one of the tools")
            fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        else:
            fields["tool_choice"] = "required" if choice.type == "any" else choice.type
        return fields

    def _manner(self, template: str) -> tuple[Anything, list[str]]:
        """How the model shall answer: what the template is told of thinking and effort, and the output's format."""
        fields: Anything = {}
        unused = []
        thinking, output = self.thinking, self.output_config
        if output is not None and output.effort is not None:
            if takes_effort(template):
                fields["reasoning_effort"] = output.effort
            else:
                unused.append("output_config.effort")
        if thinking is not None:
            switch = thinking_switch(template)
            if thinking.type != "adaptive" and switch is not None:
                fields["chat_template_kwargs"] = {switch: thinking.type == "enabled"}
            elif thinking.type == "disabled":
                unused.append("thinking.type")
            if thinking.budget_tokens is not None:
                unused.append("thinking.budget_tokens")
            fields["include_reasoning"] = thinking.display != "omitted"
        if output is not None and output.format is not None:
            schema = {"name": "output", "schema": output.format.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return fields, unused


class Metadata(ApiModel):
    user_id: Annotated[str, Field(max_length=512)] | None = None


class MessagesRequest(CountTokensRequest):
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    stream: bool | None = None
    stop_sequences: Annotated[Items[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    metadata: Metadata | None = None
    temperature: Annotated[float | None, within("temperature")] = None
    top_p: Annotated[float | None, within("top_p")] = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float | None, within("min_p")] = None
    seed: Seed | None = None
    priority: Annotated[int | None, within_generate("priority")] = None
    cache_salt: CacheSalt | None = None
    deadline_ms: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None

    UNSUPPORTED: ClassVar = {**CountTokensRequest.UNSUPPORTED, "service_tier": ("auto", "standard_only")}

    def as_chat(self, template: str) -> tuple[ChatRequest, list[str]]:
        chat, unused = super().as_chat(template)
        chat.stop = self.stop_sequences
        chat.user = self.metadata.user_id if self.metadata else None
        return chat, unused


def text_of(blocks: str | list[TextBlock], where: str) -> str:
    """The text of blocks, which are joined by line breaks. Raises ApiError for others than text."""
    if isinstance(blocks, str):
        return blocks
    texts = []
    for i, block in enumerate(blocks):
        if block.type != "text":
            problem = f"{block.type[:64]!r} is not supported: this model reads text only"
            raise unsupported(f"{where}[{i}].type", problem)
        texts.append(_needed(block, "text", f"{where}[{i}]"))
    return "\n".join(text for text in texts if not text.startswith(BILLING))


def _needed(block: TextBlock, name: str, where: str) -> str:
    value: str | None = getattr(block, name)
    if value is None:
        raise refused(f"{where}.{name}", "is required")
    return value


def _json(block: Block, where: str) -> str:
    if block.input is None:
        raise refused(f"{where}.input", "is required")
    return json.dumps(block.input, ensure_ascii=False)
