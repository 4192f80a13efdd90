"""From a chat request's messages and tools to what the cluster takes. Pure."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.harmony import speaks_harmony
from common.messages import ChatMessage, Info
from common.parsers import (
    THINK,
    AnswerParser,
    Reasoning,
    Tags,
    ToolFormat,
    after_reasoning,
    detect_formats,
    force_call,
    make_parser,
    needs_special_tokens,
    offer_calls,
)
from common.sampling_params import Grammar
from gateway_proc.errors import refused, unsupported
from gateway_proc.params import grammar_of
from gateway_proc.schemas.chat import ChatRequest, Message, NamedTool, Tool
from gateway_proc.schemas.native import TokenizeRequest

_HARMONY_EFFORTS = ("low", "medium", "high")  # those that the format knows


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat as the cluster takes it, and how its answers are read."""

    messages: list[ChatMessage]
    grammar: Grammar | None
    grammar_field: str
    template: dict[str, Any]  # further options of `submit`
    tool_format: ToolFormat | None
    offered: dict[str, dict[str, Any] | None]  # the tools' schemas by their names
    forced: bool
    parallel: bool
    reasoning: Reasoning
    together: bool  # reasoning is shown as content
    show_reasoning: bool
    tags: Tags = THINK  # around the reasoning

    @property
    def is_read(self) -> bool:
        """Whether answers go through a parser."""
        if self.tool_format is not None or self.tells_reasoning:
            return True
        return self.reasoning is Reasoning.CHANNEL or bool(self.tags.around)

    @property
    def tells_reasoning(self) -> bool:
        """Whether reasoning is told apart from content."""
        return self.reasoning is not Reasoning.NONE and not self.together

    @property
    def needs_special_tokens(self) -> bool:
        return needs_special_tokens(self.tool_format, self.reasoning, self.tags)

    def parser(self) -> AnswerParser:
        """A new parser, for one choice."""
        return make_parser(
            tools=self.tool_format,
            reasoning=self.reasoning,
            tags=self.tags,
            offered=self.offered,
            forced=self.forced,
            parallel=self.parallel,
            together=self.together,
        )


def thinking_switch(template: str) -> str | None:
    """The variable by which this chat template is told whether the model shall think, None where it has none."""
    if speaks_harmony(template):
        return None  # `thinking` is part of its messages
    found = (name for name in ("enable_thinking", "thinking") if re.search(rf"(?<![.'\"\w]){name}\b", template))
    return next(found, None)


def takes_effort(template: str) -> bool:
    """Whether this chat template can be told how much the model shall think."""
    return "reasoning_effort" in template


def template_arguments(request: ChatRequest, info: Info, effort_field: str = "reasoning_effort") -> dict[str, Any]:
    """Further variables of the template. Raises ApiError, with the client's name for the effort."""
    return _effort(request, info, effort_field) | (request.chat_template_kwargs or {})


def conversation_of(
    request: ChatRequest, info: Info, arguments: dict[str, Any] | None = None, prompt_end: str = ""
) -> Conversation:
    """What a request asks for, with the `template_arguments` and how a prompt made with them ends, where that is known.
    Raises ApiError."""
    arguments = template_arguments(request, info) if arguments is None else arguments
    thinking = arguments.get("enable_thinking", arguments.get("thinking", True))
    formats = detect_formats(
        info.chat_template, takes_tools=info.takes_tools, thinking=bool(thinking), prompt=prompt_end
    )
    reasoning = formats.reasoning
    goes_on = bool(request.continue_final_message)
    if reasoning is Reasoning.OPENED and (goes_on or request.add_generation_prompt is False):
        reasoning = Reasoning.TAGS  # the prompt ends with the message
    grammar, grammar_field = grammar_of(request)
    tools = request.tools or []
    built_in = bool(arguments.get("builtin_tools"))
    choice = request.tool_choice or "auto"
    forced = choice == "required" or isinstance(choice, NamedTool)
    without = request.tool_choice == "auto" and request.tools is None and not built_in
    if (forced and not tools) or without:
        raise refused("tool_choice", "is only allowed when tools are given")
    if not (tools or built_in):
        choice = "none"  # nothing in an answer is a call
    parallel = request.parallel_tool_calls is not False
    if formats.tags.special and (grammar is not None or forced):
        reasoning = Reasoning.NONE  # no grammar can name their special tokens: what it rules is all of the answer
    tool_format = None
    if choice != "none":
        tool_format = formats.tools
        if forced:
            if tool_format is None:
                problem = "cannot be enforced: this model's chat template has no tool format that is known here"
                raise unsupported("tool_choice", problem)
            if grammar is not None and grammar_field != "response_format":  # that is for answers without a call
                raise refused("tool_choice", f"cannot be forced together with {grammar_field}")
            several = parallel and choice == "required"  # a function that is named is called once
            grammar = after_reasoning(
                force_call(_wanted(request), tool_format, parallel=several), reasoning, forced=True
            )
            grammar_field = "tools"
    before = Reasoning.NONE if goes_on else reasoning
    enforceable = tool_format is ToolFormat.HERMES or (
        tool_format is ToolFormat.HARMONY and not goes_on and not built_in  # whose calls have other forms
    )
    if enforceable and _offers(tools, grammar, grammar_field) and not forced:
        grammar_field = "tools" if grammar is None else grammar_field
        grammar = offer_calls(_with_schemas(tools), before, _schema_of(grammar))
    elif grammar is not None and not forced:
        grammar = after_reasoning(grammar, before)
    return Conversation(
        messages=[wire_message(message, i) for i, message in enumerate(request.messages)],
        grammar=grammar,
        grammar_field=grammar_field,
        template=template_options(request, arguments, shown=choice != "none"),
        tool_format=tool_format,
        offered={tool.function.name: tool.function.parameters for tool in tools},
        forced=forced,
        parallel=parallel,
        reasoning=reasoning,
        together=request.separate_reasoning is False,
        show_reasoning=request.include_reasoning is not False,
        tags=formats.tags,
    )


def _effort(request: ChatRequest, info: Info, field: str) -> dict[str, Any]:
    """What the template is told of `reasoning_effort`. "none" is, as with vLLM and SGLang, no thinking at all where the
    template can be asked for that."""
    effort = request.reasoning_effort
    if effort is None:
        return {}
    if speaks_harmony(info.chat_template) and effort not in _HARMONY_EFFORTS:
        raise refused(field, f"must be one of {', '.join(_HARMONY_EFFORTS)} with this model, got {effort}")
    switch = thinking_switch(info.chat_template)
    if effort == "none" and switch is not None and not takes_effort(info.chat_template):
        return {switch: False}
    return {"reasoning_effort": effort}


def _offers(tools: Sequence[Tool], grammar: Grammar | None, field: str) -> bool:
    """Whether an answer has a grammar because it may hold calls: where a tool is strict, and beside a response_format,
    which is for answers without a call."""
    if grammar is None:
        return any(tool.function.strict for tool in tools)
    return bool(tools) and field == "response_format"


def _with_schemas(tools: Sequence[Tool]) -> list[tuple[str, dict[str, Any] | None]]:
    """The tools, with any arguments where they are not strict."""
    return [(tool.function.name, tool.function.parameters if tool.function.strict else {}) for tool in tools]


def _schema_of(grammar: Grammar | None) -> dict[str, Any] | None:
    if grammar is None:
        return None
    schema: dict[str, Any] = json.loads(grammar.text) if grammar.kind == "json_schema" else {"type": "object"}
    return schema


def _wanted(request: ChatRequest) -> list[tuple[str, dict[str, Any] | None]]:
    """The tools of which one must be called."""
    tools = [(tool.function.name, tool.function.parameters) for tool in request.tools or ()]
    if not isinstance(request.tool_choice, NamedTool):
        return tools
    name = request.tool_choice.function.name
    named = [tool for tool in tools if tool[0] == name]
    if not named:
        raise refused("tool_choice.function.name", f"{name[:64]!r} is not one of the tools")
    return named[:1]


def template_options(
    request: ChatRequest | TokenizeRequest, arguments: dict[str, Any], *, shown: bool
) -> dict[str, Any]:
    """What the chat template gets beside the messages, as options of `submit`: the tools where they are `shown`, and
    further `arguments`. Raises ApiError."""
    for name in ("messages", "tools", "add_generation_prompt", "continue_final_message"):
        if name in arguments:
            raise refused(f"chat_template_kwargs.{name}", "must be given as a field of the request")
    options: dict[str, Any] = {}
    if shown and request.tools:
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools]
        options["tools"] = json.dumps(tools, ensure_ascii=False)
    if arguments:
        options["template_args"] = json.dumps(arguments, ensure_ascii=False)
    if request.add_generation_prompt is not None:
        options["add_generation_prompt"] = request.add_generation_prompt
    if request.continue_final_message:
        if request.add_generation_prompt:
            raise refused("continue_final_message", "cannot be used together with add_generation_prompt")
        options |= {"continue_final_message": True, "add_generation_prompt": False}
    return options


def wire_message(message: Message, index: int) -> ChatMessage:
    """One message. `developer` is what newer models of OpenAI call `system`."""
    role = "system" if message.role == "developer" else message.role
    path = f"messages[{index}]"
    extra: dict[str, Any] = {}
    if message.tool_calls:
        extra["tool_calls"] = [call.model_dump(exclude_none=True) for call in message.tool_calls]
    for name in ("tool_call_id", "name"):
        if getattr(message, name) is not None:
            extra[name] = getattr(message, name)
    for reasoning in (message.reasoning_content, message.reasoning, message.thinking):
        if reasoning is not None:
            extra.setdefault("reasoning_content", reasoning)
    rest = {"extra": json.dumps(extra, ensure_ascii=False)} if extra else {}
    return ChatMessage(role, message.text(path), **rest)
