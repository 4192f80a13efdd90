"""From the arguments of a call to checked requests, and from rows to results. No I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any, TypeAlias, TypedDict, cast

from common.answer import Answer, tokens_of
from common.chat_answers import AnswerReader, ChatFormat, is_read
from common.json_request import JsonRequest, parse_request
from common.messages import Finish, Info, RequestError
from common.rows import Row
from rhizome.errors import GenerationError
from rhizome.outputs import RequestOutput, StreamOutput, to_output
from rhizome.sampling_params import SamplingParams, integers, listed

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
Message: TypeAlias = Mapping[str, Any]
Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None


class Options(TypedDict, total=False):
    """What a call says of its requests beside prompts and sampling, as in `common.messages.Generate`; None leaves one
    out."""

    cache_salt: str | None
    priority: int | None
    deadline_ms: int | None
    truncate_prompt_tokens: int | None
    truncation_side: str | None


class ChatOptions(Options, total=False):
    """What it says of conversations, with vLLM's names: tools in OpenAI's form, further variables of the chat template,
    and how the prompt ends (`continue_final_message` without `add_generation_prompt`, which is then False)."""

    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None


def prompts_of(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list. A list of integers is one prompt of token ids. Raises ValueError."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    found = listed("prompts", prompts, "a text, token ids, or a list of these")
    if found and all(isinstance(p, Integral) for p in found):
        return [cast(Sequence[int], found)]
    return cast(list[Prompt], found)


def conversations_of(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """One conversation or several, as a list. Raises ValueError."""
    found = listed("messages", messages, "a conversation or a list of them")
    if found and all(isinstance(m, Mapping) for m in found):
        return [cast(Sequence[Message], found)]
    return cast(list[Sequence[Message]], found)


def make_requests(kind: str, inputs: Sequence[Any], params: Params, options: Options) -> list[JsonRequest]:
    """Checked requests; `kind` is prompt or messages. Raises ValueError naming the prompt and the field, and TypeError
    for an unknown option."""
    for name in options:
        if name not in ChatOptions.__annotations__:
            raise TypeError(f"unexpected keyword argument {name!r}; {_instead(name)}")
    if isinstance(params, Sequence):
        each = list(params)
        if len(each) != len(inputs):
            raise ValueError(f"sampling_params: as many as prompts ({len(inputs)}) or one for all, got {len(each)}")
    else:
        each = [SamplingParams() if params is None else params] * len(inputs)
    if not all(isinstance(own, SamplingParams) for own in each):
        raise ValueError("sampling_params: must be SamplingParams, or a list of them")
    given_options = {name: value for name, value in options.items() if value is not None}
    found = []
    for index, (given, own) in enumerate(zip(inputs, each, strict=True)):
        try:
            found.append(_request(kind, given, own, given_options))
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from None
    return found


def make_request(given: Prompt | Sequence[Message], params: SamplingParams | None, options: Options) -> JsonRequest:
    """One checked request from a text, token ids or a conversation. Raises as make_requests does."""
    kind, own = "prompt", given
    if not isinstance(given, str | Mapping):
        own = listed("prompt", given, "a text, token ids or a conversation")
        kind = "messages" if own and isinstance(own[0], Mapping) else "prompt"
    (request,) = make_requests(kind, [own], params, options)
    return request


def _instead(name: str) -> str:
    if name in SamplingParams.__dataclass_fields__:
        return "how to sample is said by SamplingParams"
    return f"known are sampling_params, {', '.join(ChatOptions.__annotations__)}"


def _request(kind: str, given: Any, params: SamplingParams, options: dict[str, Any]) -> JsonRequest:
    if kind == "prompt" and isinstance(given, Mapping):
        given = _of_mapping(given)
    if kind == "messages":
        messages = listed("messages", given, "a list of messages")
        if not all(isinstance(message, Mapping) for message in messages):
            raise ValueError("messages: must be a list of objects with role and content")
        value: dict[str, Any] = {"messages": [dict(message) for message in messages]}
    elif isinstance(given, str):
        value = {"prompt": given}
    else:
        value = {"token_ids": integers("token_ids", given)}
    return replace(parse_request({**value, "n": params.n, **options}), params=params.to_wire())


def _of_mapping(prompt: Mapping[str, Any]) -> Any:
    """The text or token ids of one of vLLM's prompts, {"prompt": ...} or {"prompt_token_ids": ...}."""
    known = ("prompt", "prompt_token_ids")
    for name, value in prompt.items():
        if name not in known and value is not None:
            raise ValueError(f"{name}: is not known; a prompt is an object with prompt or prompt_token_ids")
    found = [prompt[name] for name in reversed(known) if prompt.get(name) is not None]
    if not found:
        raise ValueError("prompt: must be an object with prompt or prompt_token_ids")
    return found[0]


@dataclass(slots=True)
class Progress:
    """A request on its way; `index` is its place in the call. A `reader` is for answers to chats."""

    index: int
    request: JsonRequest
    reader: AnswerReader | None = None
    answers: list[Answer] = field(init=False)

    def __post_init__(self) -> None:
        self.answers = [Answer() for _ in range(self.request.n)]

    def read(self, row: Row | RequestError) -> Row:
        """What a row says. Raises GenerationError."""
        if isinstance(row, RequestError):
            raise GenerationError.of(self.index, row)
        return row if self.reader is None else self.reader.read(row)

    def take(self, row: Row) -> bool:
        """Add a row that has been read; true when all choices have ended. Raises GenerationError."""
        self.answers[row.choice].add(row)
        if any(answer.finish is Finish.NONE for answer in self.answers):
            return False
        if any(answer.finish is Finish.ABORT for answer in self.answers):
            raise GenerationError(self.index, "aborted", "the cluster aborted the request")
        return True

    @property
    def output(self) -> RequestOutput:
        prompt = self.request.prompt
        if isinstance(prompt, str):
            return to_output(prompt, None, self.answers)
        ids = [token for token in prompt if isinstance(token, int)]
        return to_output(None, ids or None, self.answers)

    @property
    def tokens(self) -> int:
        return tokens_of(self.answers) or 0


def _begin(index: int, request: JsonRequest, info: Info | None) -> Progress:
    """A request that begins, as it is sent: an answer to a chat is read in the model's format, where that is given."""
    if info is None or not needs_format(request):
        return Progress(index, request)
    form = ChatFormat.of_model(info, **request.options).under(request.params)
    return Progress(index, replace(request, params=form.asked(request.params)), form.reader(request.n))


def needs_format(request: JsonRequest) -> bool:
    """Whether the model's format must be known to read the answer."""
    return is_read(request.prompt, request.params)


def stream_output(row: Row) -> StreamOutput:
    """A row as a piece of an answer."""
    finish = None if row.finish is Finish.NONE else row.finish.name.lower()
    logprobs = None if row.logprobs is None else list(row.logprobs)
    of_prompt = None if row.prompt_logprobs is None else list(row.prompt_logprobs)
    return StreamOutput(
        row.choice, row.text, list(row.token_ids), finish, row.prompt_tokens, row.cached_tokens, logprobs,
        row.reasoning, row.stop_reason, of_prompt,
    )  # fmt: skip


def numbered(requests: Sequence[JsonRequest], info: Info | None) -> list[Progress]:
    """Requests that begin, in their order. Raises ValueError with prompt and field for what the model excludes."""
    found = []
    for index, request in enumerate(requests):
        try:
            found.append(_begin(index, request, info))
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from None
    return found
