"""Which formats a model writes, as far as its chat template tells."""

import re
from dataclasses import dataclass
from enum import Enum

from common.harmony import speaks_harmony
from common.parsers.reasoning import APERTUS, COHERE, GEMMA, HUNYUAN, HUNYUAN3, MISTRAL, SEED, THINK, Tags


class ToolFormat(Enum):
    HERMES = "hermes"  # between <tool_call> tags: Hermes, Qwen, GLM; and MiniCPM5's
    LLAMA3_JSON = "llama3_json"
    MISTRAL = "mistral"
    GRANITE = "granite"  # 3; 4 writes as Hermes
    HARMONY = "harmony"  # gpt-oss
    GEMMA = "gemma"  # 4
    FUNCTION_GEMMA = "function_gemma"
    DEEPSEEK = "deepseek"  # V3, R1, V3.1
    DSML = "dsml"  # DeepSeek V3.2
    KIMI = "kimi"  # K2
    PYTHONIC = "pythonic"  # Llama 4, LFM2, Olmo 3
    MINIMAX = "minimax"  # M2
    SEED = "seed"  # Seed-OSS
    COHERE = "cohere"  # Command R7B, Command A
    HUNYUAN = "hunyuan"  # A13B; MiniMax M1, Apriel, Jamba, Nemotron Nano 2
    HUNYUAN3 = "hunyuan3"
    APERTUS = "apertus"


# Those in which forced calls are a list of JSON objects without any marks.
LISTS = frozenset(ToolFormat) - {ToolFormat.HERMES, ToolFormat.LLAMA3_JSON, ToolFormat.HARMONY}


class Reasoning(Enum):
    NONE = "none"
    TAGS = "tags"  # the answer may begin with <think>, or what the model has instead
    OPENED = "opened"  # the prompt ends with that
    CHANNEL = "channel"  # the answer is in the harmony format, with a channel for it


@dataclass(frozen=True, slots=True)
class Formats:
    """`tools` is None where the template has no format that is known here. Reasoning is between the `tags`."""

    tools: ToolFormat | None
    reasoning: Reasoning
    tags: Tags = THINK


# The first of these that is in a template tells the format.
_MARKS = {
    "[TOOL_CALLS]": ToolFormat.MISTRAL,
    "<|tool_call|>": ToolFormat.GRANITE,
    "<|tool_call>": ToolFormat.GEMMA,
    "<｜tool▁calls▁begin｜>": ToolFormat.DEEPSEEK,
    "｜DSML｜": ToolFormat.DSML,
    "<|tool_calls_section_begin|>": ToolFormat.KIMI,
    "<minimax:tool_call>": ToolFormat.MINIMAX,
    "<seed:tool_call>": ToolFormat.SEED,
    "<|START_ACTION|>": ToolFormat.COHERE,
    "<|tool_call_start|>": ToolFormat.PYTHONIC,
    "<|tool_list_start|>": ToolFormat.PYTHONIC,  # LFM2's templates show no calls
    "List of tools: [": ToolFormat.PYTHONIC,  # LFM2.5's neither
    "<|tools_prefix|>": ToolFormat.APERTUS,
    "<start_function_call>": ToolFormat.FUNCTION_GEMMA,
    "<TOOLCALL>": ToolFormat.HUNYUAN,
    "<tool_calls>": ToolFormat.HUNYUAN,
    "<tool_sep{}>": ToolFormat.HUNYUAN3,
    "<tool_call>": ToolFormat.HERMES,
    "<function name=": ToolFormat.HERMES,
    "<function_calls>": ToolFormat.PYTHONIC,
}
_PYTHONIC = re.compile(r"\[\w+\(\w+=")  # the list that the model is shown
_LLAMA4 = "<|header_start|>"
_TAGS = {
    "<|channel>": GEMMA, "<seed:think>": SEED, "[THINK]": MISTRAL, "<|START_THINKING|>": COHERE,
    "<|START_RESPONSE|>": COHERE, "<think{}>": HUNYUAN3, "<think:opensource>": HUNYUAN3,
    "<|inner_prefix|>": APERTUS,
}  # fmt: skip
_HUNYUAN = re.compile(r"<\|extra_0\|>|<｜hy_")
_LEFT_OPEN = r"(?:\\n|\s)*['\"]?\s*[-~+]?\s*(?:\}\}|$|\{%)"


def detect_formats(template: str, *, takes_tools: bool = True, thinking: bool = True, prompt: str = "") -> Formats:
    """The formats that a chat template's text speaks of. To one that takes no tools they are described in Hermes'.
    `thinking` is the template argument that switches it, such as `enable_thinking`. `prompt` is how a prompt ends that
    the template made with all arguments: behind an opened or a closed tag, or neither. Without it the template's text
    has to tell."""
    if speaks_harmony(template):
        return Formats(ToolFormat.HARMONY, Reasoning.CHANNEL)
    tags = tags_of(template)
    tools = _tools(template) if takes_tools else ToolFormat.HERMES
    reasoning = Reasoning.NONE if tags is None else _reasoning(template, tags, thinking, prompt.rstrip())
    return Formats(tools, reasoning, tags or THINK)


def tags_of(template: str) -> Tags | None:
    """Between which tags a model with this template reasons, None where it does not."""
    tags = next((tags for mark, tags in _TAGS.items() if mark in template), None)
    if tags is None and (THINK.open in template or THINK.close in template):
        tags = HUNYUAN if _HUNYUAN.search(template) else THINK
    return tags


def _tools(template: str) -> ToolFormat | None:
    found = next((tools for mark, tools in _MARKS.items() if mark in template), None)
    if found is None and (_PYTHONIC.search(template) or _LLAMA4 in template):
        found = ToolFormat.PYTHONIC
    if found is None and (
        "<|python_tag|>" in template or ('"parameters":' in template and "<|start_header_id|>" in template)
    ):
        found = ToolFormat.LLAMA3_JSON
    return found


def _reasoning(template: str, tags: Tags, thinking: bool, prompt: str) -> Reasoning:
    if re.search(rf"{re.escape(tags.open)}(<[\w:]+>)?$", prompt):  # Seed-OSS opens its budget there
        return Reasoning.OPENED
    if prompt.endswith(tags.close) or not thinking:
        # Special tokens are no text: where the model writes them all the same, as Gemma 4 does behind results of tools,
        # they are not shown.
        return Reasoning.TAGS if tags.special else Reasoning.NONE
    if prompt:
        return Reasoning.TAGS
    # What is written behind the last message is where the prompt ends.
    ending = template[template.rfind("add_generation_prompt") :]
    return Reasoning.OPENED if re.search(re.escape(tags.open) + _LEFT_OPEN, ending) else Reasoning.TAGS
