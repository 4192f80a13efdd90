"""Models with recurrent layers, against transformers' own generate."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from common.messages import StepPlan, ints
from tests.helpers_hybrid import HYBRIDS, WITHOUT_ATTENTION, make_hybrid
from tests.helpers_models import VOCAB_SIZE, greedy, make_checkpoint
from tests.helpers_paged import NEW_TOKENS, generate, make_prompts, poison
from tests.helpers_plans import GREEDY, PlanWriter
from worker_proc.attention.cpu import CpuAttention
from worker_proc.attention.reference import ReferenceAttention
from worker_proc.cpu.features import cpu_features
from worker_proc.cpu.library import load_library
from worker_proc.cpu.memory import make_tensors
from worker_proc.errors import PlanError
from worker_proc.kv_cache import KVCache
from worker_proc.model_runner import ModelRunner
from worker_proc.models.describe import describe
from worker_proc.models.hybrid_families import HYBRID_FAMILIES
from worker_proc.models.interface import LanguageModel
from worker_proc.models.registry import load_model
from worker_proc.models.transformers_backend import TransformersModel
from worker_proc.parallel import TensorParallel

PROMPTS = make_prompts(VOCAB_SIZE)


def load(path: Path, **settings: Any) -> LanguageModel:
    given: dict[str, Any] = {"dtype": torch.float32, "tp": TensorParallel(), "attention": ReferenceAttention()}
    return load_model(path, device="cpu", **given | settings)


@pytest.mark.parametrize("kind", sorted(HYBRIDS))
def test_greedy_tokens_equal_transformers(kind: str, tmp_path: Path) -> None:
    path = make_hybrid(kind, tmp_path)
    assert describe(path).context_length == (2**18 if kind in WITHOUT_ATTENTION else 256)
    model, want = load(path), greedy(path, PROMPTS, NEW_TOKENS)
    assert len({token for output in want for token in output}) > 20, "a degenerate model proves nothing"
    assert model.kv_spec.bytes_per_state
    assert generate(model, PROMPTS, NEW_TOKENS, page_size=16) == want
    assert generate(model, PROMPTS, NEW_TOKENS, page_size=1, chunk=9) == want
    assert generate(model, PROMPTS, NEW_TOKENS, page_size=16, chunk=1) == want


def test_models_are_tried_on_states_that_begin_with_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of a GPU holds anything."""

    def make_and_fill(*args: Any) -> list[torch.Tensor]:
        return [states.fill_(float("nan")) for states in make_tensors(*args)]

    monkeypatch.setattr("worker_proc.recurrent.make_tensors", make_and_fill)
    load(make_hybrid("lfm2", tmp_path))


SLOTS, SNAPSHOTS = 6, 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hybrid("qwen3_5_text", tmp_path_factory.mktemp("model"))


@pytest.fixture
def runner(checkpoint: Path) -> ModelRunner:
    model = load(checkpoint)
    cache = KVCache(model.kv_spec, 100, 8, slots=SLOTS, snapshots=SNAPSHOTS)
    poison(cache)
    runner = ModelRunner(
        model, cache, max_slots=SLOTS, context_len=256, group="0", tp=TensorParallel(), device="cpu"
    )  # fmt: skip
    runner.warm_up()
    return runner


def decode(runner: ModelRunner, writer: PlanWriter, slots: tuple[int, ...], steps: int) -> dict[int, list[int]]:
    outputs: dict[int, list[int]] = {slot: [] for slot in slots}
    for _ in range(steps):
        for slot, token in zip(slots, runner.execute(writer.plan(decode=slots)).tokens, strict=True):
            outputs[slot].append(token)
    return outputs


def test_a_request_starts_from_a_snapshot_of_another_one(checkpoint: Path, runner: ModelRunner) -> None:
    """Snapshots are taken inside a chunk and at its end, and in plans that other chunks are in."""
    writer, common = PlanWriter(100, 8), PROMPTS[4][:48]
    first, second, other = common + PROMPTS[2], common + PROMPTS[3], PROMPTS[1]
    plan = writer.plan(enter={4: GREEDY, 1: GREEDY}, chunks=((1, other, True), (4, common[:30], False)))
    runner.execute(replace(plan, state_saves=ints(4, 24, 2)))
    plan = writer.plan(chunks=((4, first[30:], True),), decode=(1,))
    saves = ints(4, 48, 0, 4, 40, 1)
    found = {4: runner.execute(replace(plan, state_saves=saves)).tokens[:1]}
    pages = writer.slots[4].pages
    for slot, length, snapshot in ((0, 48, 0), (5, 24, 2), (2, 40, 1)):
        plan = writer.plan(
            enter={slot: GREEDY},
            prefix={slot: (length, pages[: length // 8])},
            chunks=((slot, second[length:], True),),
            decode=(4,),
        )
        tokens = runner.execute(replace(plan, state_loads=ints(slot, snapshot))).tokens
        found[slot] = tokens[:1]
        found[4] += tokens[1:]
    for slot, tokens in decode(runner, writer, (0, 2, 4, 5), 9).items():
        found[slot] += tokens
    wanted = greedy(checkpoint, [first, second], 13)
    assert found == {4: wanted[0], 0: wanted[1][:10], 2: wanted[1][:10], 5: wanted[1][:10]}


def test_slots_begin_anew(checkpoint: Path, runner: ModelRunner) -> None:
    writer, want = PlanWriter(100, 8), greedy(checkpoint, PROMPTS, 6)
    for slot in (3, 3, 0, 3):
        for prompt, tokens in zip(PROMPTS, want, strict=True):
            found = runner.execute(writer.plan(enter={slot: GREEDY}, chunks=((slot, prompt, True),))).tokens
            assert found + decode(runner, writer, (slot,), 5)[slot] == tokens
            runner.execute(writer.plan(leave=(slot,)))


def test_plans_that_contradict_are_refused(checkpoint: Path, runner: ModelRunner) -> None:
    def refused(plan: StepPlan, text: str) -> None:
        with pytest.raises(PlanError, match=text):
            runner.execute(plan)

    begun = PlanWriter(100, 8, epoch=1).plan(enter={1: GREEDY}, chunks=((1, PROMPTS[3], True),))
    later = PlanWriter(100, 8, epoch=2).plan(
        enter={1: GREEDY}, prefix={1: (8, [3])}, chunks=((1, PROMPTS[3][8:], True),)
    )
    refused(replace(begun, state_loads=ints(1, 0)), "one for slot 1, which enters with 0 tokens")
    refused(replace(later, state_loads=ints()), "none for slot 1, which enters with 8 tokens")
    third, fourth = replace(later, epoch=3), replace(later, epoch=4)
    refused(replace(third, state_loads=ints(1, 0, 2, 0)), "only for slots that are entered")
    refused(replace(fourth, state_loads=ints(1, SNAPSHOTS)), "not below 3")
    for epoch, saves in enumerate(((1, 34, 0), (1, 0, 0), (2, 8, 0)), 5):
        refused(replace(begun, epoch=epoch, state_saves=ints(*saves)), "does not compute token")
    refused(replace(begun, epoch=9, state_saves=ints(1, 8, 0, 1, 16, 0)), "named twice")


def test_a_trial_without_room_for_slots_is_computed(checkpoint: Path) -> None:
    """As a GPU's largest steps are, before there is a cache: cached tokens come from nowhere, states go nowhere."""
    model = load(checkpoint)
    runner = ModelRunner(
        model, KVCache(model.kv_spec, 9, 8), max_slots=3, context_len=64, group="0", tp=TensorParallel(), device="cpu"
    )  # fmt: skip
    writer = PlanWriter(9, 8)
    chunks = ((0, PROMPTS[1], True), (2, PROMPTS[1], True))
    plan = writer.plan(enter={0: GREEDY, 2: GREEDY}, prefix={2: (8, [3])}, chunks=chunks)
    assert len(runner.execute(plan).tokens) == 2
    assert len(runner.execute(writer.plan(decode=(0, 2))).tokens) == 2


def test_models_without_recurrent_layers_have_no_states(tmp_path: Path) -> None:
    model = load(make_checkpoint("llama", tmp_path))
    runner = ModelRunner(
        model, KVCache(model.kv_spec, 9, 8), max_slots=2, context_len=64, group="0", tp=TensorParallel(), device="cpu"
    )  # fmt: skip
    plan = PlanWriter(9, 8).plan(enter={1: GREEDY}, chunks=((1, PROMPTS[1], True),))
    with pytest.raises(PlanError, match="no recurrent layers"):
        runner.execute(replace(plan, state_saves=ints(1, 1, 0)))


@pytest.mark.parametrize("kind", sorted(set(HYBRIDS) - set(HYBRID_FAMILIES)))
def test_native_products_in_bfloat16(kind: str, tmp_path: Path) -> None:
    """Packed layers take the place of torch's; logits are those of the model in float32 but for rounding."""
    library = load_library(cpu_features().levels()[0])
    path = make_hybrid(kind, tmp_path)
    exact, rounded = load(path), load(path, dtype=torch.bfloat16, attention=CpuAttention(library), native=library)
    assert isinstance(exact, TransformersModel) and isinstance(rounded, TransformersModel)
    assert not any(isinstance(module, nn.Linear) for module in rounded.model.base_model.layers.modules())
    tokens = torch.tensor(PROMPTS[4])
    want, got = exact.forward_plain(tokens), rounded.forward_plain(tokens)
    assert ((got - want).norm(dim=-1) / want.norm(dim=-1)).median() < 0.1
    assert all(len(output) == 8 for output in generate(rounded, PROMPTS, 8, page_size=16, chunk=9))
