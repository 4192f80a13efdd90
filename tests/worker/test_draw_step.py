"""Penalties, log probabilities and prompt scores of the real model runner, on a tiny checkpoint."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from common.config import SchedulerConfig
from common.messages import History, Scoring, ints
from common.sampling_params import DrawParams, LogitEdits
from scheduler_proc.kv_manager import KVManager
from scheduler_proc.scheduler import Scheduler
from tests.helpers_models import VOCAB_SIZE, make_checkpoint
from tests.helpers_plans import GREEDY, PlanWriter, empty_plan
from tests.helpers_serving import Request, serve
from worker_proc.attention.reference import ReferenceAttention
from worker_proc.errors import PlanError
from worker_proc.kv_cache import KVCache
from worker_proc.model_runner import ModelRunner, StepOutput
from worker_proc.models.interface import LanguageModel
from worker_proc.models.registry import load_model
from worker_proc.parallel import TensorParallel

CONTEXT = 96
PROMPTS = [[(i * j + 3 * i) % VOCAB_SIZE for i in range(4 + 5 * j)] for j in range(1, 5)]


def load(path: Path) -> LanguageModel:
    tp = TensorParallel()
    return load_model(path, dtype=torch.float32, device="cpu", tp=tp, attention=ReferenceAttention())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return load(make_checkpoint("llama", tmp_path_factory.mktemp("model")))


def make_runner(model: LanguageModel, num_pages: int = 64, page_size: int = 4) -> ModelRunner:
    cache = KVCache(model.kv_spec, num_pages, page_size)
    return ModelRunner(model, cache, max_slots=6, context_len=CONTEXT, group="0", tp=TensorParallel(), device="cpu")


def serve_all(model: LanguageModel, requests: list[Request], **settings_: Any) -> dict[str, int]:
    """Run requests through a real scheduler and a real runner; returns the scheduler's counters."""
    pages, page_size = settings_.pop("pages", 64), settings_.pop("page_size", 4)
    config = SchedulerConfig(max_running=6, max_batch_tokens=48, chunk_tokens=7, admission="ratio", **settings_)
    scheduler = Scheduler(config, KVManager(pages, page_size), CONTEXT)
    scheduler.admission.ratio = 0.0  # type: ignore[attr-defined]  # admit more than will fit
    return serve(scheduler, make_runner(model, pages, page_size), requests)


DRAWS = st.builds(
    DrawParams,
    temperature=st.sampled_from([0.0, 0.8]),
    seed=st.integers(0, 9),
    edits=st.sampled_from(
        [
            None,
            LogitEdits(repetition_penalty=1.4),
            LogitEdits(frequency_penalty=1.1),
            LogitEdits(presence_penalty=1.5, repetition_penalty=0.8),
            LogitEdits(logit_bias={5: 8.0, 6: 7.5}, frequency_penalty=2.0),
            LogitEdits(allowed=ints(5, 6, 7), bad_words=(ints(5, 6), ints(7, 7, 7), ints(6, 5)), presence_penalty=0.1),
            LogitEdits(allowed=ints(*range(40)), bad_words=(ints(3),)),
        ]
    ),
    logprobs=st.sampled_from([None, 0, 2]),
    prompt_logprobs=st.sampled_from([None, None, 1]),
)


@settings(max_examples=10)
@given(
    draws=st.lists(DRAWS, min_size=3, max_size=5),
    in_flight=st.integers(1, 2),
    pages=st.integers(24, 30),
    page_size=st.sampled_from([1, 3, 4]),
)
def test_a_request_under_pressure_gets_what_it_gets_alone(
    model: LanguageModel, draws: list[DrawParams], in_flight: int, pages: int, page_size: int
) -> None:
    """Preemption, chunks, sharing and overlap change no token and no log probability."""

    def make() -> list[Request]:
        return [Request(PROMPTS[i % 4], draw, 14) for i, draw in enumerate(draws)]

    crowd, alone = make(), make()
    serve_all(model, crowd, steps_in_flight=in_flight, pages=pages * 4 // page_size, page_size=page_size)
    for request in alone:
        serve_all(model, [request], steps_in_flight=1)
    for ours, solo in zip(crowd, alone, strict=True):
        assert ours.tokens == solo.tokens
        for a, b in ((ours.logprobs, solo.logprobs), (ours.prompt_logprobs, solo.prompt_logprobs)):
            assert a.token_ids == b.token_ids and a.top_counts == b.top_counts
            assert list(a.logprobs) == pytest.approx(list(b.logprobs), abs=1e-4)


def test_there_is_pressure(model: LanguageModel) -> None:
    """The pools above are small enough to preempt."""
    requests = [
        Request(PROMPTS[i % 4], DrawParams(0.0, edits=LogitEdits(repetition_penalty=1.3)), 14) for i in range(5)
    ]
    assert serve_all(model, requests, steps_in_flight=2, pages=24)["preempted"] > 0


@pytest.mark.parametrize("kind", ["llama", "gpt2", "vaultgemma"])  # the last one through transformers, with soft caps
def test_logprobs_are_of_the_models_own_distribution(kind: str, tmp_path: Path) -> None:
    path = make_checkpoint(kind, tmp_path)
    model = load(path)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    edits = LogitEdits(logit_bias={9: 100.0}, repetition_penalty=1.7)
    request = Request(PROMPTS[2], DrawParams(0.7, edits=edits, logprobs=3, prompt_logprobs=0), 6)
    serve_all(model, [request], steps_in_flight=2)
    assert request.tokens == [9] * 6
    known = request.prompt + request.tokens
    with torch.inference_mode():
        expected = reference(torch.tensor([known])).logits[0].log_softmax(-1)
    begin = len(request.prompt) - 1
    assert list(request.prompt_logprobs.logprobs) == pytest.approx(
        [float(expected[i, known[i + 1]]) for i in range(begin)], abs=1e-4
    )
    assert list(request.logprobs.logprobs) == pytest.approx(expected[begin:-1, 9].tolist(), abs=1e-4)
    ranks = [int((row > row[9]).sum()) + 1 for row in expected[begin:-1]]
    assert list(request.logprobs.ranks) == ranks
    assert list(request.logprobs.top_ids) == expected[begin:-1].topk(3).indices.flatten().tolist()


def test_scorings_that_do_not_fit_are_refused(model: LanguageModel) -> None:
    def execute(draw: DrawParams, *scorings: Scoring) -> StepOutput:
        plan = PlanWriter(64, 4).plan(enter={0: draw}, chunks=((0, [1, 2, 3], True),))
        return make_runner(model).execute(replace(plan, scorings=scorings))

    scored = DrawParams(0.0, prompt_logprobs=2)
    out = execute(scored, Scoring(0, 1, ints(3)))
    assert out.prompt_logprobs is not None and list(out.prompt_logprobs.entries.token_ids) == [3]
    for draw, scoring, problem in (
        (scored, Scoring(1, 0, ints(2)), "chunk 1"),
        (scored, Scoring(0, 2, ints(3, 4)), "2 tokens of chunk 0 from 2"),
        (scored, Scoring(0, 0, ints(VOCAB_SIZE)), "outside a vocabulary"),
        (GREEDY, Scoring(0, 0, ints(2)), "did not ask"),
    ):
        with pytest.raises(PlanError, match=problem):
            execute(draw, scoring)


def test_a_history_is_asked_for_where_it_is_needed(model: LanguageModel) -> None:
    draw = DrawParams(0.0, edits=LogitEdits(presence_penalty=1.0))
    writer = PlanWriter(64, 4)
    plan = writer.plan(enter={0: draw}, chunks=((0, [1, 2, 3], True),))
    with pytest.raises(PlanError, match="histories: slot 0"):
        make_runner(model).execute(plan)
    assert len(make_runner(model).execute(replace(plan, histories=(History(0, 3, ints(1, 2, 3)),))).tokens) == 1
    assert empty_plan().histories == ()
