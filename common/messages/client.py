"""What a client says to the tokenizer, and the answers that the tokenizer gives by itself."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from common.codec import MAX_FRAME_BYTES, Struct, message
from common.fields import Bool, FieldError, Int, IntArray, Ints, ListOf, Maybe, OneOf, Str
from common.messages.types import (
    MAX_BATCH_TOKENS,
    MAX_CHAT_MESSAGES,
    MAX_CHOICES,
    MAX_COUNT,
    MAX_END_TOKENS,
    MAX_PROMPT_CHARS,
    MAX_PROMPT_END,
    MAX_TEMPLATE_ARGS_CHARS,
    MAX_TEMPLATE_CHARS,
    MAX_TOOLS_CHARS,
    CacheSalt,
    Milliseconds,
    Priority,
    Rid,
    TokenIds,
)
from common.sampling_params import MAX_TOKEN_ID, MAX_TOKENS, SAMPLING_PARAMS, SamplingParams

Truncated = Annotated[int | None, Maybe(Int(-1, MAX_TOKENS))]
Side = Annotated[str, OneOf(("", "left", "right"))]


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """`extra` is the rest of OpenAI's message, a JSON object with any of `name`, `tool_calls`, `tool_call_id` and
    `reasoning_content`, or empty."""

    role: Annotated[str, Str(64, 1)]
    content: Annotated[str, Str(MAX_PROMPT_CHARS)]
    extra: Annotated[str, Str(MAX_PROMPT_CHARS)] = ""


@message
@dataclass(frozen=True, slots=True)
class Generate:
    """Generate from exactly one of `text`, `token_ids` (used as they are) or `chat` (through the chat template).

    The answer is a stream of TextBatch rows, one per step when `stream`, else one row at the end, for each of `n`
    choices. They share the prompt's KV; choice i draws like a request of its own with seed + i (modulo 2**63). With
    beam search `n` is the number of beams, and all rows come at the end. Long answers with log probabilities come in
    several rows even without `stream`.
    Requests with different `cache_salt` never share cached prefixes. Higher `priority` goes first. What has not ended
    `deadline_ms` after its arrival ends with RequestError(DEADLINE); 0 is no deadline.

    From `tools` to `continue_final_message` it is for chats. `tools` (a JSON list in OpenAI's form) and `template_args`
    (a JSON object, such as {"enable_thinking": false}) go to the chat template, or are empty. `add_generation_prompt`
    ends the prompt where the assistant begins to speak, `continue_final_message` in the middle of the last message, so
    that the answer goes on with it.

    A prompt of more than `truncate_prompt_tokens` tokens (-1: as many as fit with one for the answer) loses its first
    ones, the tokenizer's own at the beginning of a text excepted; with a `truncation_side` left these too, and with
    right its last ones.
    """

    TAG: ClassVar[int] = 1
    rid: Rid
    text: Annotated[str | None, Maybe(Str(MAX_PROMPT_CHARS))]
    token_ids: Annotated[IntArray | None, Maybe(Ints(MAX_BATCH_TOKENS, 0, MAX_TOKEN_ID))]
    chat: Annotated[tuple[ChatMessage, ...] | None, Maybe(ListOf(Struct(ChatMessage), MAX_CHAT_MESSAGES, 1))]
    params: Annotated[SamplingParams, SAMPLING_PARAMS]
    stream: Annotated[bool, Bool()] = True
    n: Annotated[int, Int(1, MAX_CHOICES)] = 1
    cache_salt: CacheSalt = ""
    priority: Priority = 0
    deadline_ms: Milliseconds = 0
    tools: Annotated[str, Str(MAX_TOOLS_CHARS)] = ""
    template_args: Annotated[str, Str(MAX_TEMPLATE_ARGS_CHARS)] = ""
    add_generation_prompt: Annotated[bool, Bool()] = True
    continue_final_message: Annotated[bool, Bool()] = False
    truncate_prompt_tokens: Truncated = None
    truncation_side: Side = ""

    def __post_init__(self) -> None:
        if sum(x is not None for x in (self.text, self.token_ids, self.chat)) != 1:
            raise FieldError("prompt", "exactly one of text, token_ids and chat must be given")
        _check_chat_fields(self)


@message
@dataclass(frozen=True, slots=True)
class Abort:
    """End a request with all its choices now. Unknown ids are ignored: the request may have just finished."""

    TAG: ClassVar[int] = 2
    rid: Rid


@message
@dataclass(frozen=True, slots=True)
class GetStats:
    """Ask for a Stats answer with the same `query` number; it passes through every process on the way."""

    TAG: ClassVar[int] = 3
    query: Rid


@message
@dataclass(frozen=True, slots=True)
class Tokenize:
    """Ask for the Tokens of exactly one of `text` and `chat` (through the chat template), without a limit from the
    context window.

    `rid` is one of the client's numbers, as in Generate, of which a refusal speaks. `add_special_tokens` lets the
    tokenizer add its own to a text; `with_pieces` asks for the tokenizer's name of each token too. The rest is as in
    Generate.
    """

    TAG: ClassVar[int] = 20
    rid: Rid
    text: Annotated[str | None, Maybe(Str(MAX_PROMPT_CHARS))]
    chat: Annotated[tuple[ChatMessage, ...] | None, Maybe(ListOf(Struct(ChatMessage), MAX_CHAT_MESSAGES, 1))]
    add_special_tokens: Annotated[bool, Bool()] = True
    with_pieces: Annotated[bool, Bool()] = False
    tools: Annotated[str, Str(MAX_TOOLS_CHARS)] = ""
    template_args: Annotated[str, Str(MAX_TEMPLATE_ARGS_CHARS)] = ""
    add_generation_prompt: Annotated[bool, Bool()] = True
    continue_final_message: Annotated[bool, Bool()] = False
    truncate_prompt_tokens: Truncated = None
    truncation_side: Side = ""

    def __post_init__(self) -> None:
        if (self.text is None) == (self.chat is None):
            raise FieldError("prompt", "exactly one of text and chat must be given")
        _check_chat_fields(self)


@message
@dataclass(frozen=True, slots=True)
class Tokens:
    """The answer to Tokenize; `pieces` is empty where it was not asked for."""

    TAG: ClassVar[int] = 21
    rid: Rid
    token_ids: TokenIds
    pieces: Annotated[tuple[str, ...], ListOf(Str(MAX_PROMPT_CHARS), MAX_BATCH_TOKENS)] = ()


@message
@dataclass(frozen=True, slots=True)
class Detokenize:
    """Ask for the Text of tokens."""

    TAG: ClassVar[int] = 22
    rid: Rid
    token_ids: TokenIds
    skip_special_tokens: Annotated[bool, Bool()] = False


@message
@dataclass(frozen=True, slots=True)
class Text:
    """The answer to Detokenize."""

    TAG: ClassVar[int] = 23
    rid: Rid
    text: Annotated[str, Str(MAX_FRAME_BYTES)]


@message
@dataclass(frozen=True, slots=True)
class GetInfo:
    """Ask for the Info of the cluster."""

    TAG: ClassVar[int] = 24
    rid: Rid


@message
@dataclass(frozen=True, slots=True)
class Info:
    """What a running cluster serves and with which limits; nothing in it changes while it runs.

    `model` is the checkpoint's directory, `names` what clients may call it, the first being its name in answers.
    `max_prompt` is the most tokens of a prompt, `chat_template` the text of the model's own, empty where it has none
    that can be used, `started_at` is in Unix seconds, and `prompt_end` the end of a prompt that the template makes
    without further variables: behind an opened or a closed tag of reasoning, perhaps. Where it does not take tools
    (`takes_tools`), these are described to the model in Hermes' format.
    """

    TAG: ClassVar[int] = 25
    rid: Rid
    model: Annotated[str, Str(4096)]
    names: Annotated[tuple[str, ...], ListOf(Str(256, 1), 16, 1)]
    architecture: Annotated[str, Str(256)]
    dtype: Annotated[str, Str(256)]
    device: Annotated[str, Str(256)]
    version: Annotated[str, Str(256)]
    tp: Annotated[int, Int(1, 64)]
    context_len: Annotated[int, Int(2, MAX_BATCH_TOKENS)]
    max_prompt: Annotated[int, Int(1, MAX_BATCH_TOKENS)]
    kv_tokens: Annotated[int, Int(1, MAX_COUNT)]
    page_size: Annotated[int, Int(1, 4096)]
    vocab_size: Annotated[int, Int(1, MAX_TOKEN_ID)]
    eos_token_ids: Annotated[IntArray, Ints(MAX_END_TOKENS, 0, MAX_TOKEN_ID)]
    chat_template: Annotated[str, Str(MAX_TEMPLATE_CHARS)]
    started_at: Annotated[int, Int(0, MAX_COUNT)]
    prompt_end: Annotated[str, Str(MAX_PROMPT_END)] = ""
    takes_tools: Annotated[bool, Bool()] = True


def _check_chat_fields(msg: Generate | Tokenize) -> None:
    if msg.chat is None:
        for name in ("tools", "template_args", "continue_final_message"):
            if getattr(msg, name):
                raise FieldError(name, "is for chats")
    elif msg.continue_final_message and msg.add_generation_prompt:
        raise FieldError("continue_final_message", "cannot be together with add_generation_prompt")
