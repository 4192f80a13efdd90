"""Recurrent layers with the real scheduler, the real worker and tiny models: snapshots change no token."""

from pathlib import Path

import pytest
import torch

from common.config import SchedulerConfig
from common.sampling_params import DrawParams
from scheduler_proc.kv_manager import KVManager
from scheduler_proc.scheduler import Scheduler
from tests.helpers_hybrid import make_hybrid
from tests.helpers_models import VOCAB_SIZE, greedy
from tests.helpers_paged import make_prompts, poison
from tests.helpers_serving import Request, serve
from worker_proc.attention.reference import ReferenceAttention
from worker_proc.kv_cache import KVCache
from worker_proc.model_runner import ModelRunner
from worker_proc.models.interface import LanguageModel
from worker_proc.models.registry import load_model
from worker_proc.parallel import TensorParallel

SLOTS, CONTEXT, COUNT = 4, 128, 20
_, SHORT, SYSTEM, OTHER, LONG = make_prompts(VOCAB_SIZE)
WAVES = [
    [SYSTEM + SHORT, SYSTEM + OTHER, SYSTEM + SHORT, LONG, OTHER],
    [SYSTEM + SHORT * 3, SYSTEM + OTHER + SHORT, SYSTEM + OTHER, LONG[:40] + OTHER, LONG + SHORT],
    [LONG, LONG[:40] + OTHER + SHORT, SYSTEM * 3, SYSTEM + OTHER],
]


def serving(
    model: LanguageModel, page_size: int, *, tokens: int, snapshots: int, in_flight: int
) -> tuple[Scheduler, ModelRunner]:
    """A scheduler and a worker with so many tokens of cache, which hold NaN."""
    config = SchedulerConfig(
        max_running=SLOTS, max_batch_tokens=64, chunk_tokens=9, in_batch_gain=4, steps_in_flight=in_flight
    )
    pages = tokens // page_size
    scheduler = Scheduler(config, KVManager(pages, page_size, recurrent=True, snapshots=snapshots), CONTEXT)
    cache = KVCache(model.kv_spec, pages, page_size, slots=SLOTS, snapshots=snapshots)
    poison(cache)
    runner = ModelRunner(
        model, cache, max_slots=SLOTS, context_len=CONTEXT, group="0", tp=TensorParallel(), device="cpu"
    )  # fmt: skip
    runner.warm_up()
    return scheduler, runner


@pytest.mark.parametrize("kind", ["qwen3_5_text", "lfm2", "granitemoehybrid", "mamba2", "falcon_mamba", "zamba2"])
def test_tokens_are_those_of_each_request_alone(kind: str, tmp_path: Path) -> None:
    """With more and fewer snapshots, pages of which some are evicted, and requests that are preempted."""
    path = make_hybrid(kind, tmp_path)
    model = load_model(
        path, dtype=torch.float32, device="cpu", tp=TensorParallel(), attention=ReferenceAttention()
    )  # fmt: skip
    check_serving(model, [greedy(path, wave, COUNT) for wave in WAVES])


def check_serving(model: LanguageModel, alone: list[list[list[int]]]) -> None:
    """Requests of `WAVES` have the tokens that they have alone, whatever room there is for them."""
    totals: dict[str, int] = {}
    for page_size, tokens, snapshots, in_flight in ((1, 600, 9, 1), (4, 200, 2, 2), (16, 256, 5, 2)):
        scheduler, runner = serving(model, page_size, tokens=tokens, snapshots=snapshots, in_flight=in_flight)
        for wave, wanted in zip(WAVES, alone, strict=True):
            requests = [Request(prompt, DrawParams(0.0), COUNT) for prompt in wave]
            stats = serve(scheduler, runner, requests)
            assert [request.tokens for request in requests] == wanted
        totals = {name: totals.get(name, 0) + value for name, value in stats.items()}
    assert totals["loaded_snapshots"] > 15 and totals["preempted"] > 0 and totals["evicted_pages"] > 0


@pytest.mark.parametrize("kind", ["qwen3_next", "lfm2", "nemotron_h"])
def test_turns_of_conversations_start_in_their_answers(kind: str, tmp_path: Path) -> None:
    """Several at once, whose answers keep states at ends of pages; each turn starts at the last one's end."""
    path = make_hybrid(kind, tmp_path)
    model = load_model(
        path, dtype=torch.float32, device="cpu", tp=TensorParallel(), attention=ReferenceAttention()
    )  # fmt: skip
    for page_size, in_flight in ((4, 2), (16, 1)):
        scheduler, runner = serving(model, page_size, tokens=600, snapshots=20, in_flight=in_flight)
        prompts = [SYSTEM, OTHER, SHORT]
        for turn in range(3):
            requests = [Request(prompt, DrawParams(0.0), COUNT) for prompt in prompts]
            found = scheduler.measures.counts["cached_tokens"]
            serve(scheduler, runner, requests)
            wanted = greedy(path, prompts, COUNT)
            assert [request.tokens for request in requests] == wanted
            if turn:
                ends = [(len(prompt) - len(SHORT) - 1) // page_size * page_size for prompt in prompts]
                assert scheduler.measures.counts["cached_tokens"] - found == sum(ends)
            prompts = [[*prompt, *answer, *SHORT] for prompt, answer in zip(prompts, wanted, strict=True)]
