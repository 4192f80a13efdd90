"""Which formats a model writes, as far as its chat template tells."""

import re
from dataclasses import dataclass
from enum import Enum

from common.harmony import speaks_harmony
from common.parsers.reasoning import CLOSE, OPEN


class ToolFormat(Enum):
    HERMES = "hermes"  # between <tool_call> tags: Hermes, Qwen, GLM; and MiniCPM5's
    LLAMA3_JSON = "llama3_json"
    MISTRAL = "mistral"
    GRANITE = "granite"  # 3; 4 writes as Hermes
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


def detect_formats(template: str, *, takes_tools: bool = True, thinking: bool = True, prompt: str = "") -> Formats:
    """The formats that a chat template's text speaks of. To one that takes no tools they are described in Hermes'.
    `thinking` is the template argument that switches it, such as `enable_thinking`. `prompt` is how a prompt ends that
    the template made with all arguments: behind an opened or a closed tag, or neither. Without it the template's text
    has to tell."""
    if speaks_harmony(template):
        return Formats(ToolFormat.HARMONY, Reasoning.CHANNEL)
    tools = None
    if not takes_tools:
        tools = ToolFormat.HERMES
    elif "[TOOL_CALLS]" in template:
        tools = ToolFormat.MISTRAL
    elif "<|tool_call|>" in template:
        tools = ToolFormat.GRANITE
    elif "<tool_call>" in template or "<function name=" in template:
        tools = ToolFormat.HERMES
    elif "<|python_tag|>" in template or ('"parameters":' in template and "<|start_header_id|>" in template):
        tools = ToolFormat.LLAMA3_JSON
    return Formats(tools, _reasoning(template, thinking, prompt.rstrip()))


def _reasoning(template: str, thinking: bool, prompt: str) -> Reasoning:
    if CLOSE not in template and OPEN not in template:
        return Reasoning.NONE
    if prompt.endswith(OPEN):
        return Reasoning.OPENED
    if prompt.endswith(CLOSE) or not thinking:
        return Reasoning.NONE
    if prompt:
        return Reasoning.TAGS
    # What is written behind the last message is where the prompt ends.
    ending = template[template.rfind("add_generation_prompt") :]
    return Reasoning.OPENED if _THINK_LEFT_OPEN.search(ending) else Reasoning.TAGS
