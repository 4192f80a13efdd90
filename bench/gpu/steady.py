"""Steady decode through the worker's own ModelRunner, one step ahead of its tokens, under a profiler."""

import time

import torch
from torch.profiler import ProfilerActivity, profile

from bench.gpu.trace import Trace, export
from common.messages import StepPlan, ints
from common.sampling_params import DrawParams
from worker_proc.cuda.graphs import GraphedDecoder
from worker_proc.cuda.sampling import draw_rows
from worker_proc.kv_cache import KVCache
from worker_proc.model_runner import LaunchedStep, ModelRunner
from worker_proc.parallel import TensorParallel

STEPS = 20
_WARM_UP = 10
_CLOCKED = 100


class SteadyDecode:
    """`most` slots at most, of `context` tokens each; their pages lie one after the other."""

    def __init__(self, model: GraphedDecoder, cache: KVCache, most: int, context: int, device: str = "cuda") -> None:
        self._pages = context // cache.page_size
        self._context = context
        self._epoch = 0
        self._device = torch.device(device)
        self._runner = ModelRunner(
            model,
            cache,
            max_slots=most,
            context_len=context,
            group="0",
            tp=TensorParallel(),
            device=self._device,
            draw_rows=draw_rows,
        )
        self._runner.warm_up((1, 2))

    def plans(self, rows: int, draw: DrawParams, steps: int) -> list[StepPlan]:
        """All rows enter near the end of their context, whose KV holds anything; then they decode."""
        self._epoch += 1
        slots = ints(*range(rows))
        begin = self._context - steps - 1
        ones = ints(*[1] * rows)
        entering = StepPlan(
            0,
            self._epoch,
            "0",
            enter_slots=slots,
            enter_lens=ints(*[begin] * rows),
            enter_draw=(draw,) * rows,
            page_slots=slots,
            page_counts=ints(*[self._pages] * rows),
            pages=ints(*range(rows * self._pages)),
            chunk_slots=slots,
            chunk_lens=ones,
            chunk_samples=ones,
            chunk_tokens=ints(*range(3, 3 + rows)),
        )
        bits = (b"\xff" * (rows // 8)) + (bytes([(1 << rows % 8) - 1]) if rows % 8 else b"")
        return [entering, *(StepPlan(step, self._epoch, "0", decode=bits) for step in range(1, steps + 1))]

    def profile(self, rows: int, draw: DrawParams) -> Trace:
        """`STEPS` decode steps: a step is launched before the tokens of the last one are taken."""
        plans = self.plans(rows, draw, _WARM_UP + STEPS)
        waiting = self._run(plans[:-STEPS], None)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            self._run(plans[-STEPS:], waiting)
            torch.cuda.synchronize()
        return export(profiler)

    def step_time(self, rows: int, draw: DrawParams) -> float:
        """Seconds of such a step, of which a profiler knows nothing: it slows down the host, which launches."""
        plans = self.plans(rows, draw, _WARM_UP + _CLOCKED)
        waiting = self._run(plans[:-_CLOCKED], None)
        started = time.perf_counter()
        waiting = self._run(plans[-_CLOCKED:], waiting)
        assert waiting is not None
        waiting.finish()
        return (time.perf_counter() - started) / _CLOCKED

    def _run(self, plans: list[StepPlan], waiting: LaunchedStep | None) -> LaunchedStep | None:
        for plan in plans:
            launched = self._runner.launch(plan)
            if waiting is not None:
                waiting.finish()
            waiting = launched
        return waiting
