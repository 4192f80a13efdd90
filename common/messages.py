"""The whole wire schema: every message between two processes, in the order of a request's way.

    client ── Generate, Abort, GetStats ──► tokenizer        tokenizer ── AddRequest, Abort, GetStats ──► scheduler
    client ── Tokenize, Detokenize, GetInfo ──► tokenizer ── Tokens, Text, Info or RequestError ──► client
                                                             tokenizer ── OpenStream ──► detokenizer
    scheduler ── StepPlan ──► every worker rank              worker rank 0 ── StepResult ──► scheduler
    scheduler ── TokenBatch, RequestError, Stats ──► detokenizer
    detokenizer ── TextBatch, RequestError, Stats ──► tokenizer ── the same, and Beat ──► client
    every process ── Ready, Fatal, Pulse, Joined, Drained ──► launcher ── Go ──► every process

Request ids (`rid`) are int32. A client chooses its own, unique among its live requests on one connection; the
tokenizer replaces it by one per choice (of the `n` answers that were asked for) that is unique in the cluster. Every
choice ends with exactly one terminal row, a batch row whose finish code is not NONE, or with all others of its request
by a RequestError. Times are CLOCK_MONOTONIC nanoseconds, comparable between the processes of one machine.
"""

from array import array
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated, ClassVar

from common.codec import MAX_FRAME_BYTES, Struct, message
from common.fields import Bool, Bytes, FieldError, Float, Int, IntArray, IntMap, Ints, ListOf, MapOf, Maybe, Str
from common.logprobs import LOGPROB_ROWS, LogprobRows
from common.sampling_params import (
    DRAW_PARAMS,
    GRAMMAR,
    MAX_STOP_CHARS,
    MAX_TOKEN_ID,
    MAX_TOKENS,
    SAMPLING_PARAMS,
    DrawParams,
    Grammar,
    SamplingParams,
)

MAX_RID = 2**31 - 1
MAX_SLOTS = 2**14
MAX_BATCH_TOKENS = 2**22
MAX_PROMPT_CHARS = 2**24
MAX_CHAT_MESSAGES = 4096
MAX_CHOICES = 64
MAX_TEMPLATE_CHARS = 2**20
MAX_TOKEN_BYTES = 2**12
MAX_TOOLS_CHARS = 2**20
MAX_TEMPLATE_ARGS_CHARS = 2**16
_COUNT = 2**62

Rid = Annotated[int, Int(0, MAX_RID)]
Rids = Annotated[IntArray, Ints(MAX_SLOTS)]
TokenIds = Annotated[IntArray, Ints(MAX_BATCH_TOKENS, 0, MAX_TOKEN_ID)]
Counts = Annotated[IntArray, Ints(MAX_SLOTS)]
Times = Annotated[IntArray, Ints(16, 0, 2**63 - 1, "q")]
CacheSalt = Annotated[str, Str(256)]
Priority = Annotated[int, Int(-1000, 1000)]
Milliseconds = Annotated[int, Int(0, 2**31 - 1)]
Number = Annotated[int, Int(0, MAX_RID)]


class Finish(IntEnum):
    """Why a request ended, as a code in a batch's `finish` column."""

    NONE = 0  # it goes on
    STOP = 1  # end-of-sequence token, stop token or stop string
    LENGTH = 2  # max_tokens, or the context window or KV cache is full
    ABORT = 3  # the client asked for it or went away


class ErrorCode(IntEnum):
    """What kind of refusal a RequestError is; names are those that a gateway turns into HTTP statuses."""

    INVALID = 1  # a field is wrong: the client's mistake
    TOO_LONG = 2  # prompt does not fit the context window or the KV cache
    OVERLOADED = 3  # a queue limit was reached, try again
    SHUTTING_DOWN = 4  # the cluster is stopping
    INTERNAL = 5  # our mistake
    DEADLINE = 6  # not finished in the time that the client gave it


def ints(*values: int) -> IntArray:
    return array("i", values)


# ---- client -> tokenizer ------------------------------------------------------------------------------------------


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

    From `tools` on it is for chats. `tools` (a JSON list in OpenAI's form) and `template_args` (a JSON object, such as
    {"enable_thinking": false}) go to the chat template, or are empty. `add_generation_prompt` ends the prompt where the
    assistant begins to speak, `continue_final_message` in the middle of the last message, so that the answer goes on
    with it.
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
    that can be used, and `started_at` in Unix seconds.
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
    kv_tokens: Annotated[int, Int(1, _COUNT)]
    page_size: Annotated[int, Int(1, 4096)]
    vocab_size: Annotated[int, Int(1, MAX_TOKEN_ID)]
    eos_token_ids: Annotated[IntArray, Ints(256, 0, MAX_TOKEN_ID)]
    chat_template: Annotated[str, Str(MAX_TEMPLATE_CHARS)]
    started_at: Annotated[int, Int(0, _COUNT)]


# ---- tokenizer -> scheduler, tokenizer -> detokenizer --------------------------------------------------------------


@message
@dataclass(frozen=True, slots=True)
class AddRequest:
    """A tokenized, checked request. `stop_token_ids` holds every token that ends it (the model's own included).

    The last `generated` tokens of `prompt` are output that the client has already: the request goes on after them.
    `max_tokens` counts them too. The client also has the `prompt_logprobs` that the first `scored` tokens predict.
    `again`: it was handed in before, in an earlier term, so no limit of the queue refuses it.
    """

    TAG: ClassVar[int] = 4
    rid: Rid
    prompt: TokenIds
    max_tokens: Annotated[int, Int(1, MAX_BATCH_TOKENS)]
    stop_token_ids: Annotated[IntArray, Ints(1024, 0, MAX_TOKEN_ID)]
    draw: Annotated[DrawParams, DRAW_PARAMS]
    salt: CacheSalt = ""  # namespace of the prefix cache
    priority: Priority = 0  # higher goes first
    deadline_ms: Milliseconds = 0  # from arrival at the scheduler; 0 is none
    generated: Annotated[int, Int(0, MAX_BATCH_TOKENS)] = 0
    scored: Annotated[int, Int(0, MAX_BATCH_TOKENS)] = 0
    again: Annotated[bool, Bool()] = False
    grammar: Annotated[Grammar | None, Maybe(GRAMMAR)] = None
    ignore_eos: Annotated[bool, Bool()] = False  # the grammar's answer ends only where it cannot go on

    def __post_init__(self) -> None:
        if self.generated and not self.generated < min(len(self.prompt), self.max_tokens):
            raise FieldError("generated", "must leave a prompt, and something of max_tokens")


@message
@dataclass(frozen=True, slots=True)
class OpenStream:
    """What the detokenizer must know of a request; may arrive before or after its first tokens. The text of the tokens
    in `emitted` is with the client already."""

    TAG: ClassVar[int] = 5
    rid: Rid
    stop: Annotated[tuple[str, ...], ListOf(Str(512, 1), 16)]
    skip_special_tokens: Annotated[bool, Bool()]
    min_tokens: Annotated[int, Int(0, MAX_TOKENS)] = 0  # stop strings that end in their text do not count
    emitted: TokenIds = field(default_factory=ints)


# ---- scheduler <-> workers -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class History:
    """All known tokens of the request that enters `slot`: its prompt, then what it has generated so far."""

    slot: Annotated[int, Int(0, MAX_SLOTS - 1)]
    prompt_len: Annotated[int, Int(0, MAX_BATCH_TOKENS)]
    tokens: TokenIds


@dataclass(frozen=True, slots=True)
class Scoring:
    """Prompt tokens whose log probability is asked for: chunk number `chunk` of the plan predicts `targets` with its
    tokens from number `begin` on."""

    chunk: Annotated[int, Int(0, MAX_SLOTS - 1)]
    begin: Annotated[int, Int(0, MAX_BATCH_TOKENS)]
    targets: TokenIds


@dataclass(frozen=True, slots=True)
class EnterGrammar:
    """The grammar of the request that enters `slot`, and what it has generated so far."""

    slot: Annotated[int, Int(0, MAX_SLOTS - 1)]
    grammar: Annotated[Grammar, GRAMMAR]
    ignore_eos: Annotated[bool, Bool()]
    generated: TokenIds


@message
@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step for the workers of `group`, as the difference to what they know. Applied in the order of the fields.

    `leave`          slots that are free now
    `enter_*`        slots that are taken: tokens already in the KV cache, and how to draw
    `page_*`         pages appended to slots' page tables (entering ones start empty): slot, how many, the page ids
    `copies`         page pairs src, dst, src, dst, ...: whole-page copies before anything is computed (copy-on-write)
    `chunk_*`        prefill chunks: slot, length, and 1 where the chunk ends at the last known token, so that the next
                     one is sampled; `chunk_tokens` are all their tokens, one after another
    `decode`         bit s (byte s // 8, bit s % 8) is set when slot s decodes: its input is the token it sampled last
    `histories`      of entering slots that need one (DrawParams.needs_history)
    `enter_grammars` of entering slots that have one
    `scorings`       prompt tokens to score, of slots with `prompt_logprobs`
    """

    TAG: ClassVar[int] = 6
    step_id: Annotated[int, Int(0, _COUNT)]
    epoch: Annotated[int, Int(0, MAX_RID)]
    group: Annotated[str, Str(64)]
    leave: Counts
    enter_slots: Counts
    enter_lens: Annotated[IntArray, Ints(MAX_SLOTS, 0, MAX_BATCH_TOKENS)]
    enter_draw: Annotated[tuple[DrawParams, ...], ListOf(DRAW_PARAMS, MAX_SLOTS)]
    page_slots: Counts
    page_counts: Annotated[IntArray, Ints(MAX_SLOTS, 1)]
    pages: Annotated[IntArray, Ints(MAX_BATCH_TOKENS)]
    copies: Annotated[IntArray, Ints(2 * MAX_SLOTS)]
    chunk_slots: Counts
    chunk_lens: Annotated[IntArray, Ints(MAX_SLOTS, 1)]
    chunk_samples: Annotated[IntArray, Ints(MAX_SLOTS, 0, 1)]
    chunk_tokens: TokenIds
    decode: Annotated[bytes, Bytes(MAX_SLOTS // 8)]
    histories: Annotated[tuple[History, ...], ListOf(Struct(History), MAX_SLOTS)] = ()
    scorings: Annotated[tuple[Scoring, ...], ListOf(Struct(Scoring), MAX_SLOTS)] = ()
    enter_grammars: Annotated[tuple[EnterGrammar, ...], ListOf(Struct(EnterGrammar), MAX_SLOTS)] = ()

    def __post_init__(self) -> None:
        _same_length("enter", self.enter_slots, self.enter_lens, self.enter_draw)
        _same_length("page", self.page_slots, self.page_counts)
        _same_length("chunk", self.chunk_slots, self.chunk_lens, self.chunk_samples)
        if sum(self.page_counts) != len(self.pages):
            raise FieldError("pages", "as many as page_counts say")
        if sum(self.chunk_lens) != len(self.chunk_tokens):
            raise FieldError("chunk_tokens", "as many as chunk_lens say")
        if len(self.copies) % 2:
            raise FieldError("copies", "pairs of source and destination")


@message
@dataclass(frozen=True, slots=True)
class StepResult:
    """The sampled tokens of a step: first the sampling chunks in plan order, then the decoding slots in slot order.

    `times`: plan received, forward started, tokens ready. `logprobs` are of the tokens (by number) whose request asked
    for them, `prompt_logprobs` of the plan's scorings (by number). `failed` are tokens (by number) that are not to be
    used, because the request's grammar cannot be followed any more; `problems` say why.
    """

    TAG: ClassVar[int] = 7
    step_id: Annotated[int, Int(0, _COUNT)]
    epoch: Annotated[int, Int(0, MAX_RID)]
    group: Annotated[str, Str(64)]
    tokens: Annotated[IntArray, Ints(MAX_SLOTS, 0, MAX_TOKEN_ID)]
    times: Times
    logprobs: Annotated[LogprobRows | None, LOGPROB_ROWS] = None
    prompt_logprobs: Annotated[LogprobRows | None, LOGPROB_ROWS] = None
    failed: Annotated[IntArray, Ints(MAX_SLOTS)] = field(default_factory=ints)
    problems: Annotated[tuple[str, ...], ListOf(Str(1024), MAX_SLOTS)] = ()

    def __post_init__(self) -> None:
        _same_length("failed", self.failed, self.problems)


# ---- scheduler -> detokenizer -> tokenizer -> client ---------------------------------------------------------------


@message
@dataclass(frozen=True, slots=True)
class TokenBatch:
    """New tokens of a step, a row per request. `times`: planned, then StepResult.times, then committed.

    `logprobs` has an entry for each token of a row that asked for them; `prompt_logprobs` come in rows before or with
    the first token.
    """

    TAG: ClassVar[int] = 8
    rids: Rids
    counts: Counts
    token_ids: TokenIds
    finish: Annotated[bytes, Bytes(MAX_SLOTS)]
    cached: Annotated[IntArray, Ints(MAX_SLOTS)]  # prompt tokens that came from the prefix cache
    times: Times
    logprobs: Annotated[LogprobRows | None, LOGPROB_ROWS] = None
    prompt_logprobs: Annotated[LogprobRows | None, LOGPROB_ROWS] = None

    def __post_init__(self) -> None:
        _same_length("rids", self.rids, self.counts, self.finish, self.cached)
        _known_finish(self.finish)
        if sum(self.counts) != len(self.token_ids):
            raise FieldError("token_ids", "as many as counts say")


@dataclass(frozen=True, slots=True)
class Stopped:
    """Row `row` of a TextBatch ended with the stop token `token` or the stop string `string`."""

    row: Annotated[int, Int(0, MAX_SLOTS - 1)]
    token: Annotated[int | None, Maybe(Int(0, MAX_TOKEN_ID))] = None
    string: Annotated[str | None, Maybe(Str(MAX_STOP_CHARS, 1))] = None


_TOKEN_BYTES = IntMap(Ints(MAX_BATCH_TOKENS, 0, MAX_TOKEN_ID), Bytes(MAX_TOKEN_BYTES))


@message
@dataclass(frozen=True, slots=True)
class TextBatch:
    """New text of a step, a row per choice. A stop string's text is never in `texts`; its tokens are in `token_ids`.

    `choices` says which of its request's answers a row belongs to, from 0; between detokenizer and tokenizer, where
    every choice has a rid of its own, it is 0. `times`: TokenBatch.times, then received and sent by the detokenizer,
    then sent by the tokenizer. `logprobs` and `prompt_logprobs` are as in TokenBatch, and `token_bytes` holds the raw
    bytes of all tokens in them. `stopped` says what ended rows with finish STOP, where it was not the model's own end.
    """

    TAG: ClassVar[int] = 9
    rids: Rids
    choices: Annotated[IntArray, Ints(MAX_SLOTS, 0, MAX_CHOICES - 1)]
    counts: Counts
    token_ids: TokenIds
    texts: Annotated[tuple[str, ...], ListOf(Str(MAX_PROMPT_CHARS), MAX_SLOTS)]
    finish: Annotated[bytes, Bytes(MAX_SLOTS)]
    prompt_tokens: Counts
    cached: Counts
    times: Times
    logprobs: Annotated[LogprobRows | None, LOGPROB_ROWS] = None
    prompt_logprobs: Annotated[LogprobRows | None, LOGPROB_ROWS] = None
    token_bytes: Annotated[dict[int, bytes], _TOKEN_BYTES] = field(default_factory=dict)
    stopped: Annotated[tuple[Stopped, ...], ListOf(Struct(Stopped), MAX_SLOTS)] = ()

    def __post_init__(self) -> None:
        columns = (self.choices, self.counts, self.texts, self.finish, self.prompt_tokens, self.cached)
        _same_length("rids", self.rids, *columns)
        _known_finish(self.finish)
        if sum(self.counts) != len(self.token_ids):
            raise FieldError("token_ids", "as many as counts say")


@message
@dataclass(frozen=True, slots=True)
class RequestError:
    """The request ended with an error, and with it all its choices that had not ended. `field` and `limit` name what
    was wrong where something was."""

    TAG: ClassVar[int] = 10
    rid: Rid
    code: Annotated[int, Int(1, 6)]
    problem: Annotated[str, Str(4096)]
    field: Annotated[str, Str(256)] = ""
    limit: Annotated[int, Int(0, _COUNT)] = 0
    retry_after_s: Annotated[float, Float(0.0, 1e6)] = 0.0


@message
@dataclass(frozen=True, slots=True)
class Stats:
    """Counters and gauges by name, such as `scheduler.free_pages`; each process on the way adds its own. A histogram
    takes a counter per bucket (common/metrics.py), of which there are some 200."""

    TAG: ClassVar[int] = 11
    query: Rid
    values: Annotated[dict[str, int], MapOf(Int(-_COUNT, _COUNT), 1024)] = field(default_factory=dict)


@message
@dataclass(frozen=True, slots=True)
class Beat:
    """Sent to a client whose requests have been silent for a moment: the cluster lives. Also finds dead clients."""

    TAG: ClassVar[int] = 12


# ---- every process <-> launcher ------------------------------------------------------------------------------------


@message
@dataclass(frozen=True, slots=True)
class Ready:
    """A process has loaded all it needs. `info` holds what others must know of it (a worker: its pages, limits),
    `labels` what a user wants to read (a worker: architecture, dtype, device)."""

    TAG: ClassVar[int] = 13
    name: Annotated[str, Str(64, 1)]
    pid: Annotated[int, Int(1, 2**31)]
    info: Annotated[dict[str, int], MapOf(Int(0, _COUNT), 64)]
    labels: Annotated[dict[str, str], MapOf(Str(256), 16)] = field(default_factory=dict)


@message
@dataclass(frozen=True, slots=True)
class Fatal:
    """A process ends because of `problem`, in words that a user understands."""

    TAG: ClassVar[int] = 14
    name: Annotated[str, Str(64, 1)]
    problem: Annotated[str, Str(8192)]


@message
@dataclass(frozen=True, slots=True)
class Go:
    """All processes are ready: serve within these limits. Sent again when one of the other fields has changed. `labels`
    are for users to read.

    `term` numbers the conversations between tokenizer, scheduler and detokenizer, `epoch` those between scheduler and
    workers. When one of the partners was replaced, a new one begins, with sockets of its own (common/sockets.py), and
    nothing of the old one is heard any more. `draining`: finish what is there and take nothing new. `restarts` counts
    by process.
    """

    TAG: ClassVar[int] = 15
    num_pages: Annotated[int, Int(1, MAX_RID)]
    page_size: Annotated[int, Int(1, 4096)]
    context_len: Annotated[int, Int(2, MAX_BATCH_TOKENS)]
    vocab_size: Annotated[int, Int(1, MAX_TOKEN_ID)]
    eos_token_ids: Annotated[IntArray, Ints(256, 0, MAX_TOKEN_ID)]
    labels: Annotated[dict[str, str], MapOf(Str(256), 16)] = field(default_factory=dict)  # rank 0's, and `version`
    term: Number = 0
    epoch: Number = 0
    draining: Annotated[bool, Bool()] = False
    restarts: Annotated[dict[str, int], MapOf(Int(0, _COUNT), 128)] = field(default_factory=dict)


@message
@dataclass(frozen=True, slots=True)
class Pulse:
    """A process is alive. `progress` changes with all that its work comes on while `busy` with it."""

    TAG: ClassVar[int] = 40
    name: Annotated[str, Str(64, 1)]
    progress: Annotated[int, Int(0, _COUNT)]
    busy: Annotated[bool, Bool()]


@message
@dataclass(frozen=True, slots=True)
class Joined:
    """A worker rank takes plans of `epoch`, and of no earlier one. It has executed `steps` plans in its life: ranks
    whose numbers differ have diverged. From the gateway: it is connected to the tokenizer (both numbers are 0)."""

    TAG: ClassVar[int] = 41
    name: Annotated[str, Str(64, 1)]
    epoch: Number
    steps: Annotated[int, Int(0, _COUNT)]


@message
@dataclass(frozen=True, slots=True)
class Drained:
    """The tokenizer takes no new requests, and every one that it had has been answered."""

    TAG: ClassVar[int] = 42
    name: Annotated[str, Str(64, 1)]


@message
@dataclass(frozen=True, slots=True)
class Progress:
    """How far a process has come with loading, in units of its own (bytes of weights)."""

    TAG: ClassVar[int] = 16
    name: Annotated[str, Str(64, 1)]
    done: Annotated[int, Int(0, _COUNT)]
    total: Annotated[int, Int(0, _COUNT)]


def _check_chat_fields(msg: Generate | Tokenize) -> None:
    if msg.chat is None:
        for name in ("tools", "template_args", "continue_final_message"):
            if getattr(msg, name):
                raise FieldError(name, "is for chats")
    elif msg.continue_final_message and msg.add_generation_prompt:
        raise FieldError("continue_final_message", "cannot be together with add_generation_prompt")


def _known_finish(codes: bytes) -> None:
    if codes and max(codes) > max(Finish):
        raise FieldError("finish", f"codes must be at most {max(Finish)}, got {max(codes)}")


def _same_length(what: str, *columns: IntArray | bytes | tuple[object, ...]) -> None:
    if len({len(column) for column in columns}) > 1:
        raise FieldError(what, f"columns must have the same length, got {[len(c) for c in columns]}")
