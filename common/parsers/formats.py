"""Which formats a model writes, as far as its chat template tells."""

import re
from dataclasses import dataclass
from enum import Enum

from common.harmony import speaks_harmony


class ToolFormat(Enum):
    HERMES = "hermes"  # Hermes, Qwen 2.5 and 3
    LLAMA3_JSON = "llama3_json"
    MISTRAL = "mistral"
    HARMONY = "harmony"  # gpt-oss


class Reasoning(Enum):
    NONE = "none"
    TAGS = "tags"  # the answer may begin with <think>
    OPENED = "opened"  # the prompt ends with <think>
    CHANNEL = "channel"  # the answer is in the harmony format, with a channel for it


@dataclass(frozen=True, slots=True)
class Formats:
    """`tools` is None where the template has no format that is known here."""

    tools: ToolFormat | None
    reasoning: Reasoning


_THINK_LEFT_OPEN = re.compile(r"<think>(?:\\n|\s)*['\"]?\s*[-~+]?\s*(?:\}\}|$|\{%)")


def detect_formats(template: str, *, thinking: bool = True) -> Formats:
    """The formats that a chat template's text speaks of. `thinking` is the template argument `enable_thinking`: a
    template that offers it closes the reasoning itself when it is false."""
    if speaks_harmony(template):
        return Formats(ToolFormat.HARMONY, Reasoning.CHANNEL)
    tools = None
    if "[TOOL_CALLS]" in template:
        tools = ToolFormat.MISTRAL
    elif "<tool_call>" in template and "<function=" not in template:
        tools = ToolFormat.HERMES
    elif "<|python_tag|>" in template or ('"parameters":' in template and "<|start_header_id|>" in template):
        tools = ToolFormat.LLAMA3_JSON
    return Formats(tools, _reasoning(template, thinking))


def _reasoning(template: str, thinking: bool) -> Reasoning:
    if "</think>" not in template and "<think>" not in template:
        return Reasoning.NONE
    if "enable_thinking" in template and not thinking:
        return Reasoning.NONE
    # What is written behind the last message is where the prompt ends.
    ending = template[template.rfind("add_generation_prompt") :]
    return Reasoning.OPENED if _THINK_LEFT_OPEN.search(ending) else Reasoning.TAGS
