"""Lines of a batch on a local cluster: OpenAI's bodies as requests over ipc, and answers as OpenAI's responses."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from client_cli.batch_file import Line, Outcome
from client_cli.openai_body import CHAT
from client_cli.runs import describe, submit
from common.answer import Answer, tokens_of
from common.fields import FieldError
from common.json_request import JsonRequest, parse_request
from common.logprobs import TokenLogprobs
from common.messages import ErrorCode, Finish, RequestError
from common.openai_logprobs import CompletionLogprobs, chat_logprobs
from common.rows import Row
from common.sampling_params import MAX_LOGPROBS

if TYPE_CHECKING:
    from client_cli.link import Link

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions
_STATUS = {
    ErrorCode.INVALID: 400,
    ErrorCode.TOO_LONG: 400,
    ErrorCode.OVERLOADED: 429,
    ErrorCode.SHUTTING_DOWN: 503,
    ErrorCode.INTERNAL: 500,
    ErrorCode.DEADLINE: 504,
}
_ABOUT = ("stream", "user", "metadata")  # false as checked before; for logs of the provider
_NOTHING: dict[str, Any] = {  # what asks for nothing that ipc does not do by itself
    "echo": False, "best_of": 1, "suffix": "", "store": False, "service_tier": "auto", "tools": [],
    "tool_choice": "none",
}  # fmt: skip


def to_request(line: Line, models: frozenset[str]) -> JsonRequest:
    """The request of a line. Raises FieldError for what ipc cannot do, which includes every unknown field."""
    body = dict(line.body)
    model = body.pop("model", None)
    if model is not None and type(model) is not str:
        raise FieldError("model", "must be text")
    if model is not None and models and model not in models:
        raise FieldError("model", f"{model!r} is not served here; served is {', '.join(sorted(models))}")
    for name in _ABOUT:
        body.pop(name, None)
    values = {name: value for name, value in body.items() if value is not None}
    for name, nothing in _NOTHING.items():
        if name in values and type(values[name]) is type(nothing) and values[name] == nothing:
            del values[name]
    for name in ("prompt_logprobs", "tools"):
        if name in values:
            raise FieldError(name, "does not work over ipc; use --url with the cluster's HTTP address")
    if "response_format" in values:
        if values.get("grammar") is not None:
            raise FieldError("grammar", "excludes response_format")
        values["grammar"] = _grammar(values.pop("response_format"))
    if line.url == CHAT:
        values |= _chat_logprobs(values.pop("logprobs", False), values.pop("top_logprobs", None))
        if "prompt" in values:
            raise FieldError("prompt", f"belongs to another url than {CHAT}")
        if "max_completion_tokens" in values:
            values["max_tokens"] = values.pop("max_completion_tokens")
    else:
        if "messages" in values:
            raise FieldError("messages", f"belong to {CHAT}")
        prompt = values.get("prompt")
        if type(prompt) is list:
            if not all(type(token) is int for token in prompt):
                raise FieldError("prompt", "must be one text or one list of token ids")
            values["token_ids"] = values.pop("prompt")
        values.setdefault("max_tokens", DEFAULT_COMPLETION_TOKENS)
    return parse_request(values)


def _grammar(form: Any) -> dict[str, Any] | None:
    """OpenAI's `response_format` as the field `grammar`."""
    match form:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"kind": "json_object"}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return {"kind": "json_schema", "text": schema}
    raise FieldError("response_format", "must be of type text, json_object, or json_schema with a schema")


def _chat_logprobs(wanted: Any, top: Any) -> dict[str, Any]:
    """OpenAI's `logprobs` and `top_logprobs` of chats as the field `logprobs`."""
    if type(wanted) is not bool:
        raise FieldError("logprobs", "must be true or false")
    if not wanted and top:
        raise FieldError("top_logprobs", "needs logprobs: true")
    return {"logprobs": top or 0} if wanted else {}


def _scores(entries: Sequence[TokenLogprobs], *, chat: bool) -> dict[str, Any]:
    """With all alternatives that came: as many as were asked for."""
    if chat:
        return chat_logprobs(entries, MAX_LOGPROBS, as_ids=False)
    return CompletionLogprobs(MAX_LOGPROBS, as_ids=False).take(entries)


def to_response(line: Line, answers: list[Answer], served: str) -> dict[str, Any]:
    """A whole answer as OpenAI's response body. `served` is the model's name for lines that name none."""
    chat = line.url == CHAT
    choices = []
    for index, answer in enumerate(answers):
        text = "".join(answer.texts)
        said = {"message": {"role": "assistant", "content": text, **_thoughts(answer)}} if chat else {"text": text}
        scores = None
        if answer.logprobs is not None:
            scores = _scores(answer.logprobs, chat=chat)
        choices.append({"index": index, **said, "logprobs": scores, "finish_reason": answer.finish.name.lower()})
    prompt, completion = answers[0].prompt_tokens, tokens_of(answers) or 0
    return {
        "id": ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex,
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": line.body.get("model") or served,
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": answers[0].cached_tokens},
        },
    }


def _thoughts(answer: Answer) -> dict[str, str]:
    """As the gateway shows them."""
    thought = "".join(answer.thoughts)
    return {"reasoning": thought, "reasoning_content": thought} if thought else {}


def to_error(line: Line, status: int, message: str, field: str) -> Outcome:
    """A refusal in OpenAI's error format."""
    kind = "invalid_request_error" if 400 <= status < 500 else "server_error"
    body = {"error": {"message": message, "type": kind, "param": field or None, "code": status}}
    return Outcome(line.custom_id, status, body)


@dataclass(slots=True)
class _Running:
    line: Line
    answers: list[Answer]


class LocalRunner:
    """Runs lines over a connection of which it is the only user. They may call the model by one of `models` (any name
    where that is empty); to lines that do not, answers call it `served`."""

    def __init__(self, link: "Link", models: frozenset[str], served: str):
        self._link = link
        self._served = served
        self._models = models
        self._running: dict[int, _Running] = {}
        self._refused: list[Outcome] = []

    @property
    def live(self) -> int:
        return len(self._running) + len(self._refused)

    def start(self, line: Line) -> None:
        try:
            request = to_request(line, self._models)
        except FieldError as error:
            self._refused.append(to_error(line, 400, str(error), error.field))
            return
        rid, answers = submit(self._link, request, stream=False)
        self._running[rid] = _Running(line, answers)

    def poll(self, timeout_s: float) -> list[Outcome]:
        """Lines that have ended. Raises ConnectionLost, after which no line can end."""
        if self._refused:
            ended, self._refused = self._refused, []
            return ended
        found = (self._take(row) for row in self._link.poll(timeout_s))
        return [outcome for outcome in found if outcome is not None]

    def _take(self, row: Row | RequestError) -> Outcome | None:
        running = self._running[row.rid]
        if not isinstance(row, Row):
            del self._running[row.rid]
            return to_error(running.line, _STATUS[ErrorCode(row.code)], describe(row), row.field)
        running.answers[row.choice].add(row)
        if any(answer.finish is Finish.NONE for answer in running.answers):
            return None
        del self._running[row.rid]
        if any(answer.finish is Finish.ABORT for answer in running.answers):
            error = {"code": "aborted", "message": "the cluster aborted the request"}
            return Outcome(running.line.custom_id, 0, None, error)
        return Outcome(running.line.custom_id, 200, to_response(running.line, running.answers, self._served))

    def stop(self) -> None:
        """Abort what runs; its lines are not written, so that the next run does them again."""
        self._link.abort_all()

    def close(self) -> None:
        self._link.close()
