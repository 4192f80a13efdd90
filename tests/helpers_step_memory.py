"""How much memory a GPU's steps take beside what `measure_steps` says, found out without one.

    python -m tests.helpers_step_memory

Steps on a CPU's tensors, all of which are counted; Triton's kernels, whose launches go no further than Triton's own
look at their arguments, take none. For several configurations, requests of each kind go through a scheduler, as many
and as long as there may be. A line each: what was measured, and the most that a step took. Triton's interpreter must be
off.
"""

import random
import weakref
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.gpu.compiles import DRAWS, Case, make_decoder, make_runner
from common.config import SchedulerConfig
from common.messages import AddRequest, StepResult, ints
from common.sampling_params import DrawParams, LogitEdits
from scheduler_proc.kv_manager import KVManager
from scheduler_proc.scheduler import Scheduler
from tests.helpers_launches import count_launches, run_again, skip_products
from worker_proc.attention.interface import ForwardBatch
from worker_proc.cuda.decoder import CudaDecoder
from worker_proc.cuda.largest_steps import measure_steps
from worker_proc.model_runner import ModelRunner
from worker_proc.models.families import parse_spec
from worker_proc.parallel import TensorParallel

CPU = torch.device("cpu")
_STEP_NS = 10**7
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 30_011, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip
EDITED = LogitEdits({5: 2.0}, 20, ints(2), 1.2, 0.1, 0.1)
KINDS = {
    "all kinds": DRAWS,
    "drawn": (DrawParams(0.8, top_p=0.9, seed=1),),
    "edited": (DrawParams(0.8, seed=1, logprobs=20, edits=EDITED),),
    "scored": (DrawParams(0.8, seed=1, prompt_logprobs=2, logprobs=2, edits=EDITED),),
}


class Meter(TorchDispatchMode):
    """Bytes of the tensors that were made while it is entered and that are still there: `now`, and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if isinstance(made, Tensor):
                self._note(made.untyped_storage())
        return result

    def _note(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._alive and size:
            self._alive[key] = weakref.ref(storage, lambda _: self._gone(key)), size
            self.now += size
            self.peak = max(self.peak, self.now)

    def _gone(self, key: int) -> None:
        self.now -= self._alive.pop(key)[1]

    def reset(self) -> None:
        self.peak = self.now

    def stand_in(self) -> None:
        """For CUDA's own figures."""
        torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_: None  # type: ignore[assignment]
        torch.cuda.reset_peak_memory_stats = lambda *_: self.reset()  # type: ignore[assignment]
        torch.cuda.memory_allocated = lambda *_: self.now  # type: ignore[assignment]
        torch.cuda.max_memory_allocated = lambda *_: self.peak  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Limits:
    max_running: int
    max_batch_tokens: int
    context_len: int
    speculation: str = "off"


def most(meter: Meter, runner: ModelRunner, case: Case, limits: Limits, draws: tuple[DrawParams, ...]) -> int:
    """Bytes that a step takes, at most, with what the runner keeps."""
    config = SchedulerConfig(
        max_running=limits.max_running, max_batch_tokens=limits.max_batch_tokens, chunk_slowdown=0,
        chunk_tokens=limits.max_batch_tokens, speculation=limits.speculation,
    )  # fmt: skip
    scheduler = Scheduler(config, KVManager(case.num_pages, case.page_size), limits.context_len)
    choose, worst, now = random.Random(0), 0, 1
    for rid in range(2 * limits.max_running):
        length = choose.choice((4, 4, 4, limits.context_len // 3, limits.context_len - 30))
        prompt = [7] * length if limits.speculation != "off" else [choose.randrange(100, 1000) for _ in range(length)]
        scheduler.handle(AddRequest(rid, ints(*prompt), 20, ints(), draws[rid % len(draws)]), now)
    while scheduler.has_work:
        plan = scheduler.plan(now)
        if plan is not None:
            meter.reset()
            out = runner.execute(plan)
            worst = max(worst, meter.peak)
            times = array("q", (now, now, now + _STEP_NS))
            now += 2 * _STEP_NS
            result = StepResult(
                plan.step_id, plan.epoch, plan.group, ints(*out.tokens), times, out.logprobs, out.prompt_logprobs,
                accepted=ints(*out.accepted),
            )  # fmt: skip
            scheduler.commit(result, now)
    return worst


def finish(self: CudaDecoder, x: Tensor, delta: Tensor | None, batch: ForwardBatch) -> Tensor:
    """Random logits, as kernels compute nothing."""
    return torch.empty(len(batch.logit_rows), self.vocab_size, dtype=x.dtype).normal_()


def main() -> None:
    torch.set_num_threads(1)  # tests have other cores for other work
    torch.manual_seed(0)
    CudaDecoder.finish = finish  # type: ignore[method-assign]
    skip_products()
    count_launches([""])
    meter = Meter()
    meter.stand_in()
    cases = [(Limits(24, 512, 200), kind) for kind in KINDS]
    cases += [(Limits(3, 512, 1000), kind) for kind in KINDS]
    cases += [(Limits(3, 512, 200, "ngram"), kind) for kind in ("drawn", "scored")]
    for limits, kind in cases:
        spec = parse_spec(LLAMA)
        case = Case(
            spec, graphs=False, max_running=limits.max_running, max_batch_tokens=limits.max_batch_tokens,
            context_len=limits.context_len,
        )  # fmt: skip
        model = make_decoder(case, "cpu")
        config = SchedulerConfig(limits.max_running, limits.max_batch_tokens, speculation=limits.speculation)
        with meter:
            measured = measure_steps(
                model, model.kv_spec, config, context_len=limits.context_len, page_size=case.page_size,
                tp=TensorParallel(), device=CPU,
            )  # fmt: skip
            runner = make_runner(model, model.attention, case, "cpu", run_again, ahead=False)
            taken = most(meter, runner, case, limits, KINDS[kind])
            taken -= runner._cache.page_bytes * (case.num_pages + 1)
        print(f"{limits}, {kind}: measured {measured}, taken {taken}", flush=True)


if __name__ == "__main__":
    main()
