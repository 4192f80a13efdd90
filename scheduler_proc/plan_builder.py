"""Collects one step's differences and turns them into a StepPlan."""

from collections.abc import Sequence
from dataclasses import dataclass

from common.fields import IntArray
from common.messages import EnterGrammar, History, Scoring, StepPlan, ints
from common.sampling_params import DrawParams
from scheduler_proc.request import Request


@dataclass(frozen=True, slots=True)
class Scored:
    """The prompt tokens `begin` to `end` - 1 of a request, whose predictions a step scores."""

    request: Request
    begin: int
    end: int


class PlanBuilder:
    """The columns of a StepPlan under construction, and the requests behind its rows."""

    def __init__(self, max_slots: int):
        self._leave = ints()
        self._enter_slots, self._enter_lens = ints(), ints()
        self._enter_draw: list[DrawParams] = []
        self._enter_grammars: list[EnterGrammar] = []
        self._page_slots, self._page_counts, self._pages = ints(), ints(), ints()
        self._copies = ints()
        self._chunk_slots, self._chunk_lens, self._chunk_samples, self._chunk_tokens = ints(), ints(), ints(), ints()
        self._chunk_drafts = ints()
        self._decode = bytearray((max_slots + 7) // 8)
        self._decoding: list[Request] = []
        self._sampling_chunks: list[Request] = []
        self._guesses: list[int] = []  # of the sampling chunks
        self._other_chunks: list[Request] = []
        self._histories: list[History] = []
        self._scorings: list[Scoring] = []
        self._state_loads, self._state_saves = ints(), ints()
        self.scored: list[Scored] = []  # in the order of the scorings
        self.num_tokens = 0
        self.num_scored_tokens = 0
        self.grammar_chars = 0

    @property
    def rows(self) -> list[Request]:
        """Every request that computes something in this step."""
        return self._sampling_chunks + self._other_chunks + self._decoding

    @property
    def chunks(self) -> list[Request]:
        """The requests that compute given tokens: a part of their prompts, or guesses."""
        return self._sampling_chunks + self._other_chunks

    @property
    def sampled(self) -> list[Request]:
        """The requests that get tokens, in the order of StepResult.tokens."""
        return self._sampling_chunks + self._decoding

    @property
    def guesses(self) -> list[int]:
        """How many guesses each of `sampled` has; empty where none has any."""
        return self._guesses + [0] * len(self._decoding) if any(self._guesses) else []

    @property
    def plain(self) -> bool:
        """Every row computes what follows its last token: there are no chunks of prompts."""
        return not self._other_chunks and all(self._guesses)

    def leave(self, slots: Sequence[int]) -> None:
        self._leave.extend(slots)

    def enter(self, request: Request) -> None:
        """The request takes its slot, with the cached prefix that it holds already."""
        self._enter_slots.append(request.slot)
        self._enter_lens.append(request.cached_len)
        self._enter_draw.append(request.draw)
        if request.grammar is not None:
            self._enter_grammars.append(EnterGrammar(request.slot, request.grammar, request.ignore_eos, request.answer))
            self.grammar_chars += len(request.grammar.text)
        self.append_pages(request, request.pages)
        if request.draw.needs_history:
            self._histories.append(History(request.slot, request.prompt_len, request.tokens[:]))

    def load_state(self, request: Request, snapshot: int) -> None:
        """The request, which enters, starts from it."""
        self._state_loads.extend((request.slot, snapshot))

    def save_state(self, request: Request, length: int, snapshot: int) -> None:
        """It takes the state after the request's first `length` tokens, the last of them in its chunk."""
        self._state_saves.extend((request.slot, length, snapshot))

    @property
    def saved_states(self) -> IntArray:
        """The snapshots that are taken in this step."""
        return self._state_saves[2::3]

    def copy(self, pairs: IntArray) -> None:
        """Copy pages before anything is computed: source, target, source, target, ..."""
        self._copies.extend(pairs)

    def append_pages(self, request: Request, pages: Sequence[int]) -> None:
        self._page_slots.append(request.slot)
        self._page_counts.append(len(pages))
        self._pages.extend(pages)

    def chunk(self, request: Request, tokens: IntArray, *, samples: bool, guesses: int = 0) -> None:
        """The last `guesses` of the tokens are not known to be right."""
        self._chunk_slots.append(request.slot)
        self._chunk_lens.append(len(tokens))
        self._chunk_samples.append(samples)
        self._chunk_drafts.append(guesses)
        if samples:
            self._guesses.append(guesses)
        self._chunk_tokens.extend(tokens)
        (self._sampling_chunks if samples else self._other_chunks).append(request)
        self.num_tokens += len(tokens)

    def score(self, request: Request, begin: int, end: int) -> None:
        """The prompt tokens `begin` to `end` - 1, all in the chunk added last, predict their successors."""
        start = request.cached_len - self._chunk_lens[-1]
        targets = request.tokens[begin + 1 : end + 1]
        self._scorings.append(Scoring(len(self._chunk_lens) - 1, begin - start, targets))
        self.scored.append(Scored(request, begin, end))
        self.num_scored_tokens += end - begin

    def decode(self, request: Request) -> None:
        """Rows must come in ascending order of slots, which is the order of the result."""
        assert not self._decoding or self._decoding[-1].slot < request.slot
        self._decode[request.slot >> 3] |= 1 << (request.slot & 7)
        self._decoding.append(request)
        self.num_tokens += 1

    def build(self, step_id: int, epoch: int, group: str) -> StepPlan:
        return StepPlan(
            step_id=step_id,
            epoch=epoch,
            group=group,
            leave=self._leave,
            enter_slots=self._enter_slots,
            enter_lens=self._enter_lens,
            enter_draw=tuple(self._enter_draw),
            enter_grammars=tuple(self._enter_grammars),
            page_slots=self._page_slots,
            page_counts=self._page_counts,
            pages=self._pages,
            copies=self._copies,
            chunk_slots=self._chunk_slots,
            chunk_lens=self._chunk_lens,
            chunk_samples=self._chunk_samples,
            chunk_tokens=self._chunk_tokens,
            decode=bytes(self._decode) if self._decoding else b"",
            histories=tuple(self._histories),
            scorings=tuple(self._scorings),
            chunk_drafts=self._chunk_drafts if any(self._chunk_drafts) else ints(),
            state_loads=self._state_loads,
            state_saves=self._state_saves,
        )
