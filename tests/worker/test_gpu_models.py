"""Every kind of model on a GPU beside the CPU: the worker as it is started, behind a real scheduler."""

import math
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING

from common.config import CacheConfig, ClusterConfig, ModelConfig, SchedulerConfig
from common.sampling_params import DrawParams
from scheduler_proc.kv_manager import KVManager
from scheduler_proc.scheduler import Scheduler
from tests import helpers_hybrid, helpers_models, helpers_multimodal
from tests.helpers_models import VOCAB_SIZE
from tests.helpers_paged import make_prompts
from tests.helpers_serving import Request, serve
from tests.worker import test_own_attention as older
from worker_proc.startup import load_worker

if not torch.cuda.is_available():
    pytest.skip("compares a GPU with the CPU", allow_module_level=True)

CONTEXT, COUNT, PAGE_SIZE = 192, 16, 8
KINDS: dict[str, Callable[[Path], Path]] = {
    **{kind: partial(helpers_models.make_checkpoint, kind) for kind in helpers_models.KINDS},
    **{kind: partial(helpers_hybrid.make_hybrid, kind) for kind in helpers_hybrid.HYBRIDS},
    **{kind: partial(older.make, kind) for kind in older.KINDS},
    **{
        f"multimodal {kind}": partial(helpers_multimodal.make_multimodal, kind)
        for kind in helpers_multimodal.KINDS
        if kind in CONFIG_MAPPING
    },
}
del KINDS["xmod"]  # is refused


def answers(path: Path, where: Path, device: str, dtype: str) -> list[Request]:
    """Three prompts that are scored, then four that begin with the same tokens as others."""
    config = ClusterConfig(
        str(where),
        ModelConfig(str(path), device=device, dtype=dtype, context_len=CONTEXT, threads=1, cpu_kernels="torch"),
        CacheConfig(page_size=PAGE_SIZE, kv_tokens=4096),
        SchedulerConfig(max_running=6, max_batch_tokens=64, chunk_tokens=20, in_batch_gain=8),
    )
    worker = load_worker(config, 0, "0", where / f"store-{device}-{dtype}")
    pages, slots = worker.info["num_pages"], worker.info.get("slots", 0)
    manager = KVManager(pages, PAGE_SIZE, recurrent=bool(slots), snapshots=worker.info.get("snapshots", 0))
    scheduler = Scheduler(config.scheduler, manager, CONTEXT)
    _, short, middle, other, long = ([t for t in prompt if t != 3] for prompt in make_prompts(VOCAB_SIZE))
    first = [Request(prompt, DrawParams(0.0, logprobs=2, prompt_logprobs=0), COUNT) for prompt in (short, middle, long)]
    prompts = (long + middle, long + other, long[:40] + short, middle)
    second = [Request(prompt, DrawParams(0.0, logprobs=2), COUNT) for prompt in prompts]
    serve(scheduler, worker.runner, first)
    stats = serve(scheduler, worker.runner, second)
    assert stats["cached_tokens"] > 0
    return first + second


def check_tokens(got: Request, want: Request) -> None:
    """The same, but where two were as likely."""
    for step, (token, wanted) in enumerate(zip(got.tokens, want.tokens, strict=True)):
        if token != wanted:
            first, second = want.logprobs.top_logprobs[2 * step : 2 * step + 2]
            assert first - second < 1e-3, f"token {step} is {token}, not {wanted}"
            return


def errors(got: list[Request], want: list[Request]) -> list[float]:
    """Of the log probabilities of all prompts' tokens."""
    pairs = [
        pair
        for one, other in zip(got, want, strict=True)
        for pair in zip(one.prompt_logprobs.logprobs, other.prompt_logprobs.logprobs, strict=True)
    ]
    assert len(pairs) > 80 and all(math.isfinite(number) for pair in pairs for number in pair)
    return [abs(one - other) for one, other in pairs]


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_the_cpu(kind: str, tmp_path: Path) -> None:
    path = KINDS[kind](tmp_path / "model")
    want = answers(path, tmp_path, "cpu", "float32")
    got = answers(path, tmp_path, "cuda", "float32")
    assert max(errors(got, want)) < 1e-2
    for one, other in zip(got, want, strict=True):
        check_tokens(one, other)
    usual = statistics.fmean(errors(answers(path, tmp_path, "cpu", "bfloat16"), want))
    assert statistics.fmean(errors(answers(path, tmp_path, "cuda", "bfloat16"), want)) < 1.5 * usual + 0.02
