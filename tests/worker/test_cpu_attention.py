"""Native attention against the reference, for every instruction set that this machine has."""

import random
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers_models import VOCAB_SIZE, make_checkpoint
from tests.helpers_paged import NEW_TOKENS, generate, make_prompts, poison
from worker_proc.attention.cpu import CpuAttention
from worker_proc.attention.interface import ForwardBatch
from worker_proc.attention.reference import ReferenceAttention
from worker_proc.cpu.attention import NativeAttention
from worker_proc.cpu.build import BuildError, find_compiler
from worker_proc.cpu.features import Level, cpu_features
from worker_proc.cpu.library import NativeLibrary, load_library
from worker_proc.kv_cache import KVCache, KVSpec
from worker_proc.models.registry import load_model
from worker_proc.parallel import TensorParallel

try:
    find_compiler()
except BuildError as error:
    pytest.skip(str(error), allow_module_level=True)

LEVELS = cpu_features().levels()
BLOCK = 256  # kAttentionBlock of native/attention.h
Lengths = list[tuple[int, int]]  # (tokens of this step, tokens in the cache after it) of each row


@dataclass(frozen=True, slots=True)
class Shape:
    heads: int = 4
    kv_heads: int = 2
    k_dim: int = 64
    v_dim: int = 64
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    softcap: float | None = None
    int8: bool = False
    sinks: float | None = None  # what is added to random ones


@dataclass(frozen=True, slots=True)
class Step:
    """Layer 1 of a step: everything that `AttentionBackend.forward` is given."""

    shape: Shape
    q: Tensor
    k: Tensor
    v: Tensor
    batch: ForwardBatch
    cache: KVCache

    def run(self, backend: CpuAttention | ReferenceAttention) -> Tensor:
        return backend.forward(
            1,
            self.q,
            self.k,
            self.v,
            self.batch,
            self.cache,
            scale=self.shape.k_dim**-0.5,
            window=self.shape.window,
            softcap=self.shape.softcap,
            sinks=self.sinks(),
        )

    def sinks(self) -> Tensor | None:
        level, heads = self.shape.sinks, self.shape.heads
        return None if level is None else torch.linspace(-3, 3, heads) + level

    def alone(self, row: int) -> "Step":
        """The same step with one of its rows only."""
        b = self.batch
        begin = sum(b.q_lens[:row])
        tokens = slice(begin, begin + b.q_lens[row])
        batch = replace(
            b,
            token_ids=b.token_ids[tokens],
            positions=b.positions[tokens],
            slot_mapping=b.slot_mapping[tokens],
            page_table=b.page_table[row : row + 1],
            kv_lens=b.kv_lens[row : row + 1],
            q_lens=[b.q_lens[row]],
            kv_lens_host=[b.kv_lens_host[row]],
            num_prefill_rows=int(row < b.num_prefill_rows),
        )
        return replace(self, q=self.q[tokens], k=self.k[tokens], v=self.v[tokens], batch=batch)

    def chunk(self, begin: int, end: int) -> "Step":
        """Tokens begin .. end - 1 of a step of one whole prompt, as a step of their own."""
        tokens = slice(begin, end)
        batch = replace(
            self.batch,
            positions=self.batch.positions[tokens],
            slot_mapping=self.batch.slot_mapping[tokens],
            kv_lens=torch.tensor([end]),
            q_lens=[end - begin],
            kv_lens_host=[end],
            num_prefill_rows=int(end - begin > 1),
        )
        return replace(self, q=self.q[tokens], k=self.k[tokens], v=self.v[tokens], batch=batch)

    def exact(self) -> "Step":
        """The same numbers in float32, for the reference to tell what is right."""
        return self.plain(torch.float32)

    def plain(self, dtype: torch.dtype) -> "Step":
        """The numbers that the cache holds, dequantized, in another precision."""
        spec = replace(self.cache.spec, dtype=dtype, int8=False)
        cache = KVCache(spec, self.cache.num_pages, self.cache.page_size)
        every = torch.arange((cache.num_pages + 1) * cache.page_size)
        k, v = self.cache.read(1, every)
        cache.write(1, k.to(dtype), v.to(dtype), every)
        k, v = cache.read(1, self.batch.slot_mapping)
        return replace(self, q=self.q.to(dtype), k=k, v=v, cache=cache)


def make_step(shape: Shape, lengths: Lengths, *, shared: int = 0, seed: int = 0, magnitude: float = 1.0) -> Step:
    """Rows over shuffled pages; what is in no row's context is NaN. The first `shared` tokens, rounded down to whole
    pages, have the same pages in all rows that are long enough."""
    torch.manual_seed(seed)
    lengths = sorted(lengths, key=lambda row: row[0] == 1)
    size = shape.page_size
    spec = KVSpec.uniform(2, shape.kv_heads, shape.k_dim, shape.v_dim, shape.dtype, shape.int8)
    counts = [-(-total // size) for _, total in lengths]
    cache = KVCache(spec, sum(counts) + 2, size)
    plain = KVCache(replace(spec, int8=False), cache.num_pages, size)
    poison(cache)
    free = list(range(cache.num_pages))
    random.Random(seed).shuffle(free)
    tables = [[free.pop() for _ in range(count)] for count in counts]
    longest = max(tables, key=len)
    for table, (new, total) in zip(tables, lengths, strict=True):
        common = min(shared, total - new) // size
        table[:common] = longest[:common]
    for table, (_, total) in zip(tables, lengths, strict=True):
        old = torch.tensor([table[p // size] * size + p % size for p in range(total)])
        k, v = torch.randn(total, shape.kv_heads, shape.k_dim), torch.randn(total, shape.kv_heads, shape.v_dim)
        k, v = k.to(shape.dtype), v.to(shape.dtype)
        cache.write(1, k, v, old)
        plain.write(1, k, v, old)
    slots = torch.tensor(
        [
            table[p // size] * size + p % size
            for table, (new, total) in zip(tables, lengths, strict=True)
            for p in range(total - new, total)
        ]
    )
    k, v = plain.read(1, slots)
    batch = ForwardBatch(
        token_ids=torch.zeros(len(slots), dtype=torch.int64),
        positions=torch.cat([torch.arange(total - new, total) for new, total in lengths]),
        slot_mapping=slots,
        page_table=torch.tensor([(table + [0] * len(longest))[: len(longest)] for table in tables]),
        kv_lens=torch.tensor([total for _, total in lengths]),
        q_lens=[new for new, _ in lengths],
        kv_lens_host=[total for _, total in lengths],
        num_prefill_rows=sum(new > 1 for new, _ in lengths),
        logit_rows=torch.zeros(0, dtype=torch.int64),
    )
    q = torch.randn(len(slots), shape.heads, shape.k_dim) * magnitude
    return Step(shape, q.to(shape.dtype), k, v, batch, cache)


def with_two_threads(level: Level) -> NativeLibrary:
    library = load_library(level)
    library.set_threads(2)
    return library


@pytest.fixture(scope="module", params=LEVELS)
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    return with_two_threads(request.param)


def check(library: NativeLibrary, step: Step) -> None:
    """Against the reference in float32: its error is that of the output's precision and of weights in bfloat16."""
    expected = step.exact().run(ReferenceAttention())
    out = step.run(CpuAttention(library))
    assert out.dtype == step.q.dtype
    if step.shape.int8:
        assert torch.equal(out, step.plain(step.shape.dtype).run(CpuAttention(library))), "what the codes stand for"
    if step.shape.dtype == torch.float32:
        torch.testing.assert_close(out, expected, atol=3e-6, rtol=3e-5)
    else:
        torch.testing.assert_close(out.float(), expected, atol=1.2e-2, rtol=1.2e-2)


EDGES = [0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 257, 511, 512, 513]
olds = st.sampled_from(EDGES) | st.integers(0, 700)


@settings(max_examples=100, deadline=None)
@given(
    chunks=st.lists(st.tuples(st.sampled_from([2, 3, 16, 17, 33, 130, 260]), olds), max_size=3),
    decodes=st.lists(olds, max_size=5),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 2), (8, 2), (14, 2), (33, 1)]),
    dims=st.sampled_from([(64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (16, 16), (24, 40), (7, 3)]),
    page_size=st.sampled_from([1, 3, 8, 16, 32, 48, 256]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    int8=st.booleans(),
    window=st.sampled_from([None, None, 1, 31, 100, 256, 300]),
    softcap=st.sampled_from([None, None, 2.0]),
    sinks=st.sampled_from([None, None, 0.0, -200.0, 30.0, 200.0]),
    shared=st.sampled_from([0, 40, 256, 513]),
    seed=st.integers(0, 1000),
)
def test_equals_the_reference(
    library: NativeLibrary,
    chunks: Lengths,
    decodes: list[int],
    heads: tuple[int, int],
    dims: tuple[int, int],
    page_size: int,
    dtype: torch.dtype,
    int8: bool,
    window: int | None,
    softcap: float | None,
    sinks: float | None,
    shared: int,
    seed: int,
) -> None:
    lengths = [(new, old + new) for new, old in chunks] + [(1, old + 1) for old in decodes]
    if lengths:
        shape = Shape(*heads, *dims, page_size, dtype, window, softcap, int8, sinks)
        check(library, make_step(shape, lengths, shared=shared, seed=seed))


def test_windows_of_a_tile_that_begin_on_both_sides_of_a_step(library: NativeLibrary) -> None:
    """Tokens are taken 32 at a time: some windows of a tile begin before such a border, the last one at it."""
    shape = Shape(6, 2, 64, 64, 16, torch.bfloat16, 100)
    for old in range(120, 184):
        check(library, make_step(shape, [(33, old + 33)], seed=old))


@pytest.mark.parametrize("int8", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page_size", [16, 17])
def test_long_contexts(library: NativeLibrary, dtype: torch.dtype, page_size: int, int8: bool) -> None:
    lengths = [(1, total) for total in (4095, 4096, 4097)] + [(5, 4097), (1030, 1030), (600, 4097)]
    check(library, make_step(Shape(page_size=page_size, dtype=dtype, int8=int8), lengths))


@pytest.mark.parametrize("int8", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 40, 300])
def test_a_rows_bits_depend_on_that_row_alone(
    library: NativeLibrary, dtype: torch.dtype, window: int | None, int8: bool
) -> None:
    """Nor on sharing, nor on the number of threads."""
    lengths = [(1, total) for total in (520, 515, 700, 1000, 1, 300, 257)] + [(40, 552), (300, 900), (2, 600)]
    shape = Shape(heads=14, kv_heads=2, k_dim=128, v_dim=128, dtype=dtype, window=window, int8=int8, sinks=2.0)
    step = make_step(shape, lengths, shared=512)
    together = step.run(CpuAttention(library))
    assert torch.equal(together, step.run(CpuAttention(library, share=False)))
    try:
        for threads in (1, 7):
            library.set_threads(threads)
            assert torch.equal(together, step.run(CpuAttention(library)))
    finally:
        library.set_threads(2)
    begins = [0, *accumulate(step.batch.q_lens)]
    for row, (begin, end) in enumerate(pairwise(begins)):
        assert torch.equal(together[begin:end], step.alone(row).run(CpuAttention(library))), f"row {row}"


@pytest.mark.parametrize("int8", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape", [Shape(), Shape(14, 2, 96, 80), Shape(1, 1, page_size=5), Shape(4, 1, window=300, sinks=1.0)]
)
def test_a_tokens_bits_do_not_depend_on_chunks(
    library: NativeLibrary, shape: Shape, dtype: torch.dtype, int8: bool
) -> None:
    """A prompt in one piece, in uneven pieces, and token by token, as after a prefix hit or a preemption."""
    shape = replace(shape, dtype=dtype, int8=int8)
    whole = make_step(shape, [(1100, 1100)])
    expected = whole.run(CpuAttention(library))
    for begin, end in ((0, 1), (0, 300), (300, 303), (255, 256), (256, 257), (303, 700), (700, 701), (701, 1100)):
        assert torch.equal(whole.chunk(begin, end).run(CpuAttention(library)), expected[begin:end]), (begin, end)


@pytest.mark.parametrize("dims", [(32, 32), (64, 96), (128, 128), (128, 40)])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("factor", [1.0, 2.0**-128], ids=["ordinary", "denormal"])
def test_one_query_has_the_bits_of_many(
    library: NativeLibrary, dims: tuple[int, int], group: int, factor: float
) -> None:
    """A decode of few heads is computed in another way than a prompt: with weights of almost 0, and tiny values."""
    shape = Shape(2 * group, 2, *dims)
    whole = make_step(shape, [(600, 600)], magnitude=1.0 if factor == 1.0 else 8.0)
    whole = replace(whole, v=(whole.v.float() * factor).to(whole.v.dtype))
    expected = whole.run(CpuAttention(library))
    for at in (0, 1, 31, 32, 254, 255, 256, 511, *range(33, 600, 27)):
        assert torch.equal(whole.chunk(at, at + 1).run(CpuAttention(library))[0], expected[at]), at


@pytest.mark.parametrize("group", [1, 2, 5])
def test_large_scores_have_the_bits_of_any_chunk(library: NativeLibrary, group: int) -> None:
    """Where the first score that a query sees of a block is far below the highest."""
    whole = make_step(Shape(2 * group, 2, 128, 128), [(700, 700)], magnitude=60.0)
    expected = whole.run(CpuAttention(library))
    for begin, end in ((0, 130), (130, 170), (170, 700), *((at, at + 1) for at in (0, 31, 255, 256, 300, 699))):
        assert torch.equal(whole.chunk(begin, end).run(CpuAttention(library)), expected[begin:end]), (begin, end)


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([20, 255, 256, 257, 300, 520, 770]), min_size=1, max_size=5),
    shared=st.sampled_from([0, 256, 513]),
    skips=st.lists(st.sampled_from([1, 1, 2, 230]), min_size=2, max_size=6),
    int8=st.booleans(),
)
def test_rows_that_go_on(library: NativeLibrary, lengths: list[int], shared: int, skips: list[int], int8: bool) -> None:
    """Steps of the same rows, which differ in lengths alone, have the bits of steps that nothing came before."""
    last = make_step(Shape(int8=int8), [(1, length + sum(skips)) for length in lengths], shared=shared)
    going_on = CpuAttention(library)
    for ahead in accumulate(skips):
        positions = torch.tensor(lengths) + ahead - 1
        pages = last.batch.page_table.gather(1, positions[:, None] // 16)[:, 0]
        slots = pages * 16 + positions % 16
        batch = replace(
            last.batch,
            positions=positions,
            slot_mapping=slots,
            kv_lens=positions + 1,
            kv_lens_host=(positions + 1).tolist(),
        )
        k, v = (x.to(torch.bfloat16) for x in last.cache.read(1, slots))
        step = replace(last, batch=batch, k=k, v=v)
        assert torch.equal(step.run(going_on), step.run(CpuAttention(library)))


def test_many_rows_share(library: NativeLibrary) -> None:
    """More queries than a tile, and groups within groups."""
    step = make_step(Shape(heads=8, kv_heads=1, k_dim=128, v_dim=128), [(1, 700 + i) for i in range(24)], shared=512)
    step.batch.page_table[:6, 16:] = step.batch.page_table[6:12, 16:]  # these share the first block only
    check(library, step)
    assert torch.equal(step.run(CpuAttention(library)), step.run(CpuAttention(library, share=False)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_scores(library: NativeLibrary, dtype: torch.dtype) -> None:
    """Weights of almost 0 and 1, where a running maximum rescales by tiny factors."""
    step = make_step(Shape(dtype=dtype), [(1, 900), (70, 600)], magnitude=60.0)
    expected, out = step.exact().run(ReferenceAttention()), step.run(CpuAttention(library))
    torch.testing.assert_close(out.float(), expected, atol=2e-2 if dtype == torch.bfloat16 else 1e-4, rtol=2e-2)


def test_q_k_v_may_be_parts_of_one_tensor(library: NativeLibrary) -> None:
    step = make_step(Shape(), [(5, 20), (1, 30)])
    joined = torch.cat((step.q, step.k, step.v), dim=1)
    parts = replace(step, q=joined[:, :4], k=joined[:, 4:6], v=joined[:, 6:])
    turned = replace(step, q=step.q.transpose(0, 1).contiguous().transpose(0, 1))
    expected = step.run(CpuAttention(library))
    for other in (parts, turned):
        other.cache.k[1].copy_(step.cache.k[1])
        assert torch.equal(other.run(CpuAttention(library)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("int8", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize("magnitude", [0.0, 1e-33, 1.0, 1e6])
def test_writes_what_the_cache_would(library: NativeLibrary, dtype: torch.dtype, int8: bool, magnitude: float) -> None:
    step = make_step(Shape(page_size=5, k_dim=24, v_dim=40, dtype=dtype, int8=int8), [(70, 90), (1, 30)])
    k, v = (torch.randn(x.shape).mul(magnitude).to(dtype) for x in (step.k, step.v))
    k[3] = (torch.arange(24) - 12) * 0.5 * magnitude  # ties
    k[3, :, 0] = 127 * magnitude
    NativeAttention(library).step(step.batch, step.cache, 4).write(0, k, v)
    found = step.cache.read(0, step.batch.slot_mapping)
    step.cache.write(1, k, v, step.batch.slot_mapping)
    expected = step.cache.read(1, step.batch.slot_mapping)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    if not int8:
        assert torch.equal(found[0], k) and torch.equal(found[1], v)


# grouped heads; a sliding window; biases and no rotary; through transformers, with soft caps and alternating windows
@pytest.mark.parametrize("kind", ["llama-gqa-untied", "mistral-sliding", "gpt2", "vaultgemma"])
def test_models_generate_the_reference_tokens(library: NativeLibrary, kind: str, tmp_path: Path) -> None:
    path, prompts = make_checkpoint(kind, tmp_path), make_prompts(VOCAB_SIZE)
    models = [
        load_model(path, dtype=torch.float32, device="cpu", tp=TensorParallel(), attention=attention)
        for attention in (ReferenceAttention(), CpuAttention(library))
    ]
    want, got = (generate(model, prompts, NEW_TOKENS, page_size=16, chunk=40) for model in models)
    assert got == want
    assert generate(models[1], prompts, NEW_TOKENS, page_size=5) == want


def test_a_step_keeps_what_it_computes_in(library: NativeLibrary) -> None:
    step = make_step(Shape(), [(1, 600), (1, 30)])
    started = NativeAttention(library).step(step.batch, step.cache, step.shape.heads)  # which nobody else holds
    needed = library.functions.rhizome_attention_workspace(started.struct)
    begin = started.struct.workspace - started.workspace.data_ptr()
    assert needed > 0 and 0 <= begin <= started.workspace.numel() - needed


def test_refuses_what_it_cannot_compute(library: NativeLibrary) -> None:
    step = make_step(Shape(), [(1, 3)])
    native = NativeAttention(library)
    with pytest.raises(ValueError, match="5 query heads"):
        native.step(step.batch, step.cache, 5)
    half = KVCache(replace(step.cache.spec, dtype=torch.float16), 4, 16)
    with pytest.raises(ValueError, match="float16"):
        native.step(step.batch, half, 4)
    with pytest.raises(ValueError, match=r"float32 given, but the cache holds torch.bfloat16"):
        native.step(step.batch, step.cache, 4).attend(1, step.q.float(), scale=1.0)
    for wrong in ({"scale": 0.0}, {"scale": 1.0, "softcap": -1.0}):
        with pytest.raises(ValueError, match="positive"):
            native.step(step.batch, step.cache, 4).attend(1, step.q, **wrong)
