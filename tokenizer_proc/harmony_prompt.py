"""Messages and tools as the chat template of gpt-oss, in OpenAI's harmony format (common/harmony.py), wants them. Where
a conversation in OpenAI's schema is not what it expects, it leaves something out or gives up:

- it calls reasoning `thinking`, and takes no content beside that in a message that calls: both go to one channel;
- it shows the first call of a message, and takes each result to be that of the last call that it has shown;
- of instructions it shows those in the first message;
- it wants a description of each tool.
"""

from typing import Any

from tokenizer_proc.conversation import Message, one_by_one, system_in_front


def harmony_messages(messages: list[Message]) -> list[Message]:
    """The same conversation with one message of instructions, and each call in a message before its result."""
    return one_by_one([_thinking(message) for message in system_in_front(messages)])


def harmony_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The same, each with a description."""
    if tools is None:
        return None
    return [{**tool, "function": {**tool["function"], "description": _description(tool)}} for tool in tools]


def _description(tool: dict[str, Any]) -> str:
    text = tool["function"].get("description")
    return text if isinstance(text, str) else ""


def _thinking(message: Message) -> Message:
    """With its reasoning under the template's name."""
    if "reasoning_content" not in message:
        return message
    rest = {name: value for name, value in message.items() if name != "reasoning_content"}
    thinking = message["reasoning_content"]
    if message.get("tool_calls") and message["content"]:
        return {**rest, "content": "", "thinking": "\n\n".join(filter(None, (thinking, message["content"])))}
    return {**rest, "thinking": thinking}
