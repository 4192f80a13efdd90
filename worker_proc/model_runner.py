"""Executes StepPlans: slots, cache, model and sampler in the order that a plan prescribes."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from common.logprobs import LogprobRows
from common.messages import StepPlan
from worker_proc import shared_pages
from worker_proc.attention.interface import SharedPages
from worker_proc.draw_step import DrawStep, Wanted
from worker_proc.drawn import DrawnTokens
from worker_proc.errors import PlanError
from worker_proc.grammar_matcher import Failure, GrammarMatchers
from worker_proc.host_tier import HostPages, PageCopies
from worker_proc.idle_step import idle_step
from worker_proc.input_batch import Layout, SampledRows, SlotTable
from worker_proc.kv_cache import KVCache
from worker_proc.logprobs import ScoreRows
from worker_proc.models.interface import GreedyModel, LanguageModel
from worker_proc.parallel import TensorParallel
from worker_proc.recurrent import StateRows
from worker_proc.sampler import BestRows, DrawRows
from worker_proc.shared_pages import SharedPageFinder, Tile
from worker_proc.staging import Staging, reserve_pinned
from worker_proc.verification import Verdict, verify


@dataclass(slots=True)
class StepOutput:
    """`tokens`, log probabilities, `failures` and `accepted` as in StepResult (only rank 0 has the first on the host);
    times are CLOCK_MONOTONIC nanoseconds."""

    tokens: list[int]
    forward_started: int
    tokens_ready: int
    logprobs: LogprobRows | None = None
    prompt_logprobs: LogprobRows | None = None
    failures: list[Failure] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


class LaunchedStep:
    """A step that the device has been told to compute. `ready` says that `finish` would not wait."""

    def __init__(self, output: StepOutput, drawn: DrawnTokens | None = None) -> None:
        """`output` is whole, or only `tokens` and their time are missing, which come from `drawn`."""
        self._output = output
        self._drawn = drawn

    @property
    def ready(self) -> bool:
        return self._drawn is None or self._drawn.ready

    def finish(self) -> StepOutput:
        """What the step has given, waiting for it."""
        if self._drawn is None:
            return self._output
        self._output.tokens, self._output.tokens_ready = self._drawn.tolist(), time.monotonic_ns()
        return self._output


class ModelRunner:
    """One rank's model and the state of its requests. Every rank must execute the same plans in the same order.

    `grammars` are those of rank 0; the other ranks have none. `draw_rows`, `best_rows` and `score_rows` do what torch
    would do. With `share_pages`, batches say which pages several decodes have in common. `host` has room for pages that
    leave `cache`. With `loads_by_layer`, the model takes pages that come back from there layer by layer
    (`ForwardBatch.loads`).
    """

    def __init__(
        self,
        model: LanguageModel,
        cache: KVCache,
        *,
        max_slots: int,
        context_len: int,
        group: str,
        tp: TensorParallel,
        device: torch.device | str,
        grammars: GrammarMatchers | None = None,
        draw_rows: DrawRows | None = None,
        best_rows: BestRows | None = None,
        score_rows: ScoreRows | None = None,
        share_pages: bool = False,
        host: HostPages | None = None,
        loads_by_layer: bool = False,
    ) -> None:
        self._model = model
        self._greedy = model if isinstance(model, GreedyModel) else None
        self._loads_by_layer = loads_by_layer
        self._cache = cache
        self._copies = PageCopies(cache, host)
        self.launched_at = 0.0  # by time.monotonic(): when the last step began
        self._tp = tp
        self._device = torch.device(device)
        self._group = group
        self._epoch = -1  # before the first plan
        self._next_step = 0
        kernels = (draw_rows, best_rows, score_rows)
        self._draw_step = DrawStep(max_slots, model.vocab_size, device, grammars, *kernels, context_len)
        self._finder = SharedPageFinder(cache.page_size) if share_pages else None
        self._laid_out: tuple[list[Tile], list[Tensor]] | None = None
        self._slots = SlotTable(
            max_slots,
            num_pages=cache.num_pages,
            page_size=cache.page_size,
            context_len=context_len,
            vocab_size=model.vocab_size,
            device=device,
        )

    @torch.inference_mode()
    def warm_up(self, row_counts: tuple[int, ...] = (1,)) -> None:
        """Run the model on the scratch page and draw, so that the first request does not pay for lazy initialisation.
        On a GPU, draws from one row and from two take all kernels: only of several rows a layout must be kept."""
        reserve_pinned(self._device)
        for rows in row_counts:
            logits = self._model.forward(idle_step(self._cache, 0, rows, 1), self._cache)
            if not self._tp.rank:
                self._draw_step.warm_up(logits)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepOutput:
        """`launch`, and wait for the step."""
        return self.launch(plan).finish()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Apply a plan and have its step computed. Raises PlanError when the plan is not the one that must come next,
        or contradicts the state; the runner cannot go on then.

        Steps must be finished in the order in which they were launched. Where the host has no part in a step's tokens
        (no guesses, grammars or log probabilities), a GPU computes it after this returns.
        """
        self._check_order(plan)
        self.launched_at = time.monotonic()
        staging = Staging(self._device)
        self._slots.apply(plan, staging)
        self._draw_step.apply(plan, staging)
        if self._cache.states is not None:
            self._cache.states.apply(plan)
        elif plan.state_loads or plan.state_saves:
            raise PlanError("state_loads: the model has no recurrent layers")
        if self._finder is not None:
            self._finder.apply(plan)
        computes = bool(plan.chunk_slots) or any(plan.decode)
        loads = None
        if plan.copies:
            loads = self._copies.stage(plan.copies, staging, by_layer=computes and self._loads_by_layer)
        if not computes:
            staging.send()
            now = time.monotonic_ns()
            return LaunchedStep(StepOutput([], now, now))
        layout = self._slots.lay_out(plan, staging)
        sampled = layout.sampled
        masks = self._draw_step.start(sampled)
        scored = self._draw_step.scored(plan, staging) if plan.scorings else None
        looks = self._greedy is not None and scored is None
        wanted = self._draw_step.wanted(sampled) if looks else Wanted()
        prepared = None
        if not wanted.likeliest and not self._tp.rank and len(sampled.slots):
            prepared = self._draw_step.prepare(sampled, staging)
        find_shared = self._stage_shared(layout, staging)
        find_states = self._stage_states(plan, layout, staging)
        staging.send()
        batch = self._slots.build(layout, find_shared())
        if loads is not None:
            batch = replace(batch, loads=loads)
        if self._cache.states is not None:
            batch = replace(batch, states=find_states())
        if scored is not None:
            batch = replace(batch, logit_rows=torch.cat((batch.logit_rows, scored.rows.tensor)))
        forward_started = time.monotonic_ns()
        if self._greedy is not None and wanted.likeliest:  # on all ranks or none
            return self._finish_draw(self._greedy.greedy(batch, self._cache), sampled, forward_started)
        if wanted.filters is not None:
            batch = replace(batch, filters=wanted.filters)
        logits = self._model.forward(batch, self._cache)
        prompt_logprobs = None
        if scored is not None and self._tp.rank == 0:
            prompt_logprobs = self._draw_step.score(logits[len(sampled.slots) :], scored)
        if not len(sampled.slots):
            return LaunchedStep(StepOutput([], forward_started, time.monotonic_ns(), None, prompt_logprobs))
        if prepared is None:
            return self._finish_draw(torch.empty(0, dtype=torch.int64), sampled, forward_started)
        tokens, logprobs = self._draw_step.draw(logits[: len(sampled.slots)], sampled, prepared, masks)
        if masks is None:
            return self._finish_draw(tokens, sampled, forward_started, logprobs, prompt_logprobs)
        tokens, verdict = self._share(tokens, sampled)
        drawn = tokens.tolist()
        output = _output(drawn, verdict, forward_started, logprobs, prompt_logprobs)
        output.failures.extend(_renumbered(self._draw_step.follow(masks, drawn), verdict))
        return LaunchedStep(output)

    def _finish_draw(
        self,
        tokens: Tensor,
        sampled: SampledRows,
        forward_started: int,
        logprobs: LogprobRows | None = None,
        prompt_logprobs: LogprobRows | None = None,
    ) -> LaunchedStep:
        tokens, verdict = self._share(tokens, sampled)
        if self._tp.rank:
            return LaunchedStep(_output([], None, forward_started))
        if verdict is not None:
            return LaunchedStep(_output(tokens.tolist(), verdict, forward_started, logprobs, prompt_logprobs))
        return LaunchedStep(_output([], None, forward_started, logprobs, prompt_logprobs), DrawnTokens(tokens))

    def _stage_shared(self, layout: Layout, staging: Staging) -> Callable[[], SharedPages | None]:
        """What gives the pages that the step's decodes share, when it was sent."""
        if self._finder is None or len(layout.decode_slots) < 2:
            return lambda: None
        slots, size = layout.decode_slots.tolist(), self._cache.page_size
        tiles = self._finder.tiles(slots, layout.kv_lens[layout.num_chunks :])
        if not tiles:
            return lambda: None
        if self._laid_out is None or self._laid_out[0] is not tiles:  # other requests than in the last step
            parts = shared_pages.layout(tiles, len(slots), size)
            self._laid_out = tiles, [torch.frombuffer(part, dtype=torch.int64) for part in parts]
        skipped, levels, table = (staging.put(part) for part in self._laid_out[1])
        return lambda: SharedPages(skipped.tensor, levels.tensor, table.tensor.view(len(tiles), -1))

    def _stage_states(self, plan: StepPlan, layout: Layout, staging: Staging) -> Callable[[], StateRows | None]:
        """What gives the places of the rows' states, when they were sent."""
        if self._cache.states is None:
            return lambda: None
        slots = [*plan.chunk_slots, *layout.decode_slots.tolist()]
        states = self._cache.states.rows_of(slots, layout.kv_lens, layout.q_lens, plan)
        index = staging.put(torch.tensor(states.rows, dtype=torch.int64))
        return lambda: replace(states, index=index.tensor)

    def _check_order(self, plan: StepPlan) -> None:
        if plan.group != self._group:
            raise PlanError(f"group: the plan is for {plan.group!r}, this worker is of {self._group!r}")
        if plan.epoch > self._epoch:  # a new scheduler, which knows nothing of what was here
            self._epoch = plan.epoch
            self._next_step = plan.step_id
            self._slots.reset()
            self._draw_step.reset()
            if self._finder is not None:
                self._finder.reset()
        if plan.epoch < self._epoch:
            raise PlanError(f"epoch: the plan is of {plan.epoch}, this worker is in {self._epoch}")
        if plan.step_id != self._next_step:
            raise PlanError(f"step_id: expected {self._next_step}, got {plan.step_id}")
        self._next_step += 1

    def _share(self, tokens: Tensor, sampled: SampledRows) -> tuple[Tensor, Verdict | None]:
        """Rank 0 has the tokens; the others need them as their next inputs, and on the host only to see which guesses
        were right. Returns them on the device."""
        if not len(sampled.slots):
            return tokens[:0], None
        if self._tp.rank:
            tokens = torch.empty(len(sampled.slots), dtype=torch.int64, device=self._device)
        self._tp.broadcast(tokens)
        verdict = verify(sampled.drafts, tokens.tolist()) if sampled.drafts else None
        self._slots.store(sampled, tokens, verdict)
        return tokens, verdict


def _output(
    drawn: list[int],
    verdict: Verdict | None,
    forward_started: int,
    logprobs: LogprobRows | None = None,
    prompt_logprobs: LogprobRows | None = None,
) -> StepOutput:
    """Of a step whose tokens have just been drawn."""
    now = time.monotonic_ns()
    if verdict is None:
        return StepOutput(drawn, forward_started, now, logprobs, prompt_logprobs)
    tokens, kept = verdict.tokens(drawn), verdict.logprobs(logprobs)
    return StepOutput(tokens, forward_started, now, kept, prompt_logprobs, accepted=verdict.accepted)


def _renumbered(failures: list[Failure], verdict: Verdict | None) -> list[Failure]:
    """Failures by the number of their token in the result, where they are by drawn position."""
    if verdict is None:
        return failures
    numbers = verdict.numbers()
    return [Failure(numbers[failure.row], failure.problem) for failure in failures]
