"""Log probabilities of prompts on the GPU's decoder, through the runner: those of the plain decoder."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers_triton import DEVICE

pytest.importorskip("triton")

from common.messages import Scoring, ints
from common.sampling_params import DrawParams
from tests.helpers_models import make_checkpoint
from tests.helpers_plans import PlanWriter
from tests.worker.test_cuda_decoder import load, run_again
from worker_proc.attention.reference import ReferenceAttention
from worker_proc.cuda.graphs import GraphedDecoder
from worker_proc.kv_cache import KVCache
from worker_proc.model_runner import ModelRunner
from worker_proc.models.decoder import Decoder
from worker_proc.models.interface import LanguageModel
from worker_proc.parallel import TensorParallel


@pytest.mark.parametrize("how", ["stepping", "replayed"])
@pytest.mark.parametrize("decodes", [0, 1])
def test_prompts_that_are_scored_and_sampled_in_one_step(how: str, decodes: int, tmp_path: Path) -> None:
    """The token that is drawn comes first among the rows with logits, though its chunk has it last."""
    cuda = load(make_checkpoint("llama", tmp_path))
    plain = Decoder(cuda.spec, cuda.shard, cuda.weights, TensorParallel(), ReferenceAttention())

    def scored(model: LanguageModel) -> tuple[list[int], Any]:
        cache = KVCache(model.kv_spec, 24, 4, DEVICE)
        if model is cuda and how == "replayed":
            model = GraphedDecoder(cuda, 4, 64, None if DEVICE.type == "cuda" else run_again, max_tokens=64)
            model.capture(cache)
        runner = ModelRunner(
            model, cache, max_slots=4, context_len=64, group="0", tp=TensorParallel(), device=DEVICE
        )  # fmt: skip
        plans = PlanWriter(24, 4)
        greedy_draw, prompt = DrawParams(0.0), [5, 9, 2, 7, 11, 3, 8, 1]
        if decodes:
            runner.execute(plans.plan(enter={0: greedy_draw}, chunks=((0, [4, 8, 6], True),)))
        chunks = ((1, prompt, True),)
        plan = plans.plan(enter={1: DrawParams(0.0, prompt_logprobs=0)}, chunks=chunks, decode=tuple(range(decodes)))
        output = runner.execute(replace(plan, scorings=(Scoring(0, 0, ints(*prompt[1:])),)))
        assert output.prompt_logprobs is not None
        return output.tokens, output.prompt_logprobs.by_row()[0]

    tokens, scores = scored(cuda)
    expected_tokens, expected = scored(plain)
    assert list(tokens) == list(expected_tokens)
    assert list(scores.token_ids) == list(expected.token_ids)
    torch.testing.assert_close(torch.tensor(list(scores.logprobs)), torch.tensor(list(expected.logprobs)))
