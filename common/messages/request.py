"""The way of a request: handed in to scheduler and detokenizer, its tokens and text back to the client."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from common.codec import Struct, message
from common.fields import Bool, Bytes, FieldError, Float, Int, IntArray, IntMap, Ints, ListOf, MapOf, Maybe, Str
from common.logprobs import LOGPROB_ROWS, LogprobRows
from common.messages.types import (
    MAX_BATCH_TOKENS,
    MAX_CHOICES,
    MAX_COUNT,
    MAX_PROMPT_CHARS,
    MAX_SLOTS,
    MAX_TOKEN_BYTES,
    CacheSalt,
    Counts,
    Milliseconds,
    Priority,
    Rid,
    Rids,
    Times,
    TokenIds,
    ints,
    known_finish,
    same_length,
)
from common.sampling_params import DRAW_PARAMS, GRAMMAR, MAX_STOP_CHARS, MAX_TOKEN_ID, MAX_TOKENS, DrawParams, Grammar


@message
@dataclass(frozen=True, slots=True)
class AddRequest:
    """A tokenized, checked request. `stop_token_ids` holds every token that ends it (the model's own included).

    The last `generated` tokens of `prompt` are output that the client has already: the request goes on after them.
    `max_tokens` counts them too. The client also has the `prompt_logprobs` that the first `scored` tokens predict.
    `waited_ms` after its request came to the cluster it is handed in again, in a new term or as a later step of a beam
    search; 0 is the first time. Then no limit of the queue refuses it, and its place there is by when the request came.
    `counted`: the counters of prompt tokens have had those of its prompt before.
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
    waited_ms: Milliseconds = 0
    grammar: Annotated[Grammar | None, Maybe(GRAMMAR)] = None
    ignore_eos: Annotated[bool, Bool()] = False  # the grammar's answer ends only where it cannot go on
    counted: Annotated[bool, Bool()] = False

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
    shows_stop: Annotated[bool, Bool()] = False  # the stop string, or the token, that ends the answer has text


Time = Annotated[int, Int(0, 2**63 - 1)]
_ROW_TIMES = IntMap(Ints(MAX_SLOTS, 0, MAX_SLOTS - 1), Int(0, 2**63 - 1))


@message
@dataclass(frozen=True, slots=True)
class TokenBatch:
    """New tokens of a step, a row per request. `times`: planned, then StepResult.times, then committed.

    `logprobs` has an entry for each token of a row that asked for them; `prompt_logprobs` come in rows before or with
    the first token. `started` tells of rows with a first token when the step that began their prompt was planned.
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
    started: Annotated[dict[int, int], _ROW_TIMES] = field(default_factory=dict)

    def __post_init__(self) -> None:
        same_length("rids", self.rids, self.counts, self.finish, self.cached)
        known_finish(self.finish)
        if sum(self.counts) != len(self.token_ids):
            raise FieldError("token_ids", "as many as counts say")


@dataclass(frozen=True, slots=True)
class Stopped:
    """Row `row` of a TextBatch ended with the stop token `token` or the stop string `string`."""

    row: Annotated[int, Int(0, MAX_SLOTS - 1)]
    token: Annotated[int | None, Maybe(Int(0, MAX_TOKEN_ID))] = None
    string: Annotated[str | None, Maybe(Str(MAX_STOP_CHARS, 1))] = None


@dataclass(frozen=True, slots=True)
class Timing:
    """When what happened to the choice of row `row` of a TextBatch: its request arrived at the tokenizer, the step that
    began its prompt was planned, its first token was sent. 0 where it has not."""

    row: Annotated[int, Int(0, MAX_SLOTS - 1)]
    arrived: Time = 0
    started: Time = 0
    first: Time = 0


_TOKEN_BYTES = IntMap(Ints(MAX_BATCH_TOKENS, 0, MAX_TOKEN_ID), Bytes(MAX_TOKEN_BYTES))


@message
@dataclass(frozen=True, slots=True)
class TextBatch:
    """New text of a step, a row per choice. A stop string's text is never in `texts`; its tokens are in `token_ids`.

    `choices` says which of its request's answers a row belongs to, from 0; between detokenizer and tokenizer, where
    every choice has a rid of its own, it is 0. `times`: TokenBatch.times, then received and sent by the detokenizer,
    then sent by the tokenizer. `logprobs` and `prompt_logprobs` are as in TokenBatch, and `token_bytes` holds the raw
    bytes of all tokens in them. `stopped` says what ended rows with finish STOP, where it was not the model's own end.
    `timings` tell of rows with a choice's first tokens or its end; between detokenizer and tokenizer only of `started`.
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
    timings: Annotated[tuple[Timing, ...], ListOf(Struct(Timing), MAX_SLOTS)] = ()

    def __post_init__(self) -> None:
        columns = (self.choices, self.counts, self.texts, self.finish, self.prompt_tokens, self.cached)
        same_length("rids", self.rids, *columns)
        known_finish(self.finish)
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
    limit: Annotated[int, Int(0, MAX_COUNT)] = 0
    retry_after_s: Annotated[float, Float(0.0, 1e6)] = 0.0


@message
@dataclass(frozen=True, slots=True)
class Stats:
    """Counters and gauges by name, such as `scheduler.free_pages`; each process on the way adds its own. A histogram
    takes a counter per bucket (common/metrics.py), of which there are some 200."""

    TAG: ClassVar[int] = 11
    query: Rid
    values: Annotated[dict[str, int], MapOf(Int(-MAX_COUNT, MAX_COUNT), 1024)] = field(default_factory=dict)


@message
@dataclass(frozen=True, slots=True)
class Beat:
    """Sent to a client whose requests have been silent for a moment: the cluster lives. Also finds dead clients."""

    TAG: ClassVar[int] = 12
