"""An answer in the form of OpenAI's Responses API: items, whole and as the events of a stream. Pure."""

import time
from collections.abc import Mapping
from typing import Any

from common.messages import Finish
from gateway_proc.errors import ApiError
from gateway_proc.generation import Usage
from gateway_proc.schemas.responses import ResponsesRequest, flat_name

Event = dict[str, Any]
_FAILURES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_EVENTS = {"message": "response.output_text", "reasoning": "response.reasoning_text",
           "function_call": "response.function_call_arguments"}  # fmt: skip


class Answer:
    """Takes in the deltas of a chat one after the other and says each time what that adds to a stream. An item ends
    where the next one begins. `temperature` and `top_p` are those in use."""

    def __init__(self, body: ResponsesRequest, request_id: str, model: str, temperature: float, top_p: float):
        form = body.text.format if body.text else None
        self._request_id = request_id
        self._spaces = {flat_name(space, given["name"]): (space, given["name"]) for space, given in body.functions()}
        self._items: list[Event] = []
        self._texts: list[str] = []  # of the last item
        self._fixed: dict[str, Any] = {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": False,
            "temperature": temperature,
            "text": {"format": form.model_dump(by_alias=True, exclude_unset=True) if form else {"type": "text"}},
            "tool_choice": _choice(body),
            "tools": [tool.shown() for tool in body.tools or ()],
            "top_p": top_p,
            "truncation": body.truncation or "disabled",
            "user": body.user,
        }

    def begin(self) -> list[Event]:
        begun = self._state("in_progress")
        return [{"type": "response.created", "response": begun}, {"type": "response.in_progress", "response": begun}]

    def take(self, delta: dict[str, Any]) -> list[Event]:
        """`delta` is one of those of ChoiceReader: content, reasoning, or the beginning of a call or more of it."""
        if "content" in delta:
            return self._add({"type": "message", "role": "assistant", "content": []}, delta["content"])
        if "reasoning" in delta:
            return self._add({"type": "reasoning", "summary": [], "content": []}, delta["reasoning"])
        (call,) = delta["tool_calls"]
        if "id" not in call:
            return self._more(call["function"]["arguments"])
        space, name = self._spaces.get(call["function"]["name"], (None, call["function"]["name"]))
        item = {"type": "function_call", "call_id": call["id"], "name": name, "arguments": ""}
        return self._open(item if space is None else {**item, "namespace": space})

    def end(self, finish: Finish, usage: Usage) -> list[Event]:
        """All has been taken; the last event holds the whole response. Raises ApiError when the cluster cut the answer
        off."""
        if finish not in (Finish.STOP, Finish.LENGTH):
            raise ApiError(503, "the answer was cut off", code="shutting_down")
        status = "completed" if finish is Finish.STOP else "incomplete"
        details = None if finish is Finish.STOP else {"reason": "max_output_tokens"}
        events = [] if self._items else self.take({"content": ""})
        events += self._close(status)
        response = self._state(status) | {"incomplete_details": details, "usage": _usage(usage)}
        return [*events, {"type": f"response.{status}", "response": response}]

    def failed(self, error: ApiError) -> Event:
        """The end of a stream. OpenAI has a few codes, for all that can go wrong in the middle of an answer; `type` and
        `param` say more."""
        code = _FAILURES.get(error.status, "server_error")
        told = {"code": code, "message": error.message, "param": error.param, "type": error.type}
        return {"type": "response.failed", "response": self._state("failed") | {"output": [], "error": told}}

    def _state(self, status: str) -> dict[str, Any]:
        nothing = {"incomplete_details": None, "usage": None, "error": None}
        return {**self._fixed, "status": status, "output": list(self._items), **nothing}

    def _add(self, item: Event, text: str) -> list[Event]:
        """More of the last item if that is one of the same kind, else a new one."""
        if self._items and self._items[-1]["type"] == item["type"]:
            return self._more(text)
        return self._open(item) + self._more(text)

    def _open(self, item: Event) -> list[Event]:
        events = self._close("completed")
        number = len(self._items)
        item = {"id": f"{_PREFIXES[item['type']]}_{self._request_id}_{number}", **item, "status": "in_progress"}
        self._items.append(item)
        events.append({"type": "response.output_item.added", "output_index": number, "item": dict(item)})
        if "content" in item:
            events.append({"type": "response.content_part.added", **self._place(), "part": _part(item, "")})
        return events

    def _more(self, text: str) -> list[Event]:
        self._texts.append(text)
        return [self._event("delta", delta=text)] if text else []

    def _close(self, status: str) -> list[Event]:
        """The last item is whole, or `status` says that it is not."""
        if not self._items:
            return []
        item, text = self._items[-1], "".join(self._texts)
        self._texts.clear()
        if item["type"] == "function_call":
            item["arguments"] = text
            events = [self._event("done", arguments=text, name=item["name"])]
        else:
            item["content"] = [_part(item, text)]
            ended = {"type": "response.content_part.done", **self._place(), "part": item["content"][0]}
            events = [self._event("done", text=text), ended]
        item["status"] = status
        number = len(self._items) - 1
        return [*events, {"type": "response.output_item.done", "output_index": number, "item": dict(item)}]

    def _event(self, kind: str, **fields: Any) -> Event:
        """One of those that tell of the text of the last item."""
        name = self._items[-1]["type"]
        logprobs: dict[str, Any] = {"logprobs": []} if name == "message" else {}
        return {"type": f"{_EVENTS[name]}.{kind}", **self._place(), **fields, **logprobs}

    def _place(self) -> dict[str, Any]:
        item = self._items[-1]
        place = {"item_id": item["id"], "output_index": len(self._items) - 1}
        return place | ({"content_index": 0} if "content" in item else {})


def _part(item: Mapping[str, Any], text: str) -> dict[str, Any]:
    if item["type"] == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _choice(body: ResponsesRequest) -> Any:
    choice = body.tool_choice
    return choice if isinstance(choice, str) else choice.model_dump() if choice else "auto"


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
