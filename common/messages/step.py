"""Between the scheduler and the workers: one step of the batch, planned and done."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from common.codec import Struct, message
from common.fields import Bool, Bytes, FieldError, Int, IntArray, Ints, ListOf, Str
from common.logprobs import LOGPROB_ROWS, LogprobRows
from common.messages.types import (
    MAX_BATCH_TOKENS,
    MAX_COPIES,
    MAX_COUNT,
    MAX_DRAFT_TOKENS,
    MAX_RID,
    MAX_SLOTS,
    MAX_STATE_SAVES,
    Counts,
    Times,
    TokenIds,
    no_ints,
    same_length,
)
from common.sampling_params import DRAW_PARAMS, GRAMMAR, MAX_TOKEN_ID, DrawParams, Grammar


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
    """One step for the workers of `group`, as the difference to what they know. What changes is applied in the order of
    the fields, then all is computed.

    `decode`         bit s (byte s // 8, bit s % 8) is set when slot s decodes: its input is the token it sampled last
    `leave`          slots that are free now
    `enter_*`        slots that are taken: tokens already in the KV cache, and how to draw
    `page_*`         pages appended to slots' page tables (entering ones start empty): slot, how many, the page ids
    `copies`         page pairs src, dst, src, dst, ...: whole-page copies, one after another, before anything is
                     computed. With N pages on the device, page N + h is page h of the host tier: a copy between two
                     device pages is copy-on-write, one to the host makes room, one from it brings a cached page back
    `chunk_*`        prefill chunks: slot, length, and 1 where the chunk ends at the last known token, so that the next
                     one is sampled; `chunk_tokens` are all their tokens, one after another. The last `chunk_drafts`
                     of a sampling chunk are guesses: a token is drawn after the one before them and after each of
                     them, and only those guesses stay that are what was drawn. The column is empty without guesses
    `histories`      of entering slots that need one (DrawParams.needs_history)
    `enter_grammars` of entering slots that have one
    `scorings`       prompt tokens to score, of slots with `prompt_logprobs`
    `state_loads`    of models with recurrent layers: pairs of an entering slot and the snapshot of what those layers
                     keep of the tokens that are in its cache. Read before anything is computed
    `state_saves`    triples of a slot, a length and a snapshot: it takes what the recurrent layers keep of the slot's
                     first tokens, as many as the length says, of which this step computes the last
    """

    TAG: ClassVar[int] = 6
    step_id: Annotated[int, Int(0, MAX_COUNT)]
    epoch: Annotated[int, Int(0, MAX_RID)]
    group: Annotated[str, Str(64)]
    decode: Annotated[bytes, Bytes(MAX_SLOTS // 8)] = b""
    leave: Counts = field(default_factory=no_ints)
    enter_slots: Counts = field(default_factory=no_ints)
    enter_lens: Annotated[IntArray, Ints(MAX_SLOTS, 0, MAX_BATCH_TOKENS)] = field(default_factory=no_ints)
    enter_draw: Annotated[tuple[DrawParams, ...], ListOf(DRAW_PARAMS, MAX_SLOTS)] = ()
    page_slots: Counts = field(default_factory=no_ints)
    page_counts: Annotated[IntArray, Ints(MAX_SLOTS, 1)] = field(default_factory=no_ints)
    pages: Annotated[IntArray, Ints(MAX_BATCH_TOKENS + MAX_SLOTS)] = field(default_factory=no_ints)
    copies: Annotated[IntArray, Ints(2 * MAX_COPIES)] = field(default_factory=no_ints)
    chunk_slots: Counts = field(default_factory=no_ints)
    chunk_lens: Annotated[IntArray, Ints(MAX_SLOTS, 1)] = field(default_factory=no_ints)
    chunk_samples: Annotated[IntArray, Ints(MAX_SLOTS, 0, 1)] = field(default_factory=no_ints)
    chunk_tokens: TokenIds = field(default_factory=no_ints)
    histories: Annotated[tuple[History, ...], ListOf(Struct(History), MAX_SLOTS)] = ()
    scorings: Annotated[tuple[Scoring, ...], ListOf(Struct(Scoring), MAX_SLOTS)] = ()
    enter_grammars: Annotated[tuple[EnterGrammar, ...], ListOf(Struct(EnterGrammar), MAX_SLOTS)] = ()
    chunk_drafts: Annotated[IntArray, Ints(MAX_SLOTS, 0, MAX_DRAFT_TOKENS)] = field(default_factory=no_ints)
    state_loads: Annotated[IntArray, Ints(2 * MAX_SLOTS)] = field(default_factory=no_ints)
    state_saves: Annotated[IntArray, Ints(3 * MAX_STATE_SAVES)] = field(default_factory=no_ints)

    def __post_init__(self) -> None:
        same_length("enter", self.enter_slots, self.enter_lens, self.enter_draw)
        same_length("page", self.page_slots, self.page_counts)
        same_length("chunk", self.chunk_slots, self.chunk_lens, self.chunk_samples)
        if sum(self.page_counts) != len(self.pages):
            raise FieldError("pages", "as many as page_counts say")
        if sum(self.chunk_lens) != len(self.chunk_tokens):
            raise FieldError("chunk_tokens", "as many as chunk_lens say")
        if self.chunk_drafts:
            same_length("chunk_drafts", self.chunk_slots, self.chunk_drafts)
            columns = zip(self.chunk_drafts, self.chunk_lens, self.chunk_samples, strict=True)
            if any(drafts and not (samples and drafts < length) for drafts, length, samples in columns):
                raise FieldError("chunk_drafts", "only in chunks that sample, after a token that is known")
        if len(self.copies) % 2:
            raise FieldError("copies", "pairs of source and destination")
        if len(self.state_loads) % 2:
            raise FieldError("state_loads", "pairs of slot and snapshot")
        if len(self.state_saves) % 3:
            raise FieldError("state_saves", "triples of slot, length and snapshot")


@message
@dataclass(frozen=True, slots=True)
class StepResult:
    """The sampled tokens of a step: first the sampling chunks in plan order, then the decoding slots in slot order.

    A chunk with drafts has a token more for each of them that was right: `accepted` says how many, for the chunks with
    drafts in plan order.
    `times`: plan received, forward started, tokens ready. `logprobs` are of the tokens (by number) whose request asked
    for them, `prompt_logprobs` of the plan's scorings (by number). `failed` are tokens (by number) that are not to be
    used, because the request's grammar cannot be followed any more; `problems` say why.
    """

    TAG: ClassVar[int] = 7
    step_id: Annotated[int, Int(0, MAX_COUNT)]
    epoch: Annotated[int, Int(0, MAX_RID)]
    group: Annotated[str, Str(64)]
    tokens: Annotated[IntArray, Ints(MAX_SLOTS, 0, MAX_TOKEN_ID)]
    times: Times
    logprobs: Annotated[LogprobRows | None, LOGPROB_ROWS] = None
    prompt_logprobs: Annotated[LogprobRows | None, LOGPROB_ROWS] = None
    failed: Annotated[IntArray, Ints(MAX_SLOTS)] = field(default_factory=no_ints)
    problems: Annotated[tuple[str, ...], ListOf(Str(1024), MAX_SLOTS)] = ()
    accepted: Annotated[IntArray, Ints(MAX_SLOTS, 0, MAX_DRAFT_TOKENS)] = field(default_factory=no_ints)

    def __post_init__(self) -> None:
        same_length("failed", self.failed, self.problems)
