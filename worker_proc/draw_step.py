"""A step's way from logits to tokens: log probabilities of the model's own distribution, edits, grammars, the draw."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.logprobs import LogprobRows
from common.messages import StepPlan
from common.sampling_params import DrawParams
from worker_proc import logprobs
from worker_proc.errors import PlanError
from worker_proc.grammar_matcher import Failure, GrammarMatchers, Masks
from worker_proc.input_batch import SampledRows
from worker_proc.logit_edits import EditStep, LogitEditor
from worker_proc.logprobs import ScoreRows
from worker_proc.sampler import BestRows, Drawing, DrawRows, Sampler
from worker_proc.staging import Staged, Staging


@dataclass(frozen=True, slots=True)
class Scored:
    """Prompt tokens to score: rows of a step's flattened tokens, and what each of them predicts."""

    rows: Staged  # int64 [R]
    targets: Staged  # int64 [R]
    tops: list[int]  # alternatives per row
    counts: list[int]  # rows per scoring of the plan


@dataclass(frozen=True, slots=True)
class Prepared:
    """What rank 0 needs to draw a step's tokens."""

    edits: EditStep | None
    drawing: Drawing | None
    logprob_rows: list[int]  # whose log probabilities are asked for,
    tops: list[int]  # with so many alternatives each
    staged_rows: Staged | None  # `logprob_rows`, None where they are all rows or none


@dataclass(frozen=True, slots=True)
class Wanted:
    """All logits, unless only the likeliest token, or those that `filters` (see `ForwardBatch.filters`) keep."""

    likeliest: bool = False
    filters: Tensor | None = None


class DrawStep:
    """The draw parameters of every slot and what they ask for. The draw itself is for rank 0, which has `grammars`."""

    def __init__(
        self,
        max_slots: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
        grammars: GrammarMatchers | None = None,
        draw_rows: DrawRows | None = None,
        best_rows: BestRows | None = None,
        score_rows: ScoreRows | None = None,
        context_len: int = 2**20,
    ) -> None:
        self._vocab_size = vocab_size
        self._score_rows = score_rows
        self._sampler = Sampler(max_slots, device, draw_rows, best_rows)
        self._editor = LogitEditor(max_slots, vocab_size, device, context_len)
        self._draws: dict[int, DrawParams] = {}  # of slots that ask for log probabilities
        self._grammars = grammars
        self._with_grammar: set[int] = set()  # slots; every rank knows them
        self._wanted: tuple[Tensor, Wanted] | None = None  # what `wanted` said of these slots, while nobody comes

    def warm_up(self, logits: Tensor) -> None:
        """Draw from logits (float32 `[S, vocab]`, device) by all filters, as the first requests would."""
        self._sampler.warm_up(logits)

    def reset(self) -> None:
        """Every slot is free."""
        self._wanted = None
        self._draws.clear()
        self._with_grammar.clear()
        if self._grammars is not None:
            self._grammars.reset()

    def apply(self, plan: StepPlan, staging: Staging) -> None:
        """Slots leave and enter."""
        if plan.leave or plan.enter_slots:
            self._change_slots(plan, staging)
        self._check_drafts(plan)

    def _change_slots(self, plan: StepPlan, staging: Staging) -> None:
        self._wanted = None
        self._editor.leave(plan.leave)
        self._sampler.set_params(plan.enter_slots, plan.enter_draw, staging)
        self._editor.enter(plan.enter_slots, plan.enter_draw, {h.slot: h for h in plan.histories}, staging)
        for slot in plan.leave:
            self._draws.pop(slot, None)
        for slot, draw in zip(plan.enter_slots, plan.enter_draw, strict=True):
            if draw.logprobs is not None or draw.prompt_logprobs is not None:
                self._draws[slot] = draw
        self._with_grammar.difference_update(plan.leave)
        self._with_grammar.update(entered.slot for entered in plan.enter_grammars)
        if self._grammars is not None:
            self._grammars.leave(plan.leave)
            self._grammars.enter(plan.enter_grammars)

    def _check_drafts(self, plan: StepPlan) -> None:
        """Penalties, bad words and grammars know the tokens of a slot up to its last one, not the guesses after it."""
        for slot, drafts in zip(plan.chunk_slots, plan.chunk_drafts or (0,) * len(plan.chunk_slots), strict=True):
            if drafts and (slot in self._with_grammar or self._editor.follows_tokens(slot)):
                raise PlanError(f"chunk_drafts: slot {slot} has a grammar, penalties or bad words")

    def wanted(self, sampled: SampledRows) -> Wanted:
        """What these rows want to know of the model's logits."""
        if self._wanted is None or self._wanted[0] is not sampled.slots:  # in a steady batch, it is the same tensor
            self._wanted = sampled.slots, self._want(sampled)
        return self._wanted[1]

    def _want(self, sampled: SampledRows) -> Wanted:
        slots = sampled.slots.tolist() if self._draws or self._with_grammar else []
        plain = self._draws.keys().isdisjoint(slots) and self._with_grammar.isdisjoint(slots)
        if not plain or self._editor.touches(sampled.slots):
            return Wanted()
        if self._sampler.is_greedy(sampled.slots):
            return Wanted(likeliest=True)
        return Wanted(filters=self._sampler.filters(sampled.slots))

    def start(self, sampled: SampledRows) -> Masks | None:
        """Start on the grammars' masks for these rows, beside the forward pass; None where there is nothing to mask."""
        return self._grammars.start(sampled.slots) if self._grammars is not None else None

    def prepare(self, sampled: SampledRows, staging: Staging) -> Prepared:
        """What `draw` needs, on the device when `staging` is sent."""
        rows, tops = self._logprob_rows(sampled.slots)
        some = 0 < len(rows) < len(sampled.slots)
        return Prepared(
            self._editor.prepare(sampled.slots, sampled.positions, staging),
            self._sampler.prepare(sampled.slots, sampled.positions, staging),
            rows,
            tops,
            staging.put(torch.tensor(rows)) if some else None,
        )

    def draw(
        self, logits: Tensor, sampled: SampledRows, prepared: Prepared, masks: Masks | None = None
    ) -> tuple[Tensor, LogprobRows | None]:
        """One token per row, int64 `[S]` on the device, and the log probabilities of those that asked for them.

        `logits` (float32 `[S, vocab]`, device) are changed. `masks` are from `start`.
        """
        rows = prepared.logprob_rows
        some = prepared.staged_rows.tensor if prepared.staged_rows is not None else None
        edited = prepared.edits is not None or masks is not None
        raw = None
        if rows:  # as the model gave them
            raw = logits[some] if some is not None else logits.clone() if edited else logits
        if prepared.edits is not None:
            self._editor.apply(logits, prepared.edits)
        if masks is not None and self._grammars is not None:
            self._grammars.apply(masks, logits, self._editor.allows_few(sampled.slots))
        tokens = self._sampler.sample(logits, prepared.drawing)
        if prepared.edits is not None:
            self._editor.append(prepared.edits, sampled.staged_slots.tensor, tokens)
        if raw is None:
            return tokens, None
        chosen = tokens if some is None else tokens[some]
        entries = logprobs.of_tokens(raw, chosen, prepared.tops, self._score_rows)
        return tokens, LogprobRows.of(dict(zip(rows, entries.split([1] * len(rows)), strict=True)))

    def follow(self, masks: Masks, tokens: Sequence[int]) -> list[Failure]:
        """The grammars go on with the tokens that were drawn (host, one per row); the rows in which one cannot."""
        return self._grammars.advance(masks, tokens) if self._grammars is not None else []

    def scored(self, plan: StepPlan, staging: Staging) -> Scored:
        """The rows of the plan's scorings. Raises PlanError when they are not in their chunk."""
        rows: list[int] = []
        targets: list[int] = []
        tops: list[int] = []
        for scoring in plan.scorings:
            count = len(scoring.targets)
            if scoring.chunk >= len(plan.chunk_slots) or scoring.begin + count > plan.chunk_lens[scoring.chunk]:
                raise PlanError(f"scorings: {count} tokens of chunk {scoring.chunk} from {scoring.begin} are not there")
            if max(scoring.targets, default=0) >= self._vocab_size:
                raise PlanError(f"scorings: a target is outside a vocabulary of {self._vocab_size}")
            draw = self._draws.get(plan.chunk_slots[scoring.chunk])
            if draw is None or draw.prompt_logprobs is None:
                raise PlanError(f"scorings: slot {plan.chunk_slots[scoring.chunk]} did not ask for it")
            first = sum(plan.chunk_lens[: scoring.chunk]) + scoring.begin
            rows += range(first, first + count)
            targets += scoring.targets
            tops += [draw.prompt_logprobs] * count
        counts = [len(scoring.targets) for scoring in plan.scorings]
        return Scored(staging.put(torch.tensor(rows)), staging.put(torch.tensor(targets)), tops, counts)

    def score(self, logits: Tensor, scored: Scored) -> LogprobRows | None:
        """The log probabilities of prompt tokens, from the logits of `scored.rows` (float32 `[R, vocab]`, device)."""
        entries = logprobs.of_tokens(logits, scored.targets.tensor, scored.tops, self._score_rows)
        return LogprobRows.of(dict(enumerate(entries.split(scored.counts))))

    def _logprob_rows(self, slots: Tensor) -> tuple[list[int], list[int]]:
        """The rows whose tokens' log probabilities are asked for, and with how many alternatives each."""
        if not self._draws:
            return [], []
        wanted = [(i, self._draws[s].logprobs) for i, s in enumerate(slots.tolist()) if s in self._draws]
        found = [(i, top) for i, top in wanted if top is not None]
        return [i for i, _ in found], [top for _, top in found]
