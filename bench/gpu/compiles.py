"""Whether serving compiles a kernel that the start of a worker has not.

    python -m bench.gpu.compiles

A worker's ModelRunner with two layers of Qwen3-0.6B's shape, made ready as the worker makes it, serves requests of all
kinds through a real scheduler: prompts in chunks beside decodes, shared prefixes at once and one after another, greedy
and drawn tokens, filters, penalties, biases, log probabilities of outputs and prompts, guesses. Triton says what it
compiles meanwhile. Anything makes the exit status 1.
"""

import random
import sys
import time
from array import array
from dataclasses import dataclass, replace
from typing import Any

import click
import torch
import triton

from bench.gpu.shapes import CONFIGS, random_weights
from common.config import SchedulerConfig
from common.messages import AddRequest, StepPlan, StepResult, ints
from common.sampling_params import DrawParams, LogitEdits
from scheduler_proc.kv_manager import KVManager
from scheduler_proc.scheduler import Scheduler
from worker_proc.attention.interface import AttentionBackend
from worker_proc.cuda.attention import TritonAttention
from worker_proc.cuda.decoder import CudaDecoder
from worker_proc.cuda.graphs import GraphedDecoder, Recorder
from worker_proc.cuda.sampling import draw_rows
from worker_proc.cuda.warm_up import compile_kernels
from worker_proc.kv_cache import KVCache
from worker_proc.model_runner import ModelRunner
from worker_proc.models.decoder_layout import Shard
from worker_proc.models.families import parse_spec
from worker_proc.models.interface import LanguageModel
from worker_proc.models.layers import Linear
from worker_proc.models.spec import DecoderSpec
from worker_proc.parallel import TensorParallel
from worker_proc.quantization.scheme import Scheme

DRAWS = (
    DrawParams(0.0),
    DrawParams(0.8, seed=1),
    DrawParams(1.2, top_k=20, seed=2),
    DrawParams(0.7, top_p=0.9, min_p=0.02, seed=3, logprobs=3),
    DrawParams(0.0, edits=LogitEdits({5: 2.0}, 20, ints(2), 1.2, 0.1, 0.1)),
    DrawParams(0.5, edits=LogitEdits(frequency_penalty=0.5), seed=4, logprobs=0),
    DrawParams(0.0, prompt_logprobs=2),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A worker's configuration."""

    spec: DecoderSpec
    scheme: Scheme | None = None
    bias: bool = False  # of the queries' projection
    int8_kv: bool = False
    graphs: bool = True
    max_running: int = 24
    max_batch_tokens: int = 512
    context_len: int = 2048
    page_size: int = 16

    @property
    def num_pages(self) -> int:
        """Half of what all requests could have."""
        return self.max_running * self.context_len // self.page_size // 2


def make_decoder(case: Case, device: str = "cuda") -> CudaDecoder:
    """With random weights."""
    weights = random_weights(case.spec, case.scheme, device)
    if case.bias:
        width = case.spec.head_dim * (case.spec.num_heads + 2 * case.spec.num_kv_heads)
        bias = torch.zeros(width, dtype=torch.bfloat16, device=device)
        layers = (replace(layer, qkv=Linear(layer.qkv.weight, bias)) for layer in weights.layers)
        weights = replace(weights, layers=tuple(layers))
    return CudaDecoder(case.spec, Shard.of(case.spec, 0, 1), weights, TensorParallel(), TritonAttention())


def make_runner(
    model: LanguageModel,
    attention: AttentionBackend,
    case: Case,
    device: str = "cuda",
    record: Recorder | None = None,
    *,
    ahead: bool = True,
) -> ModelRunner:
    """Ready to serve, as `worker_proc.startup.load_worker` has it; without `ahead`, only graphs are captured, by
    `record` where one is given."""
    spec = replace(model.kv_spec, int8=case.int8_kv)
    if ahead:
        compile_kernels(
            model,
            attention,
            spec,
            max_rows=case.max_running,
            max_tokens=case.max_batch_tokens + case.max_running,
            context_len=case.context_len,
            page_size=case.page_size,
            device=torch.device(device),
        )
    cache = KVCache(spec, case.num_pages, case.page_size, device)
    shares = isinstance(model, CudaDecoder)
    if isinstance(model, CudaDecoder) and case.graphs:
        graphed = GraphedDecoder(model, case.max_running, case.context_len, record, max_tokens=case.max_batch_tokens)
        graphed.capture(cache)
        model = graphed
    runner = ModelRunner(
        model,
        cache,
        max_slots=case.max_running,
        context_len=case.context_len,
        group="0",
        tp=TensorParallel(),
        device=device,
        draw_rows=draw_rows,
        share_pages=shares,
    )
    if ahead:
        runner.warm_up((1, 2))
    return runner


def serve(runner: ModelRunner, case: Case, requests: int, seed: int = 0) -> int:
    """Random requests, in waves of all sizes; returns how many steps they took."""
    config = SchedulerConfig(
        max_running=case.max_running,
        max_batch_tokens=case.max_batch_tokens,
        chunk_tokens=case.max_batch_tokens // 2,
        chunk_slowdown=0,  # chunks as large as may be
        speculation="ngram-always",
    )
    scheduler = Scheduler(config, KVManager(case.num_pages, case.page_size), case.context_len)
    choose, waiting, rid, steps = random.Random(seed), 0, 0, 0
    system = [choose.randrange(100, 1000) for _ in range(case.context_len // 4)]
    while rid < requests or scheduler.has_work:
        if rid < requests and steps >= waiting:
            for _ in range(choose.choice((1, 1, 2, 5, case.max_running))):
                scheduler.handle(_request(choose, rid, system, case), rid + 1)
                rid += 1
            waiting = steps + choose.choice((0, 3, 10, 40))
        plan = scheduler.plan(99)
        steps += 1
        if plan is not None:
            scheduler.commit(_result(plan, runner), 99)
    return steps


def _request(choose: random.Random, rid: int, system: list[int], case: Case) -> AddRequest:
    length = choose.choice((1, 2, 7, 30, case.context_len // 8, case.context_len // 3))
    own = [choose.randrange(100, 1000) for _ in range(length)]
    prompt = choose.choice(([], system, system[: len(system) // 2])) + (own * 3 if length < 30 else own)
    return AddRequest(rid, ints(*prompt), choose.choice((1, 3, 20, 40)), ints(), choose.choice(DRAWS))


def _result(plan: StepPlan, runner: ModelRunner) -> StepResult:
    out = runner.execute(plan)
    return StepResult(
        plan.step_id, plan.epoch, plan.group, ints(*out.tokens), array("q"), out.logprobs, out.prompt_logprobs,
        accepted=ints(*out.accepted),
    )  # fmt: skip


@click.command()
@click.option("--requests", default=150)
@torch.inference_mode()
def main(requests: int) -> None:
    compiled: list[str] = []

    def note(*, fn: Any, **_: Any) -> None:
        compiled.append(fn.name)

    triton.knobs.runtime.jit_post_compile_hook = note
    spec = parse_spec(CONFIGS["qwen3-0.6b"])
    case = Case(replace(spec, num_layers=2, scales=spec.scales[:2], windows=spec.windows[:2]))
    started = time.perf_counter()
    model = make_decoder(case)
    runner = make_runner(model, model.attention, case)
    torch.cuda.synchronize()
    print(f"ready after {time.perf_counter() - started:.1f} s, with {len(compiled)} kernels")
    at_first = len(compiled)
    steps = serve(runner, case, requests)
    later = compiled[at_first:]
    print(f"{requests} requests in {steps} steps: {len(later)} kernels compiled while serving", *later)
    sys.exit(bool(later) or not at_first)


if __name__ == "__main__":
    main()
