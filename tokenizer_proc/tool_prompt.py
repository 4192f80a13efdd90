"""Tools for models whose chat template knows none: they are described in a system message, and calls and their results
are written into the messages, in the form that Hermes and Qwen use and that the gateway reads."""

import json
from typing import Any

_INSTRUCTIONS = """You can call these functions; each line is one of them with the JSON schema of its arguments:

<tools>
{tools}
</tools>

To call functions, write for each call a JSON object with its name and arguments, between tags:
<tool_call>
{{"name": "the function's name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


def describe_tools(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """The same conversation in messages without calls, results and ids."""
    plain = [_plain(message) for message in messages]
    if tools is None:
        return plain
    text = _INSTRUCTIONS.format(tools="\n".join(_json(tool["function"]) for tool in tools))
    if plain[0]["role"] == "system":
        return [{"role": "system", "content": f"{plain[0]['content']}\n\n{text}".lstrip()}, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    rest = {name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id")}
    if message["role"] == "tool":
        return {**rest, "role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [
        f"<tool_call>\n{_json({name: call['function'][name] for name in ('name', 'arguments')})}\n</tool_call>"
        for call in message.get("tool_calls", ())
    ]
    return {**rest, "content": "\n".join(filter(None, [content, *calls]))}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
