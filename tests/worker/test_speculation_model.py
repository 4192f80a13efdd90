"""Speculation with the real scheduler, the real worker and a tiny model: on and off give the same, in every respect."""

from pathlib import Path
from typing import Any

import pytest
import torch

from common.config import SchedulerConfig
from common.messages import ints
from common.sampling_params import DrawParams, LogitEdits
from scheduler_proc.kv_manager import KVManager
from scheduler_proc.scheduler import Scheduler
from tests.helpers_models import VOCAB_SIZE, make_checkpoint
from tests.helpers_serving import Request, serve
from tests.worker.test_cpu_build import needs_compiler
from worker_proc.attention.reference import ReferenceAttention
from worker_proc.cpu.features import cpu_features
from worker_proc.cpu.library import load_library
from worker_proc.kv_cache import KVCache
from worker_proc.model_runner import ModelRunner
from worker_proc.models.interface import LanguageModel
from worker_proc.models.registry import load_model
from worker_proc.parallel import TensorParallel

CONTEXT, COUNT = 128, 40
PASSAGE = [(7 * i + 3) % VOCAB_SIZE for i in range(11)]
DRAWS = [
    DrawParams(0.0),
    DrawParams(0.0, edits=LogitEdits(logit_bias={5: 30.0})),  # the same token again and again
    DrawParams(1.0, seed=3, edits=LogitEdits(logit_bias={5: 60.0, 9: 60.0}), logprobs=2),
    DrawParams(0.7, seed=4, logprobs=0, prompt_logprobs=1),
    DrawParams(0.0, edits=LogitEdits(repetition_penalty=1.3)),
    DrawParams(0.0, edits=LogitEdits(allowed=ints(5, 6), bad_words=(ints(6),))),  # a loop
    DrawParams(1.0, seed=2, edits=LogitEdits(allowed=ints(5, 9), bad_words=(ints(5, 5), ints(9, 5, 9)))),
    DrawParams(0.9, top_k=2, seed=6, edits=LogitEdits(logit_bias={8: 60.0, 4: 60.0}, min_len=40, ends=ints(8))),
]


class Answer(Request):
    """Equal to another one with the same tokens and scores."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Answer) or self.tokens != other.tokens:
            return False
        pairs = ((self.logprobs, other.logprobs), (self.prompt_logprobs, other.prompt_logprobs))
        return all(
            a.token_ids == b.token_ids
            and a.top_ids == b.top_ids
            and list(a.logprobs) == pytest.approx(list(b.logprobs), abs=1e-4)
            for a, b in pairs
        )


def serve_all(
    model: LanguageModel, *, guess: bool, pages: int, page_size: int, **more: Any
) -> tuple[list[Answer], dict[str, int]]:
    """All of DRAWS at once; the answers and what the scheduler counted."""
    speculation = "ngram-always" if guess else "off"
    config = SchedulerConfig(
        max_running=6, max_batch_tokens=64, chunk_tokens=9, speculation=speculation, prompt_lookup_min=1, **more
    )
    scheduler = Scheduler(config, KVManager(pages, page_size), CONTEXT)
    cache = KVCache(model.kv_spec, pages, page_size)
    runner = ModelRunner(model, cache, max_slots=6, context_len=CONTEXT, group="0", tp=TensorParallel(), device="cpu")
    answers = [Answer(PASSAGE * 2 + PASSAGE[: 2 + i], draw, COUNT) for i, draw in enumerate(DRAWS)]
    return answers, serve(scheduler, runner, answers)


@pytest.fixture(scope="module", params=["float32", pytest.param("bfloat16", marks=needs_compiler)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    path: Path = make_checkpoint("llama", tmp_path_factory.mktemp("model"))
    native = load_library(cpu_features().levels()[0]) if request.param == "bfloat16" else None
    dtype, attention = getattr(torch, request.param), ReferenceAttention()
    return load_model(path, dtype=dtype, device="cpu", tp=TensorParallel(), attention=attention, native=native)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_on_and_off_are_the_same(model: LanguageModel, page_size: int, in_flight: int) -> None:
    tokens = 448
    plain, none = serve_all(model, guess=False, pages=tokens // page_size, page_size=page_size)
    guessed, stats = serve_all(
        model, guess=True, pages=tokens // page_size, page_size=page_size, steps_in_flight=in_flight
    )
    assert guessed == plain
    assert none["draft_tokens"] == 0 < stats["accepted_tokens"] < stats["draft_tokens"]
    assert stats["steps"] < none["steps"]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_under_memory_pressure(model: LanguageModel, page_size: int) -> None:
    """Less than a third of the room that all need together: requests are preempted with guesses on their way;
    in which of the pools depends on the last bits."""
    plain, _ = serve_all(model, guess=False, pages=448 // page_size, page_size=page_size)
    preempted = 0
    for tokens in (80, 96, 112, 128):
        guessed, stats = serve_all(model, guess=True, pages=tokens // page_size, page_size=page_size)
        assert guessed == plain
        assert stats["accepted_tokens"] > 0
        preempted += stats["preempted"]
    assert preempted > 0
