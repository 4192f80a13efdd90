"""Decodes of models without a GPU's own decoder, replayed as graphs (here by computing them again)."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.config import SchedulerConfig
from common.sampling_params import DrawParams
from scheduler_proc.kv_manager import KVManager
from scheduler_proc.scheduler import Scheduler
from tests.helpers_hybrid import HYBRIDS, make_hybrid
from tests.helpers_models import VOCAB_SIZE, greedy, make_checkpoint
from tests.helpers_paged import make_prompts, poison
from tests.helpers_serving import Request, serve
from tests.helpers_triton import DEVICE
from tests.worker.test_cuda_decoder import run_again
from worker_proc.attention.interface import ForwardBatch
from worker_proc.cuda.attention import TritonAttention
from worker_proc.cuda.graphed_model import GraphedModel, never_waits, shared_bytes
from worker_proc.cuda.startup import with_graphs
from worker_proc.kv_cache import KVCache
from worker_proc.model_runner import ModelRunner
from worker_proc.models.interface import LanguageModel
from worker_proc.models.registry import load_model
from worker_proc.parallel import TensorParallel

SLOTS, ROWS, CONTEXT, COUNT, PAGE_SIZE, PAGES = 4, 3, 96, 12, 4, 60
_, SHORT, SYSTEM, OTHER, _ = make_prompts(VOCAB_SIZE)
WAVES = [[SYSTEM + SHORT, OTHER, SYSTEM], [SYSTEM + SHORT * 2, SHORT, OTHER + SHORT, SYSTEM + OTHER], [SYSTEM + OTHER]]


def load(kind: str, path: Path) -> LanguageModel:
    (make_hybrid if kind in HYBRIDS else make_checkpoint)(kind, path)
    return load_model(
        path, dtype=torch.float32, device=DEVICE, tp=TensorParallel(), attention=TritonAttention()
    )  # fmt: skip


class Replays:
    """Counts the steps that `model` replays, and the states that are saved after them."""

    def __init__(self, model: GraphedModel, monkeypatch: pytest.MonkeyPatch):
        self.steps = self.others = self.saves = 0
        self._replay: Callable[..., tuple[Tensor, Tensor] | None] = model._decodes.replay
        monkeypatch.setattr(model._decodes, "replay", self._count)

    def _count(self, batch: ForwardBatch, cache: KVCache) -> tuple[Tensor, Tensor] | None:
        found = self._replay(batch, cache)
        self.steps += found is not None
        self.others += found is None
        self.saves += len(batch.states.saves) if found is not None and batch.states is not None else 0
        return found


@pytest.mark.parametrize("kind", ["gpt2", "gemma2", "olmo", "qwen3_5_text", "lfm2", "mamba2", "falcon_h1"])
def test_tokens_are_those_of_each_request_alone(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes of one to three rows beside steps that are not replayed, with states that are saved and loaded, drawn
    tokens and greedy ones."""
    model, recurrent = load(kind, tmp_path), kind in HYBRIDS
    slots, snapshots = (SLOTS, 20) if recurrent else (0, 0)
    cache = KVCache(model.kv_spec, PAGES, PAGE_SIZE, DEVICE, slots=slots, snapshots=snapshots)
    poison(cache)
    graphed = GraphedModel(model, ROWS, CONTEXT, None if DEVICE.type == "cuda" else run_again)
    shown: list[tuple[int, int]] = []
    graphed.capture(cache, lambda done, total: shown.append((done, total)))
    assert shown == [(0, 3), (1, 3), (2, 3), (3, 3)], "graphs of one, two and three rows"
    replays = Replays(graphed, monkeypatch)
    runner = ModelRunner(
        graphed, cache, max_slots=SLOTS, context_len=CONTEXT, group="0", tp=TensorParallel(), device=DEVICE
    )  # fmt: skip
    config = SchedulerConfig(max_running=SLOTS, max_batch_tokens=64, chunk_tokens=9, in_batch_gain=4)
    manager = KVManager(PAGES, PAGE_SIZE, recurrent=recurrent, snapshots=snapshots)
    scheduler = Scheduler(config, manager, CONTEXT)
    for wave in WAVES:
        # drawn from a single token: not greedy for the runner, and the same in effect
        requests = [
            Request(prompt, DrawParams(0.5, top_k=1) if i % 2 else DrawParams(0.0), COUNT)
            for i, prompt in enumerate(wave)
        ]
        stats = serve(scheduler, runner, requests)
        assert [request.tokens for request in requests] == greedy(tmp_path, wave, COUNT)
    assert replays.steps > 20 and replays.others > 3 and stats["cached_tokens"] > 0
    assert (replays.saves > 0) == recurrent


@pytest.mark.skipif(DEVICE.type != "cuda", reason="asks a GPU")
@pytest.mark.parametrize(("kind", "free"), [("gpt2", True), ("olmo", True), ("lfm2", True), ("mixtral", False)])
def test_what_waits_for_the_gpu_is_found(kind: str, free: bool, tmp_path: Path) -> None:
    model = load(kind, tmp_path)
    cache = KVCache(model.kv_spec, 8, PAGE_SIZE, DEVICE, slots=1)
    assert never_waits(model, cache) == free
    assert torch.cuda.get_sync_debug_mode() == 0


@pytest.mark.skipif(DEVICE.type != "cuda", reason="captures with a GPU")
def test_a_model_that_cannot_be_captured_goes_on_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As if nobody had seen that this one waits."""
    monkeypatch.setattr("worker_proc.cuda.startup.never_waits", lambda *_: True)
    model = load("mixtral", tmp_path)
    cache = KVCache(model.kv_spec, PAGES, PAGE_SIZE, DEVICE)
    assert with_graphs(model, model.attention, cache, 4, 64, CONTEXT, TensorParallel(), None) is model  # type: ignore
    assert "launched kernel by kernel" in caplog.text
    runner = ModelRunner(
        model, cache, max_slots=SLOTS, context_len=CONTEXT, group="0", tp=TensorParallel(), device=DEVICE
    )  # fmt: skip
    scheduler = Scheduler(SchedulerConfig(max_running=SLOTS), KVManager(PAGES, PAGE_SIZE), CONTEXT)
    requests = [Request(prompt, DrawParams(0.0), COUNT) for prompt in WAVES[0]]
    serve(scheduler, runner, requests)
    assert [request.tokens for request in requests] == greedy(tmp_path, WAVES[0], COUNT)


def test_graphs_keep_as_much_as_is_reserved(tmp_path: Path) -> None:
    model = load("gpt2", tmp_path)
    cache = KVCache(model.kv_spec, 8, PAGE_SIZE, DEVICE)
    graphed = GraphedModel(model, 9, 32, None if DEVICE.type == "cuda" else run_again)
    graphed.capture(cache)
    logits = {outputs[0].untyped_storage().data_ptr(): outputs[0] for _, _, outputs in graphed._decodes.graphs.values()}
    kept = sum(tensor.untyped_storage().nbytes() for tensor in logits.values())
    assert kept + graphed._decodes.inputs.page_table.nbytes == shared_bytes(9, model.vocab_size, 8)
