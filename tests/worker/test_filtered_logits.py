"""Logits that filters keep by a look at int8 first: draws are those from all logits to the last token."""

from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.config import SchedulerConfig
from common.messages import ints
from common.sampling_params import DrawParams, LogitEdits
from scheduler_proc.kv_manager import KVManager
from scheduler_proc.scheduler import Scheduler
from tests.helpers_models import VOCAB_SIZE, make_checkpoint
from tests.helpers_native import SCREENING, packed
from tests.helpers_serving import Request, serve
from tests.worker.test_cpu_build import needs_compiler
from tests.worker.test_head_screen import KINDS, compressed, random, screened, spread
from worker_proc.attention.reference import ReferenceAttention
from worker_proc.cpu.features import Level
from worker_proc.cpu.library import load_library
from worker_proc.cpu.linear import Finish, PackedMatrix
from worker_proc.cpu.sampling import NativeDraws
from worker_proc.cpu.screen import HeadScreen, screen_scheme
from worker_proc.kv_cache import KVCache
from worker_proc.model_runner import ModelRunner
from worker_proc.models.registry import load_model
from worker_proc.parallel import TensorParallel
from worker_proc.sampler import UNIT

pytestmark = needs_compiler


def draws_of(native: NativeDraws, logits: Tensor, params: Tensor, seed: int) -> Tensor:
    """One token per row as the sampler draws, greedy where `params` say so."""
    rows = len(logits)
    best, tokens = native.best(logits)
    which = torch.arange(rows)[params[0] != 0]
    index = torch.stack((which, which, which + seed))
    native.draw(logits, best, params, torch.arange(rows) * 7 + seed, index, tokens)
    return tokens


def drawable(level: Level, logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """What the filters keep of a row, but for top_p, bool `[vocab]`."""
    if not temperature:
        return logits == logits.max()
    weights = NativeDraws(load_library(level)).weights(logits, temperature)
    least = 1.0  # what weighs nothing has no part in the draw
    if 0 < top_k < len(logits):
        least = max(least, float(weights.sort(descending=True).values[int(top_k) - 1]))
    if top_p >= 1:
        least = max(least, float(torch.tensor(min_p * UNIT).float()))
    return weights >= least


def check(level: Level, matrix: PackedMatrix, screen: HeadScreen, x: Tensor, params: Tensor, seed: int) -> Tensor:
    """Whose logits are kept, bool `[rows, outputs]`."""
    native, outputs = NativeDraws(load_library(level)), matrix.outputs
    whole, some = (torch.full((len(x), outputs + 3), 7.0) for _ in range(2))
    matrix.linear(x, Finish.STORE_FLOAT, whole)
    matrix.filtered(x, screen.struct, params, some)
    assert torch.all(some[:, outputs:] == 7.0), "nothing is written beside the outputs"
    whole, some = whole[:, :outputs], some[:, :outputs]
    kept = (some == whole) | whole.isnan() & some.isnan()
    assert torch.all(kept | (some == -torch.inf))
    for row, (logits, wanted) in enumerate(zip(whole, params.T.tolist(), strict=True)):
        if not logits.isnan().any():
            assert torch.all(kept[row] | ~drawable(level, logits, *wanted))
    for shift in range(5):
        expected = draws_of(native, whole, params, seed + 100 * shift)
        assert torch.equal(draws_of(native, some, params, seed + 100 * shift), expected)
    return kept


def params_of(rows: list[tuple[float, int, float, float]], count: int) -> Tensor:
    return torch.tensor([rows[i % len(rows)] for i in range(count)], dtype=torch.float64).T.contiguous()


filters = st.tuples(
    st.sampled_from([0.0, 1e-30, 1e-3, 0.1, 0.6, 1.0, 2.0, 50.0]),
    st.one_of(st.sampled_from([1, 2, 20, 128]), st.integers(0, 300)),
    st.sampled_from([1.0, 1.0, 0.95, 0.5, 1e-3]),
    st.sampled_from([0.0, 0.0, 1e-12, 1e-9, 0.05, 1.0]),
)


@pytest.mark.parametrize("level", SCREENING)
@settings(max_examples=60, deadline=None)
@given(
    rows=st.one_of(st.integers(1, 20), st.just(300)),
    outputs=st.one_of(st.integers(1, 200), st.sampled_from([1000, 2048, 3001, 12000])),
    inputs=st.sampled_from([1, 33, 64, 129, 256, 300]),
    weights=st.sampled_from(KINDS),
    hidden=st.sampled_from(KINDS),
    size=st.sampled_from([1.0, 0.01, 30.0]),
    asked=st.lists(filters, min_size=1, max_size=4),
    in_12_bits=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_draws_are_those_from_all_logits(
    level: Level,
    rows: int,
    outputs: int,
    inputs: int,
    weights: str,
    hidden: str,
    size: float,
    asked: list[tuple[float, int, float, float]],
    in_12_bits: bool,
    threads: int,
    seed: int,
) -> None:
    native = load_library(level)
    native.set_threads(threads)
    weight = spread(size * random(outputs, inputs, seed=seed), weights, seed).bfloat16()
    x = spread(random(rows, inputs, seed=seed + 1), hidden, seed + 1).bfloat16()
    matrix = (compressed if in_12_bits and native.compresses else packed)(level, weight)
    screen = screened(level, weight)
    for part in (x, x[: rows // 2 + 1], x[:1]):
        check(level, matrix, screen, part, params_of(asked, len(part)), seed)
    native.set_threads(1)


@pytest.mark.parametrize("level", SCREENING)
def test_few_logits_are_kept_of_numbers_as_models_have_them(level: Level) -> None:
    """24 tokens stand out in each row."""
    outputs, inputs = 65536, 512
    weight = (2 * inputs**-0.5 * random(outputs, inputs, seed=1)).bfloat16()
    x = (random(24, inputs, seed=2) + 5 * weight[: 24 * 24].float().view(24, 24, inputs).sum(dim=0)).bfloat16()
    matrix, screen = packed(level, weight), screened(level, weight)
    asked: list[tuple[float, int, float, float]] = [
        (0.7, 20, 0.9, 0.0),
        (0.0, 0, 1.0, 0.0),
        (0.7, 0, 1.0, 0.1),
        (1.0, 8, 0.5, 0.1),
    ]
    kept = check(level, matrix, screen, x, params_of(asked, 24), 1)
    counts = kept.sum(dim=1)
    assert counts.max() < outputs / 8 and counts.min() >= 8
    assert screen.rest_of_filtered.tolist() == [0, 1] == screen.rest.tolist()


@pytest.mark.parametrize("level", SCREENING)
def test_tokens_that_weigh_as_much_as_the_last_one_are_kept_with_it(level: Level) -> None:
    """Weights are whole numbers of few units, of logits that int8 holds exactly, so that a look is sure of them: of one
    panel after the other, from 0.5 to -0.5, one of 23.6, and many that are less than all of these. The same of two
    ranks, one of which does not have the largest."""
    unit, numbers = 2.0**-11, torch.arange(65536)
    weight, x = torch.zeros(65536, 64), torch.zeros(1, 64)
    weight[:, 0], x[:, 1] = 127.0, 127.0 * unit  # the largest, which say what int8 holds
    weight[:, 2], weight[:, 3] = (1023 - numbers) // 64, (1023 - numbers) % 64
    weight[2048:, 2] = -100.0
    weight[40000, 2:7] = torch.tensor([0.0, 0.0, 127.0, 127.0, 127.0])
    x[:, 2], x[:, 3], x[:, 4:7] = 64 * unit, unit, 127.0 * unit
    weight, x = weight.bfloat16(), x.bfloat16()
    matrix, screen = packed(level, weight), screened(level, weight)
    ranks = [(packed(level, half), screened(level, half)) for half in weight.split(32768)]
    for temperature in (0.9, 0.95, 0.97, 0.98, 0.99, 1.0, 1.03, 1.1, 1.5, 10.0):
        for top_k, min_p in ((2, 0), (3, 0), (16, 0), (0, 0.6e-10), (0, 0.9e-10), (0, 1.2e-10), (0, 1e-9), (9, 1e-10)):
            screen.rest_of_filtered[:] = torch.tensor([0, 1])
            params = params_of([(temperature, top_k, 1.0, min_p)], 1)
            check(level, matrix, screen, x, params, top_k)
            whole, some = torch.empty(1, 65536), torch.empty(1, 65536)
            for rank, (half, look) in enumerate(ranks):
                look.rest_of_filtered[:] = torch.tensor([0, 1])
                half.linear(x, Finish.STORE_FLOAT, whole[:, 32768 * rank : 32768 * (rank + 1)])
                half.filtered(x, look.struct, params, some[:, 32768 * rank : 32768 * (rank + 1)], part=True)
            assert torch.all((some == whole) | ~drawable(level, whole[0], temperature, top_k, 1.0, min_p))


@pytest.mark.parametrize("level", SCREENING)
def test_where_a_look_does_not_pay_it_is_left_out_and_greedy_steps_go_on(level: Level) -> None:
    weight = random(8192, 64, seed=1).bfloat16()
    matrix, screen, x = packed(level, weight), screened(level, weight), random(3, 64, seed=2).bfloat16()
    every, few = params_of([(5.0, 100, 1.0, 0.0)], 3), params_of([(0.5, 2, 1.0, 0.0)], 3)
    for left in ([1, 2], [0, 2], [2, 4], [1, 4], [0, 4]):
        assert bool(check(level, matrix, screen, x, every, 1).all())
        assert screen.rest_of_filtered.tolist() == left and screen.rest.tolist() == [0, 1]
    check(level, matrix, screen, x, few, 1)
    assert screen.rest_of_filtered.tolist() == [0, 1]


def draw(temperature: float, top_k: int = 0, **more: object) -> DrawParams:
    return DrawParams(temperature, top_k=top_k, seed=5, **more)  # type: ignore[arg-type]


BATCHES = {
    "all with top_k": ([draw(1.0, 3), draw(0.7, 2, top_p=0.9), draw(2.0, 9, min_p=0.1)], True),
    "greedy and min_p": ([draw(0.0), draw(1.0, min_p=0.2), draw(0.0), draw(0.5, 2)], True),
    "min_p behind a nucleus": ([draw(1.0, min_p=0.2, top_p=0.9), draw(0.5, 2)], False),
    "no filter": ([draw(1.0), draw(0.5, 2)], False),
    "many": ([draw(1.0, 129), draw(0.5, 2)], False),
    "penalties": ([draw(1.0, 2, edits=LogitEdits(frequency_penalty=0.5)), draw(0.5, 2)], False),
    "log probabilities": ([draw(1.0, 2, logprobs=3), draw(0.5, 2)], False),
    "log probabilities of prompts": ([draw(1.0, 2, prompt_logprobs=1), draw(0.5, 2)], False),
    "bias": ([draw(1.0, 2, edits=LogitEdits(logit_bias={5: 1.0})), draw(0.5, 2)], False),
    "banned": ([draw(1.0, 2, edits=LogitEdits(bad_words=(ints(4),))), draw(0.5, 2)], False),
}


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gptneox"])
@pytest.mark.parametrize("batch", BATCHES)
def test_answers_are_those_without_a_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, batch: str
) -> None:
    """Of the native decoder, of one that caps its logits, and of a model that runs through transformers."""
    level, tp = SCREENING[0], TensorParallel()
    path, (asked, looked) = make_checkpoint(kind, tmp_path), BATCHES[batch]
    found, calls = [], 0
    for screens in (False, True):
        if screens:
            for module in ("weights", "modules"):
                monkeypatch.setattr(f"worker_proc.cpu.{module}.screen_scheme", partial(screen_scheme, least=0))
        native = load_library(level)
        model = load_model(
            path, dtype=torch.bfloat16, device="cpu", tp=tp, attention=ReferenceAttention(), native=native
        )
        cache = KVCache(model.kv_spec, 64, 4)
        runner = ModelRunner(model, cache, max_slots=6, context_len=200, group="0", tp=tp, device="cpu")
        forward = model.forward

        def watched(batch, cache, forward=forward):
            nonlocal calls
            calls += batch.filters is not None
            return forward(batch, cache)

        monkeypatch.setattr(model, "forward", watched)
        prompts = [[(i * i + j) % (VOCAB_SIZE - 9) + 4 for i in range(10 + j)] for j in range(len(asked))]
        answers = [Request(prompt, params, 12) for prompt, params in zip(prompts, asked, strict=True)]
        serve(
            Scheduler(SchedulerConfig(max_running=6, max_batch_tokens=64, chunk_tokens=16), KVManager(64, 4), 200),
            runner,
            answers,
        )
        found.append([request.tokens for request in answers])
    assert found[0] == found[1]
    assert (calls > 0) == looked
