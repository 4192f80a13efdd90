"""An answer in Anthropic's form: blocks of content, whole and as the events of a stream. Pure."""

import json
from typing import Any

from pydantic_core import from_json

from common.messages import Finish
from common.rows import Row
from gateway_proc.chat_reader import ChoiceReader
from gateway_proc.errors import ApiError
from gateway_proc.generation import Usage

Event = dict[str, Any]
_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking"),
           "tool_use": ("input_json_delta", "partial_json")}  # fmt: skip


class Answer:
    """Takes in the deltas of a chat one after the other and says each time what that adds to a stream. A block ends
    where the next one begins. Thoughts are signed with the answer's id, which proves nothing: clients send no thoughts
    back that are not signed."""

    def __init__(self, answer_id: str, model: str):
        self._head = {"id": answer_id, "type": "message", "role": "assistant", "model": model}
        self._blocks: list[Event] = []
        self._texts: list[str] = []  # of the last block
        self._cut = False  # the last call was cut off: it must not run
        self._stop: Event = {"stop_reason": None, "stop_sequence": None}

    def begin(self, usage: Usage) -> list[Event]:
        return [{"type": "message_start", "message": self.message(usage)}, {"type": "ping"}]

    def take(self, delta: dict[str, Any]) -> list[Event]:
        """`delta` is one of those of ChoiceReader: content, reasoning, or the beginning of a call or more of it."""
        if "content" in delta:
            return self._add({"type": "text", "text": ""}, delta["content"])
        if "reasoning" in delta:
            return self._add({"type": "thinking", "thinking": "", "signature": ""}, delta["reasoning"])
        (call,) = delta["tool_calls"]
        function = call["function"]
        if "id" in call:
            return self._open({"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}})
        return self._more(function["arguments"])

    def end(self, reader: ChoiceReader, last: Row | None) -> list[Event]:
        """All has been taken; `last` is the row that ended it. Raises ApiError when the cluster cut the answer off."""
        if last is None or last.finish not in (Finish.STOP, Finish.LENGTH):
            raise ApiError(503, "the answer was cut off", code="shutting_down")
        called = reader.finish_reason(last.finish) == "tool_calls"
        events = self._close()
        if last.finish is Finish.LENGTH:
            self._stop["stop_reason"] = "max_tokens"
        elif isinstance(last.stop_reason, str) and (self._cut or not called):
            self._stop = {"stop_reason": "stop_sequence", "stop_sequence": last.stop_reason}
        else:
            self._stop["stop_reason"] = "tool_use" if called else "end_turn"
        return events

    def closing(self, usage: Usage) -> list[Event]:
        """The end of a stream."""
        delta = {"type": "message_delta", "delta": self._stop, "usage": _usage(usage)}
        return [delta, {"type": "message_stop"}]

    def message(self, usage: Usage) -> dict[str, Any]:
        """The whole answer as far as it has come."""
        return {**self._head, "content": list(self._blocks), **self._stop, "usage": _usage(usage)}

    def _add(self, block: Event, text: str) -> list[Event]:
        """More of the last block if that is one of the same kind, else a new one."""
        if self._blocks and self._blocks[-1]["type"] == block["type"]:
            return self._more(text)
        return self._open(block) + self._more(text)

    def _open(self, block: Event) -> list[Event]:
        events = self._close()
        events.append({"type": "content_block_start", "index": len(self._blocks), "content_block": dict(block)})
        self._blocks.append(block)
        return events

    def _more(self, text: str) -> list[Event]:
        self._texts.append(text)
        kind, name = _DELTAS[self._blocks[-1]["type"]]
        return [self._delta(kind, name, text)] if text else []

    def _close(self) -> list[Event]:
        """The last block is whole."""
        if not self._blocks:
            return []
        block, text, events = self._blocks[-1], "".join(self._texts), []
        self._texts.clear()
        match block["type"]:
            case "tool_use":
                arguments = _object(text)
                self._cut = arguments is None
                block["input"] = arguments or {}
            case "thinking":
                block |= {"thinking": text, "signature": self._head["id"]}
                events.append(self._delta("signature_delta", "signature", block["signature"]))
            case _:
                block["text"] = text
        return [*events, {"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def _delta(self, kind: str, name: str, text: str) -> Event:
        index = len(self._blocks) - 1
        return {"type": "content_block_delta", "index": index, "delta": {"type": kind, name: text}}


def _object(text: str) -> dict[str, Any] | None:
    """Arguments of a call; None for what is no JSON object, as of a call that was cut off."""
    try:
        value = from_json(text, allow_inf_nan=False)  # refuses halves of surrogate pairs, too
        json.dumps(value, allow_nan=False)  # a number with a large exponent is infinite
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _usage(usage: Usage) -> dict[str, Any]:
    """Anthropic counts what comes from the cache apart from the rest of the prompt."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
