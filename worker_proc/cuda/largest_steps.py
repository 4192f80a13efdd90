"""How much memory steps take beside weights and cache: the largest that a scheduler plans are computed, with every way
to draw that takes memory, by a ModelRunner before there is a cache.

What that runner keeps is part of it, as the worker's own will keep as much: page tables as long as a context window,
and tables of penalties. Grammars' masks take less than log probabilities do.
"""

import logging
from dataclasses import dataclass, replace

import torch

from common.config import DRAWN_TOKENS, SCORED_TOKENS, SchedulerConfig
from common.messages import History, Scoring, StepPlan, ints
from common.sampling_params import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGPROBS,
    MAX_TOKENS,
    DrawParams,
    LogitEdits,
)
from worker_proc.cuda.sampling import draw_rows
from worker_proc.kv_cache import KVCache, KVSpec
from worker_proc.model_runner import ModelRunner
from worker_proc.models.interface import LanguageModel
from worker_proc.parallel import TensorParallel

log = logging.getLogger(__name__)


@torch.inference_mode()
def measure_steps(
    model: LanguageModel,
    spec: KVSpec,
    config: SchedulerConfig,
    *,
    context_len: int,
    page_size: int,
    tp: TensorParallel,
    device: torch.device,
    whole_context: bool = True,
) -> int:
    """Bytes that steps take beside weights and a cache of `spec`. All ranks must measure at the same time.

    With `whole_context`, a prompt is as long as a context window. It also loads cuBLAS and what kernels need, whose
    memory is then no longer free when the cache is sized.
    """
    cache = KVCache(spec, 1, page_size, device)
    for pages in cache.page_tensors:
        pages.zero_()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    runner = ModelRunner(
        model, cache, max_slots=config.max_running, context_len=context_len, group="", tp=tp, device=device,
        draw_rows=draw_rows,
    )  # fmt: skip
    rows, draw = _Rows.of(config, context_len, context_len if whole_context else 0), everything(model.vocab_size)
    plans = [rows.plan(page_size, draw)]
    if config.speculation != "off" and config.max_running < DRAWN_TOKENS:
        assert draw.edits is not None
        draw = replace(draw, edits=LogitEdits(draw.edits.logit_bias, allowed=draw.edits.allowed))  # knows no tokens
        rows, leave = _Rows.of_guesses(config, context_len), len(rows.lengths)
        plans.append(rows.plan(page_size, draw, step_id=1, leave=leave))
    for plan in plans:
        runner.execute(plan)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del runner, cache
    torch.cuda.empty_cache()
    log.info("the largest step takes %.2f GiB beside weights and cache", peak / 2**30)
    return peak


def everything(vocab_size: int) -> DrawParams:
    """All that a request can ask for and that takes memory."""
    allowed = ints(*range(min(vocab_size, MAX_ALLOWED_TOKENS)))
    words = (ints(*[0] * MAX_BAD_WORD_TOKENS),) * (2 * MAX_BAD_WORDS)
    edits = LogitEdits({0: 1.0}, MAX_TOKENS, ints(0), 1.1, 0.1, 0.1, allowed, words)
    return DrawParams(1.0, 50, 0.9, 0.01, edits=edits, logprobs=MAX_LOGPROBS, prompt_logprobs=MAX_LOGPROBS)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Requests that all enter in one step, slot by slot. All tokens are 0."""

    lengths: list[int]  # of their chunks
    cached: int  # tokens before the first one's chunk, in whatever is in page 0
    guesses: list[int]  # the last tokens of their chunks
    scored: list[int]  # the first tokens of their chunks

    @classmethod
    def of(cls, config: SchedulerConfig, context_len: int, longest: int) -> "_Rows":
        """As many requests and tokens as there may be, the first up to token `longest` of its prompt."""
        count = config.max_running
        tokens = min(config.max_batch_tokens, count * context_len)
        lengths = [tokens // count + (row < tokens % count) for row in range(count)]
        return cls(lengths, max(0, longest - lengths[0]), [0] * count, _first(SCORED_TOKENS, lengths))

    @classmethod
    def of_guesses(cls, config: SchedulerConfig, context_len: int) -> "_Rows":
        """Few requests, with guesses at as many tokens as may be drawn, beside a prompt that is scored."""
        others = max(1, config.max_running - 1)
        most = min(context_len, config.num_speculative_tokens + 1, max(1, config.max_batch_tokens // 2 // others))
        lengths = [min(most, DRAWN_TOKENS // others) for _ in range(others)]
        prompt = [min(SCORED_TOKENS, context_len)] * (config.max_running > 1)
        return cls(prompt + lengths, 0, [0 for _ in prompt] + [n - 1 for n in lengths], prompt + [0] * others)

    def plan(self, page_size: int, draw: DrawParams, step_id: int = 0, leave: int = 0) -> StepPlan:
        """All of them, when `leave` slots have been left. Every page is page 0."""
        count = len(self.lengths)
        ends = [self.cached + self.lengths[0], *self.lengths[1:]]
        pages = [-(-end // page_size) for end in ends]
        slots = ints(*range(count))
        return StepPlan(
            step_id,
            0,
            "",
            leave=ints(*range(leave)),
            enter_slots=slots,
            enter_lens=ints(self.cached, *[0] * (count - 1)),
            enter_draw=(draw,) * count,
            page_slots=slots,
            page_counts=ints(*pages),
            pages=ints(*[0] * sum(pages)),
            chunk_slots=slots,
            chunk_lens=ints(*self.lengths),
            chunk_samples=ints(*[1] * count),
            chunk_tokens=ints(*[0] * sum(self.lengths)),
            histories=tuple(History(slot, 0, ints(*[0] * end)) for slot, end in enumerate(ends) if draw.needs_history),
            scorings=tuple(Scoring(slot, 0, ints(*[0] * n)) for slot, n in enumerate(self.scored) if n),
            chunk_drafts=ints(*self.guesses) if any(self.guesses) else ints(),
        )


def _first(count: int, lengths: list[int]) -> list[int]:
    """The first `count` tokens of chunks of `lengths`, as many of each as there are."""
    taken: list[int] = []
    for length in lengths:
        taken.append(min(length, count - sum(taken)))
    return taken
