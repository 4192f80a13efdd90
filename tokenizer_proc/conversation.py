"""The same conversation in messages as some chat templates want them."""

from typing import Any

Message = dict[str, Any]


def system_in_front(messages: list[Message]) -> list[Message]:
    """With all that the system says in the first message."""
    said = [message["content"] for message in messages if message["role"] == "system"]
    if not said or (len(said) == 1 and messages[0]["role"] == "system"):
        return messages
    first = {"role": "system", "content": "\n\n".join(said)}
    return [first, *(message for message in messages if message["role"] != "system")]


def one_by_one(messages: list[Message]) -> list[Message]:
    """With each call in a message before its result."""
    shown: list[Message] = []
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        if len(message.get("tool_calls", ())) < 2:
            shown.append(message)
            continue
        results = []
        while at < len(messages) and messages[at]["role"] == "tool":
            results.append(messages[at])
            at += 1
        shown += _split(message, results)
    return shown


def _split(message: Message, results: list[Message]) -> list[Message]:
    """A message with several calls as several with one, each with its result: the one that names its call, else the
    next in order."""
    shown = []
    for i, call in enumerate(message["tool_calls"]):
        said = message if i == 0 else {"role": message["role"], "content": ""}
        shown.append({**said, "tool_calls": [call]})
        named = [result for result in results if call.get("id") and result.get("tool_call_id") == call["id"]]
        nameless = [result for result in results if "tool_call_id" not in result]
        for result in (named or nameless)[:1]:
            results.remove(result)
            shown.append(result)
    return shown + results
