"""The model runner on a tiny checkpoint: plans in, tokens out, compared with transformers."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.messages import ints
from common.sampling_params import DrawParams
from tests.helpers_models import VOCAB_SIZE, greedy, make_checkpoint
from tests.helpers_paged import make_prompts
from tests.helpers_plans import GREEDY, PlanWriter, bitmap, empty_plan
from tests.worker.test_cpu_build import needs_compiler
from worker_proc.attention.reference import ReferenceAttention
from worker_proc.cpu.decoder import CpuDecoder
from worker_proc.cpu.features import cpu_features
from worker_proc.cpu.library import load_library
from worker_proc.errors import PlanError
from worker_proc.kv_cache import KVCache
from worker_proc.model_runner import ModelRunner
from worker_proc.models.interface import LanguageModel
from worker_proc.models.registry import load_model
from worker_proc.parallel import TensorParallel

NUM_PAGES = 80
NEW_TOKENS = 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> LanguageModel:
    tp = TensorParallel()
    return load_model(checkpoint, dtype=torch.float32, device="cpu", tp=tp, attention=ReferenceAttention())


def make_runner(model: LanguageModel, page_size: int = 8) -> ModelRunner:
    cache = KVCache(model.kv_spec, NUM_PAGES * 8 // page_size, page_size)
    for pages in (*cache.k, *cache.v):
        pages.fill_(float("nan"))
    return ModelRunner(model, cache, max_slots=12, context_len=256, group="0", tp=TensorParallel(), device="cpu")


def make_writer(page_size: int = 8) -> PlanWriter:
    return PlanWriter(NUM_PAGES * 8 // page_size, page_size)


def run(
    runner: ModelRunner, writer: PlanWriter, prompts: dict[int, list[int]], draws: dict[int, DrawParams], count: int
) -> dict[int, list[int]]:
    """Prefill each slot's prompt in one step, then decode until each has `count` tokens; slots leave in the end."""
    outputs: dict[int, list[int]] = {slot: [] for slot in prompts}
    chunks = tuple((slot, prompt, True) for slot, prompt in prompts.items())
    for slot, token in zip(prompts, runner.execute(writer.plan(enter=draws, chunks=chunks)).tokens, strict=True):
        outputs[slot].append(token)
    for _ in range(count - 1):
        tokens = runner.execute(writer.plan(decode=tuple(sorted(prompts)))).tokens
        for slot, token in zip(sorted(prompts), tokens, strict=True):
            outputs[slot].append(token)
    assert runner.execute(writer.plan(leave=tuple(prompts))).tokens == []
    return outputs


@pytest.mark.parametrize("page_size", [1, 8])
def test_greedy_tokens_are_those_of_transformers(checkpoint: Path, model: LanguageModel, page_size: int) -> None:
    prompts = make_prompts(VOCAB_SIZE)
    runner, writer = make_runner(model, page_size), make_writer(page_size)
    runner.warm_up()
    slots = dict(zip((7, 0, 11, 3, 4), prompts, strict=True))
    for _ in range(2):  # the second time in slots and pages that were used before
        outputs = run(runner, writer, slots, dict.fromkeys(slots, GREEDY), NEW_TOKENS)
        assert list(outputs.values()) == greedy(checkpoint, prompts, NEW_TOKENS)


def test_chunks_beside_decodes(checkpoint: Path, model: LanguageModel) -> None:
    short, long = make_prompts(VOCAB_SIZE)[1], make_prompts(VOCAB_SIZE)[4]
    runner, writer = make_runner(model), make_writer()
    outputs: dict[int, list[int]] = {2: [], 5: []}
    outputs[2] += runner.execute(writer.plan(enter={2: GREEDY}, chunks=((2, short, True),))).tokens
    for begin in range(0, len(long), 16):
        last = begin + 16 >= len(long)
        plan = writer.plan(
            enter={} if begin else {5: GREEDY}, chunks=((5, long[begin : begin + 16], last),), decode=(2,)
        )
        tokens = runner.execute(plan).tokens
        assert len(tokens) == 1 + last  # the sampling chunk comes first
        outputs[2].append(tokens[-1])
        outputs[5] += tokens[:-1]
    while len(outputs[2]) < NEW_TOKENS:
        for slot, token in zip((2, 5), runner.execute(writer.plan(decode=(2, 5))).tokens, strict=True):
            outputs[slot].append(token)
    expected = greedy(checkpoint, [short, long], NEW_TOKENS)
    assert outputs[2] == expected[0]
    assert outputs[5] == expected[1][: len(outputs[5])]


def test_cached_prefix_and_copied_page(checkpoint: Path, model: LanguageModel) -> None:
    """Slot 1 reuses two full pages of slot 0; slot 2 a copy of the third, of which it keeps three tokens."""
    prompt = make_prompts(VOCAB_SIZE)[3]  # 33 tokens, pages of 8
    runner, writer = make_runner(model), make_writer()
    runner.execute(writer.plan(enter={0: GREEDY}, chunks=((0, prompt, True),)))
    pages = writer.slots[0].pages
    shared = writer.plan(enter={1: GREEDY}, prefix={1: (16, pages[:2])}, chunks=((1, prompt[16:], True),))
    outputs = [runner.execute(shared).tokens]
    copy = writer.free.pop()
    prefix = {2: (19, [*pages[:2], copy])}
    copied = writer.plan(enter={2: GREEDY}, prefix=prefix, copies=(pages[2], copy), chunks=((2, prompt[19:], True),))
    outputs.append(runner.execute(copied).tokens)
    for _ in range(5):
        for output, token in zip(outputs, runner.execute(writer.plan(decode=(1, 2))).tokens, strict=True):
            output.append(token)
    assert outputs == greedy(checkpoint, [prompt], 6) * 2


def test_a_seeded_request_draws_the_same_alone_and_in_a_crowd(model: LanguageModel) -> None:
    prompts = dict(enumerate(make_prompts(VOCAB_SIZE)))
    draws = {slot: DrawParams(0.9, 40 * (slot % 2), 0.95, seed=slot) for slot in prompts}
    crowd = run(make_runner(model), make_writer(), prompts, draws, 10)
    for slot, prompt in prompts.items():
        alone = run(make_runner(model), make_writer(), {slot + 6: prompt}, {slot + 6: draws[slot]}, 10)
        assert alone[slot + 6] == crowd[slot]
    assert len({tuple(tokens) for tokens in crowd.values()}) == len(crowd)


def test_a_resumed_request_goes_on_with_the_tokens_it_would_have_drawn(model: LanguageModel) -> None:
    prompt, draw = make_prompts(VOCAB_SIZE)[2], DrawParams(seed=5)
    whole = run(make_runner(model), make_writer(), {0: prompt}, {0: draw}, 10)[0]
    resumed = run(make_runner(model), make_writer(), {3: prompt + whole[:4]}, {3: draw}, 6)[3]
    assert resumed == whole[4:]


def test_times_are_in_order(model: LanguageModel) -> None:
    output = make_runner(model).execute(make_writer().plan(enter={0: GREEDY}, chunks=((0, [1, 2], True),)))
    assert 0 < output.forward_started < output.tokens_ready


def test_plans_out_of_order_are_refused(model: LanguageModel) -> None:
    runner = make_runner(model)
    with pytest.raises(PlanError, match="group: the plan is for 'x', this worker is of '0'"):
        runner.execute(empty_plan(group="x"))
    runner.execute(empty_plan(41, epoch=3))
    runner.execute(empty_plan(42, epoch=3))
    with pytest.raises(PlanError, match="step_id: expected 43, got 42"):
        runner.execute(empty_plan(42, epoch=3))
    with pytest.raises(PlanError, match="step_id: expected 43, got 44"):
        runner.execute(empty_plan(44, epoch=3))
    with pytest.raises(PlanError, match="epoch: the plan is of 2, this worker is in 3"):
        runner.execute(empty_plan(43, epoch=2))


def test_a_new_epoch_starts_with_free_slots(model: LanguageModel) -> None:
    prompt = {6: make_prompts(VOCAB_SIZE)[2]}
    runner, writer = make_runner(model), make_writer()
    expected = run(make_runner(model), make_writer(), prompt, {6: GREEDY}, 5)
    runner.execute(writer.plan(enter={6: GREEDY}, chunks=((6, [1, 2, 3], True),)))
    assert run(runner, PlanWriter(NUM_PAGES, 8, epoch=1, step_id=900), prompt, {6: GREEDY}, 5) == expected
    with pytest.raises(PlanError, match="decode: slots 6"):
        runner.execute(replace(empty_plan(0, epoch=2), decode=bitmap([6])))


def test_a_bitmap_without_bits_computes_nothing(model: LanguageModel) -> None:
    assert make_runner(model).execute(replace(empty_plan(), decode=bytes(8))).tokens == []


def test_copies_outside_the_pool_are_refused(model: LanguageModel) -> None:
    with pytest.raises(ValueError, match="copies"):
        make_runner(model).execute(replace(empty_plan(), copies=ints(0, NUM_PAGES)))


@needs_compiler
def test_greedy_batches_need_no_logits_and_draw_the_same_tokens(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With native kernels a greedy step asks for tokens only; a random row beside it brings the logits back."""
    native, tp = load_library(cpu_features().levels()[0]), TensorParallel()
    model = load_model(
        checkpoint, dtype=torch.bfloat16, device="cpu", tp=tp, attention=ReferenceAttention(), native=native
    )
    prompts = dict(enumerate(make_prompts(VOCAB_SIZE)[:4]))
    forwards = []
    forward = CpuDecoder.forward
    monkeypatch.setattr(CpuDecoder, "forward", lambda *arguments: forwards.append(1) or forward(*arguments))
    greedy_draws = dict.fromkeys(prompts, GREEDY)
    alone = run(make_runner(model), make_writer(), prompts, greedy_draws, NEW_TOKENS)
    assert not forwards
    random = DrawParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=5)
    mixed = run(make_runner(model), make_writer(), prompts, greedy_draws | {0: random}, NEW_TOKENS)
    assert len(forwards) == NEW_TOKENS
    assert {slot: mixed[slot] for slot in (1, 2, 3)} == {slot: alone[slot] for slot in (1, 2, 3)}
    assert mixed[0] != alone[0]
