"""What a step sends to the GPU and where it waits for it: one copy there, one back, and no wait. On a GPU on paper
(tests/helpers_simulated_gpu.py), with the kernels in Triton's interpreter."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers_triton import DEVICE

pytest.importorskip("triton")

from common.messages import History, ints
from common.sampling_params import DrawParams, LogitEdits
from tests.helpers_models import make_checkpoint
from tests.helpers_plans import GREEDY, PlanWriter
from tests.helpers_simulated_gpu import GPU, SimulatedGpu, on_gpu, on_host
from tests.worker.test_cuda_decoder import load
from worker_proc import host_tier
from worker_proc.attention.interface import ForwardBatch, LayerLoads, SharedPages
from worker_proc.cuda.decoder import CudaDecoder
from worker_proc.cuda.page_transfer import CudaTransfer
from worker_proc.cuda.sampling import draw_rows
from worker_proc.host_tier import HostPages
from worker_proc.kv_cache import KVCache
from worker_proc.model_runner import ModelRunner
from worker_proc.parallel import TensorParallel

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="the profile of bench/gpu/worker.py shows the real thing")

PAGES, PAGE = 24, 4
PENALTIES = LogitEdits({5: 2.0}, 20, ints(2), 1.2, 0.3, 0.2)
EXCLUSIONS = LogitEdits(allowed=ints(5, 6, 9), bad_words=(ints(9), ints(5, 6), ints(6, 5, 5)))
KINDS = {
    "greedy": [GREEDY] * 3,
    "drawn": [DrawParams(0.8, seed=1), DrawParams(1.0, 5, 0.9, 0.01, seed=2), GREEDY],
    "edited": [DrawParams(0.0, edits=PENALTIES), GREEDY, DrawParams(0.8, top_p=0.9, seed=4, edits=PENALTIES)],
    "excluded": [DrawParams(0.0, edits=EXCLUSIONS), GREEDY, DrawParams(0.8, seed=4, edits=EXCLUSIONS)],
}


class Awake:
    """Loads that the simulated GPU takes note of, although a kernel asks for them."""

    def __init__(self, loads: LayerLoads, gpu: SimulatedGpu) -> None:
        self.loads, self.gpu = loads, gpu

    def before(self, layer: int) -> None:
        self.gpu.events.append(f"layer {layer}")
        self.gpu._off = False
        self.loads.before(layer)
        self.gpu._off = True


class OnPaper:
    """A decoder whose batches are on the simulated GPU."""

    def __init__(self, model: CudaDecoder, gpu: SimulatedGpu, cache: KVCache) -> None:
        self.kv_spec, self.vocab_size = model.kv_spec, model.vocab_size
        self._cache, self._model, self._gpu = cache, model, gpu

    def _batch(self, batch: ForwardBatch) -> ForwardBatch:
        assert not batch.num_prefill_rows or batch.chunk_starts is not None, "attention would have to send them"
        values = {f.name: on_host(getattr(batch, f.name)) for f in fields(batch)}
        if batch.shared is not None:
            shared = batch.shared
            values["shared"] = SharedPages(*on_host((shared.skipped, shared.levels, shared.tiles)))
        if batch.loads is not None:
            values["loads"] = Awake(batch.loads, self._gpu)
        return ForwardBatch(**values)

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        result: Tensor = self._gpu.kernel(lambda: self._model.forward(self._batch(batch), self._cache))()
        return result

    def greedy(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        result: Tensor = self._gpu.kernel(lambda: self._model.greedy(self._batch(batch), self._cache))()
        return result


class Event:
    """In the place of torch.cuda.Event: whatever was told is done."""

    def record(self, stream: Any) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CudaDecoder:
    return load(Path(make_checkpoint("llama", tmp_path_factory.mktemp("model"))))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedGpu]:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    with SimulatedGpu() as simulated:
        yield simulated


def make_runner(
    model: CudaDecoder,
    gpu: SimulatedGpu | None,
    *,
    share_pages: bool = False,
    host_pages: int = 0,
    int8: bool = False,
) -> ModelRunner:
    device = GPU if gpu is not None else torch.device("cpu")
    spec = replace(model.kv_spec, int8=int8)
    cache = KVCache(spec, PAGES, PAGE)
    used: Any = model
    drawing = None
    if gpu is not None:
        plain, cache = cache, KVCache(spec, PAGES, PAGE)
        cache.k, cache.v = [on_gpu(pages) for pages in plain.k], [on_gpu(pages) for pages in plain.v]
        cache.k_scales = [on_gpu(scales) for scales in plain.k_scales]
        cache.v_scales = [on_gpu(scales) for scales in plain.v_scales]
        used, drawing = OnPaper(model, gpu, plain), gpu.kernel(draw_rows)
    host = HostPages(cache, host_pages) if host_pages else None
    with pytest.MonkeyPatch.context() as patch:
        if gpu is not None and host is not None:
            gpu._pinned.add(host.bytes.untyped_storage().data_ptr())
            patch.setattr(host_tier, "make_transfer", lambda *args: CudaTransfer(*args, GPU, Streams()))
        runner = _runner(used, cache, device, drawing, share_pages, host)
    return runner


class Streams:
    """Of a GPU on paper, which does everything at once. Their order is for tests/worker/test_host_pages.py."""

    def current(self) -> None: ...

    def new(self) -> None: ...

    def record(self, stream: Any) -> None: ...

    def wait(self, stream: Any, event: Any) -> None: ...

    def using(self, stream: Any) -> Any:
        return nullcontext()


def _runner(
    used: Any, cache: KVCache, device: torch.device, drawing: Any, share_pages: bool, host: HostPages | None
) -> ModelRunner:
    return ModelRunner(
        used,
        cache,
        max_slots=5,
        context_len=64,
        group="0",
        tp=TensorParallel(),
        device=device,
        draw_rows=drawing,
        share_pages=share_pages,
        host=host,
        loads_by_layer=host is not None,
    )


def steps(draws: list[DrawParams]) -> Iterator[Any]:
    """Two prompts; a third one beside their decodes; a copied page; decodes."""
    writer = PlanWriter(PAGES, PAGE)
    prompts = [[7, 8, 9, 10, 11], [3, 4], [20, 21, 22, 23, 24, 25]]

    def enter(plan: Any, slots: tuple[int, ...]) -> Any:
        wanted = [slot for slot in slots if draws[slot].needs_history]
        return replace(plan, histories=tuple(History(s, len(prompts[s]), ints(*prompts[s])) for s in wanted))

    yield enter(
        writer.plan(enter={0: draws[0], 1: draws[1]}, chunks=((0, prompts[0], True), (1, prompts[1], True))), (0, 1)
    )
    yield enter(writer.plan(enter={2: draws[2]}, chunks=((2, prompts[2], True),), decode=(0, 1)), (2,))
    page = writer.slots[0].pages[0]
    yield writer.plan(copies=(page, writer.free[0]), decode=(0, 1, 2))
    for _ in range(4):
        yield writer.plan(decode=(0, 1, 2))


@pytest.mark.parametrize("kind", [*KINDS, "int8"])
def test_a_step_is_one_copy_there_and_one_back(kind: str, model: CudaDecoder, gpu: SimulatedGpu) -> None:
    """And its tokens are those of the worker on the CPU, which sorts. With an int8 cache, copied pages bring scales."""
    int8, draws = kind == "int8", KINDS.get(kind, KINDS["greedy"])
    there = make_runner(model, gpu, int8=int8)
    outputs = []
    for plan in steps(draws):
        gpu.events.clear()
        outputs.append(there.execute(plan).tokens)
        assert gpu.events == ["upload", "download"], f"step {plan.step_id}"
    gpu.__exit__(None, None, None)
    try:
        here = make_runner(model, None, int8=int8)
        assert [here.execute(plan).tokens for plan in steps(draws)] == outputs
    finally:
        gpu.__enter__()
    assert len({token for output in outputs for token in output}) > 3, "a degenerate model proves nothing"


def sharing_steps() -> Iterator[Any]:
    """A prompt of nine tokens; two more requests that begin with its first two pages; decodes."""
    writer = PlanWriter(PAGES, PAGE)
    prompt = [7, 8, 9, 10, 11, 12, 13, 14, 15]
    yield writer.plan(enter={0: GREEDY}, chunks=((0, prompt, True),))
    prefix = (2 * PAGE, writer.slots[0].pages[:2])
    draws = {1: GREEDY, 2: DrawParams(0.9, seed=5)}
    yield writer.plan(enter=draws, prefix=dict.fromkeys(draws, prefix), chunks=((1, [20], True), (2, [21, 22], True)))
    for _ in range(4):
        yield writer.plan(decode=(0, 1, 2))


def test_shared_pages_come_with_the_same_copy(
    model: CudaDecoder, gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And tokens are those of a worker that reads every row by itself."""
    seen: list[list[int]] = []
    kept = OnPaper._batch

    def noting(self: OnPaper, batch: ForwardBatch) -> ForwardBatch:
        made = kept(self, batch)
        seen.append([] if made.shared is None else made.shared.skipped.tolist())
        return made

    monkeypatch.setattr(OnPaper, "_batch", noting)
    there = make_runner(model, gpu, share_pages=True)
    outputs = []
    for plan in sharing_steps():
        gpu.events.clear()
        outputs.append(there.execute(plan).tokens)
        assert gpu.events == ["upload", "download"], f"step {plan.step_id}"
    assert seen == [[], [], *[[2 * PAGE] * 3] * 4]
    gpu.__exit__(None, None, None)
    try:
        here = make_runner(model, None)
        assert [here.execute(plan).tokens for plan in sharing_steps()] == outputs
    finally:
        gpu.__enter__()


def host_steps() -> Iterator[Any]:
    """A prompt of nine tokens whose first two pages go to the host, and come back for another request."""
    writer = PlanWriter(PAGES, PAGE)
    prompt = [7, 8, 9, 10, 11, 12, 13, 14, 15]
    yield writer.plan(enter={0: GREEDY}, chunks=((0, prompt, True),))
    gone = writer.slots[0].pages[:2]
    yield writer.plan(leave=(0,), copies=(gone[0], PAGES, gone[1], PAGES + 1))
    back = [writer.free.pop(0), writer.free.pop(0)]
    copies = (PAGES, back[0], PAGES + 1, back[1])
    kept = (2 * PAGE - 1, back)  # a page of which the last token is the request's own
    yield writer.plan(enter={1: GREEDY}, prefix={1: kept}, copies=copies, chunks=((1, [14, 15, 16], True),))
    for _ in range(3):
        yield writer.plan(decode=(1,))


def test_pages_from_the_host_come_layer_by_layer(model: CudaDecoder, gpu: SimulatedGpu) -> None:
    """Without a wait, as many copies as pages and groups of layers, each before the layer that needs it; and the tokens
    are those of a worker whose host memory is its own."""
    there = make_runner(model, gpu, host_pages=2)
    outputs, events = [], []
    for plan in host_steps():
        gpu.events.clear()
        outputs.append(there.execute(plan).tokens)
        events.append(list(gpu.events))
    layers = model.kv_spec.num_layers
    ahead, later = ["upload"] * 4, [["upload"] * 2 if layer + 2 < layers else [] for layer in range(layers)]
    assert events[1] == ["upload", "download", "download"]
    wanted = [part for layer in range(layers) for part in (f"layer {layer}", *later[layer])]
    assert events[2] == ["upload", *ahead, *wanted, "download"]
    assert all(step == ["upload", "download"] for step in (events[0], *events[3:]))
    gpu.__exit__(None, None, None)
    try:
        here = make_runner(model, None, host_pages=2)
        assert [here.execute(plan).tokens for plan in host_steps()] == outputs
    finally:
        gpu.__enter__()
    assert len({token for output in outputs for token in output}) > 3, "a degenerate model proves nothing"


def test_what_would_wait_is_noticed(gpu: SimulatedGpu) -> None:
    there = torch.zeros(4, dtype=torch.int64, device="cuda")
    waits = [
        lambda: torch.tensor([1, 2], device="cuda"),
        lambda: torch.ones(3).to("cuda"),
        lambda: torch.ones(3).to("cuda", non_blocking=True),  # not pinned
        lambda: there.tolist(),
        lambda: int(there[0]),
        lambda: there.cpu(),
        lambda: there[there > 0],
        lambda: there[[0, 1]],
        lambda: there.nonzero(),
        lambda: torch.repeat_interleave(there, there),
        lambda: bool((there > 1).any()),
    ]
    for number, wait in enumerate(waits):
        gpu.events.clear()
        wait()
        assert len(gpu.events) == 1 and gpu.events[0].startswith("wait"), number
    with pytest.raises(RuntimeError, match="beside one of the GPU"):
        there + torch.ones(4)
    gpu.events.clear()
    there.index_copy_(0, torch.ones(2).pin_memory().to("cuda", non_blocking=True).to(torch.int64), there[:2] + 1)
    assert gpu.events == ["upload"]
