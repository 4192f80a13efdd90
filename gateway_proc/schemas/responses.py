"""The body of /v1/responses: answers and calls of functions, without state on the server; and the same as a chat."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from common.messages import MAX_CHAT_MESSAGES
from common.sampling_params import MAX_TOKENS
from gateway_proc.errors import refused, unsupported
from gateway_proc.schemas.base import ApiModel, Items, within, within_generate
from gateway_proc.schemas.chat import MAX_TOOLS, ChatRequest, Effort, Message, Part, Role, joined
from gateway_proc.schemas.sampling import CacheSalt, Seed

SHARED = (
    "model", "stream", "user", "temperature", "top_p", "top_k", "min_p", "seed", "priority", "cache_salt",
    "deadline_ms", "parallel_tool_calls",
)  # fmt: skip
SEARCHES = ("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11")
SEALED = "reasoning.encrypted_content"  # what clients ask for that keep the conversation themselves
Anything = dict[str, Any]
ToolName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^\s\"\\]+$")]
MAX_SPACE = 64  # characters of a namespace's name
Space = Annotated[str, Field(min_length=1, max_length=MAX_SPACE, pattern=r"^[^\s\"\\]+$")]
CallId = Annotated[str, Field(min_length=1, max_length=256)]


class InputItem(ApiModel):
    """A message, thoughts, a call or its result, by `type`; the rest is refused by its type. What answers hold may be
    sent back as it came, with an id and a status too."""

    type: Annotated[str, Field(max_length=64)] = "message"
    id: str | None = None
    status: str | None = None
    role: Role | None = None
    content: str | Items[Part] | None = None
    phase: str | None = None
    call_id: CallId | None = None
    name: ToolName | None = None
    namespace: Space | None = None
    arguments: str | None = None
    output: str | Items[Part] | None = None
    summary: Items[Part] | None = None
    encrypted_content: str | None = None  # none is ever made here

    # of calls; OpenAI's SDK dumps `async` as it names it in Python
    UNSUPPORTED: ClassVar = {"async": (False,), "async_": (False,), "caller": ({"type": "direct"},)}

    def needed(self, name: str, where: str) -> Any:
        value = getattr(self, name)
        if value is None:
            raise refused(f"{where}.{name}", "is required")
        return value

    def text(self, where: str) -> str:
        """Of a message."""
        return Message(role=self.needed("role", where), content=self.content).text(where)

    def thoughts(self) -> str:
        """What there is to read of them."""
        parts = self.content if isinstance(self.content, list) and self.content else self.summary or []
        return "\n".join(part.text for part in parts if part.text)

    def result(self, where: str) -> str:
        output: str | list[Part] = self.needed("output", where)
        return output if isinstance(output, str) else joined(output, f"{where}.output")


def messages_of(items: list[InputItem]) -> list[Anything]:
    """The messages of a chat that say the same: thoughts, text and calls that follow each other are one of the
    assistant. Raises ApiError for items that are not understood."""
    messages: list[Anything] = []

    def turn(without: str = "") -> Anything:
        """The assistant's message that goes on, a new one where there is none `without` that field."""
        if not messages or messages[-1]["role"] != "assistant" or without in messages[-1]:
            messages.append({"role": "assistant"})
        return messages[-1]

    for i, item in enumerate(items):
        where = f"input[{i}]"
        match item.type:
            case "message":
                text = item.text(where)
                if item.role == "assistant":
                    turn("content")["content"] = text
                else:
                    messages.append({"role": item.role, "content": text})
            case "reasoning":
                if thoughts := item.thoughts():
                    messages.append({"role": "assistant", "reasoning_content": thoughts})
            case "function_call":
                function = {"name": flat_name(item.namespace, item.needed("name", where))}
                function["arguments"] = item.needed("arguments", where)
                call = {"id": item.needed("call_id", where), "type": "function", "function": function}
                turn().setdefault("tool_calls", []).append(call)
            case "function_call_output":
                result = {"role": "tool", "tool_call_id": item.needed("call_id", where)}
                messages.append(result | {"content": item.result(where)})
            case "item_reference":
                problem = "is not supported: nothing is kept here, items must be sent as they are (store: false)"
                raise unsupported(f"{where}.type", problem)
            case other:
                raise unsupported(f"{where}.type", f"{other!r} is not supported")
        if messages and len(messages[-1].get("tool_calls", ())) > MAX_TOOLS:
            raise refused("input", f"must have at most {MAX_TOOLS} calls in a row")
    return messages


def flat_name(namespace: str | None, name: str) -> str:
    """What the model calls a function of a namespace, as with vLLM."""
    return name if namespace is None else f"{namespace}__{name}"


class FunctionTool(ApiModel):
    """A function of the client; the rest is refused by its type."""

    type: Annotated[str, Field(max_length=64)]
    name: ToolName | None = None
    description: str | None = None
    parameters: Anything | None = None
    strict: bool | None = None

    def function(self, where: str) -> Anything:
        """What it says to a chat. Raises ApiError."""
        if self.type != "function":
            raise unsupported(f"{where}.type", f"{self.type!r} is not supported: tools are functions of the client")
        self.named(where)
        return self.model_dump(include={"name", "description", "parameters", "strict"}, exclude_none=True)

    def named(self, where: str) -> str:
        if self.name is None:
            raise refused(f"{where}.name", "is required")
        return self.name

    def shown(self) -> Anything:
        """As an answer repeats it."""
        more = {"parameters": None, "strict": False} if self.type == "function" else {}
        return {"type": self.type, **more, **self.model_dump(exclude_none=True)}


class ClientTool(FunctionTool):
    """Or a namespace of such `tools`. Those that search the web would run at OpenAI, and the model does not hear of
    them."""

    tools: Annotated[Items[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None

    def functions(self, where: str) -> list[tuple[str | None, Anything]]:
        """What it says to a chat, as namespaces and functions. Raises ApiError."""
        if self.type in SEARCHES:
            return []
        if self.type != "namespace":
            return [(None, self.function(where))]
        name = self.named(where)
        if len(name) > MAX_SPACE:
            raise refused(f"{where}.name", f"must have at most {MAX_SPACE} characters, got {len(name)}")
        return [(name, tool.function(f"{where}.tools[{i}]")) for i, tool in enumerate(self.tools or ())]

    def shown(self) -> Anything:
        within = {} if self.tools is None else {"tools": [tool.shown() for tool in self.tools]}
        return {**super().shown(), **within}


class FunctionChoice(ApiModel):
    type: Literal["function"]
    name: ToolName


class TextFormat(ApiModel):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Anything | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(ApiModel):
    format: TextFormat | None = None

    UNSUPPORTED: ClassVar = {"verbosity": ("medium",)}


class ReasoningOptions(ApiModel):
    effort: Effort | None = None
    summary: Annotated[str, Field(max_length=64)] | None = None
    generate_summary: Annotated[str, Field(max_length=64)] | None = None


class ResponsesRequest(ApiModel):
    model: str | None = None
    input: str | Annotated[Items[InputItem], Field(min_length=1, max_length=MAX_CHAT_MESSAGES - 1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[Items[ClientTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    include: Items[Annotated[str, Field(max_length=64)]] | None = None
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
        "max_tool_calls": (),
        "previous_response_id": (),
        "prompt": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "stream_options": ({}, {"include_obfuscation": False}),
        "top_logprobs": (0,),
    }

    def functions(self) -> list[tuple[str | None, Anything]]:
        """The client's functions, with the namespaces that they are in. Raises ApiError."""
        found = [each for i, tool in enumerate(self.tools or ()) for each in tool.functions(f"tools[{i}]")]
        if len(found) > MAX_TOOLS:
            raise refused("tools", f"must have at most {MAX_TOOLS} functions, got {len(found)}")
        return found

    def as_chat(self) -> tuple[ChatRequest, list[str]]:
        """The same as a chat, and the fields that mean nothing here. Raises ApiError for what is not understood."""
        messages = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        messages += (
            [{"role": "user", "content": self.input}] if isinstance(self.input, str) else messages_of(self.input)
        )
        if not messages:
            raise refused("input", "must hold more than reasoning that nobody here can read")
        fields: Anything = {name: getattr(self, name) for name in SHARED}
        fields |= {"messages": messages, "max_completion_tokens": self.max_output_tokens, **self._tools()}
        if self.truncation == "auto":
            fields["truncate_prompt_tokens"] = -1
        fields["reasoning_effort"] = self.reasoning.effort if self.reasoning else None
        form = self.text.format if self.text else None
        if form is not None:
            if form.type == "json_schema" and form.schema_ is None:
                raise refused("text.format.schema", "is required when type is json_schema")
            fields["response_format"] = {"type": form.type}
            if form.type == "json_schema":
                fields["response_format"]["json_schema"] = {"name": form.name, "schema": form.schema_}
        return ChatRequest.model_validate(fields), self._unused()

    def _tools(self) -> Anything:
        functions = [{**given, "name": flat_name(space, given["name"])} for space, given in self.functions()]
        choice: Any = self.tool_choice
        if isinstance(choice, FunctionChoice):
            if all(given["name"] != choice.name for given in functions):
                raise refused("tool_choice.name", f"{choice.name!r} is not one of the tools")
            choice = {"type": "function", "function": {"name": choice.name}}
        if not functions:
            return {"tool_choice": choice} if choice == "required" else {}
        return {"tools": [{"type": "function", "function": given} for given in functions], "tool_choice": choice}

    def _unused(self) -> list[str]:
        for i, wanted in enumerate(self.include or ()):
            if wanted != SEALED:
                raise unsupported(f"include[{i}]", f"{wanted!r} is not supported")
        unused = ["include"] if self.include else []
        unused += [f"tools[{i}]" for i, tool in enumerate(self.tools or ()) if tool.type in SEARCHES]
        reasoning = self.reasoning or ReasoningOptions()
        summaries = {"summary": reasoning.summary, "generate_summary": reasoning.generate_summary}
        return unused + [f"reasoning.{name}" for name, value in summaries.items() if value is not None]
