"""Triton attention against the reference: on the GPU where there is one, else in Triton's interpreter."""

from typing import Any

import pytest
import torch

from tests.helpers_triton import DEVICE, on_device

pytest.importorskip("triton")

from tests.helpers_paged import Row, copy_of, fill, make_batch, poison, shuffled_batch
from worker_proc.attention.chunks import in_chunks
from worker_proc.attention.reference import ReferenceAttention
from worker_proc.cuda.attention import TritonAttention, _block, num_parts, num_splits, store
from worker_proc.cuda.overlap import MOST_ROWS
from worker_proc.kv_cache import KVCache, KVSpec

ON_HOST = DEVICE.type == "cpu"  # on a GPU, every case is compiled, and bench/gpu/attention.py checks bfloat16 too
HALF = [torch.float16 if ON_HOST else torch.bfloat16]  # the interpreter multiplies no bfloat16
ROWS = [(5, 5), (9, 40), (70, 131), (1, 1), (1, 33), (1, 64), (1, 65), (1, 130)]  # new tokens, all tokens
CASES = [
    # heads, KV heads, K dim, V dim, page size, window, softcap
    (4, 2, 32, 32, 16, None, None),
    (8, 1, 64, 64, 1, None, None),
    (4, 4, 20, 12, 4, None, None),
    (6, 2, 16, 16, 5, 7, None),
    (6, 2, 16, 16, 16, 64, None),
    (2, 2, 24, 24, 3, None, 5.0),
    (4, 2, 16, 16, 16, 33, 2.0),
]
SINKS = [-200.0, 0.0, 30.0, 200.0]  # beside scores of a few units: nothing, one among others, nearly all, all of it


def close(dtype: torch.dtype) -> dict[str, float]:
    return {"atol": 2e-5, "rtol": 2e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}


@pytest.mark.parametrize("heads, kv_heads, k_dim, v_dim, page_size, window, softcap", CASES)
@pytest.mark.parametrize("rows", [ROWS, ROWS[:2], ROWS[3:], [(1, 300)]])
@pytest.mark.parametrize("int8", [False, True], ids=["plain", "int8"])
def test_equals_the_reference(
    heads: int, kv_heads: int, k_dim: int, v_dim: int, page_size: int, window: int | None, softcap: float | None,
    rows: list[tuple[int, int]], int8: bool,
) -> None:  # fmt: skip
    compare(heads, kv_heads, k_dim, v_dim, page_size, window, softcap, rows, int8, torch.float32)


@pytest.mark.parametrize("heads, kv_heads, k_dim, v_dim, page_size, window, softcap", CASES)
@pytest.mark.parametrize("level, int8", [*((level, False) for level in SINKS), (0.0, True), (30.0, True)])
def test_sinks_take_part_in_the_softmax(
    heads: int, kv_heads: int, k_dim: int, v_dim: int, page_size: int, window: int | None, softcap: float | None,
    level: float, int8: bool,
) -> None:  # fmt: skip
    """Chunks beside decodes, one of which is cut into parts."""
    rows = [ROWS[1], ROWS[3], ROWS[7]]
    assert num_splits(2, kv_heads, 130) > 1
    compare(heads, kv_heads, k_dim, v_dim, page_size, window, softcap, rows, int8, torch.float32, level)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("level", SINKS)
def test_sinks_in_half_precision(dtype: torch.dtype, level: float) -> None:
    for int8 in (False, True):
        compare(*CASES[0], [ROWS[1], ROWS[3], ROWS[5]], int8, dtype, level)


def test_attention_within_chunks_of_the_sequence() -> None:
    """Whose rows may be single tokens among chunks."""
    batch, pages = shuffled_batch([(5, 5), (9, 40), (33, 33), (17, 49), (1, 1), (1, 32), (1, 33), (1, 130)], 4)
    spec = KVSpec.uniform(1, 2, 16, 16, torch.float32)
    cache = KVCache(spec, pages, 4)
    fill(cache)
    theirs = copy_of(cache, DEVICE)
    q, k, v = (torch.randn(len(batch.token_ids), n, 16) for n in (4, 2, 2))
    want = ReferenceAttention().forward(0, q, k, v, in_chunks(batch, 16, 4), cache, scale=0.25)
    cut = in_chunks(on_device(batch), 16, 4)
    assert 1 in cut.q_lens[: cut.num_prefill_rows]
    found = TritonAttention().forward(0, q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), cut, theirs, scale=0.25)
    torch.testing.assert_close(found.cpu(), want, **close(torch.float32))


@pytest.mark.parametrize("window", [None, 7])
def test_sinks_far_below_all_scores_change_no_bit_and_far_above_leave_nothing(window: int | None) -> None:
    batch = on_device(make_batch([Row([0] * 9, [0], 2), Row([0] * 12, [1], 11)], [7, 1], 16))
    cache = KVCache(KVSpec.uniform(1, 2, 16, 16, torch.float32), 2, 16, DEVICE)
    fill(cache)
    q, k, v = (torch.randn(8, n, 16, device=DEVICE) for n in (4, 2, 2))

    def attended(level: float | None) -> torch.Tensor:
        sinks = None if level is None else torch.full((4,), level, device=DEVICE)
        return TritonAttention().forward(0, q, k, v, batch, cache, scale=0.25, window=window, sinks=sinks)

    assert torch.equal(attended(-200), attended(None)) and torch.equal(attended(-1e30), attended(None))
    assert float(attended(200).abs().max()) < 1e-30 and torch.equal(attended(1e30), torch.zeros_like(q))


@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[5]] if ON_HOST else CASES[:1])
@pytest.mark.parametrize("int8", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_keys_that_all_queries_of_a_block_see(case: tuple[Any, ...], int8: bool, dtype: torch.dtype) -> None:
    """Chunks behind so many that blocks of keys need no mask, with whole ones and cut ones at the border."""
    compare(*case, [(40, 300), (70, 198), (3, 131), (129, 129)], int8, dtype)


@pytest.mark.parametrize("heads, kv_heads, k_dim, v_dim, page_size, window, softcap", CASES if ON_HOST else CASES[:1])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_an_int8_cache_in_half_precision(
    heads: int, kv_heads: int, k_dim: int, v_dim: int, page_size: int, window: int | None, softcap: float | None,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    rows = [ROWS[1], (3, 3), *ROWS[3:6]]
    compare(heads, kv_heads, k_dim, v_dim, page_size, window, softcap, rows, True, dtype)


def compare(
    heads: int, kv_heads: int, k_dim: int, v_dim: int, page_size: int, window: int | None, softcap: float | None,
    rows: list[tuple[int, int]], int8: bool, dtype: torch.dtype, level: float | None = None,
) -> None:  # fmt: skip
    """Results beside the reference's, and what is then in the cache, to the last bit. `level` is where sinks are."""
    torch.manual_seed(heads * page_size)
    batch, num_pages = shuffled_batch(rows, page_size)
    tokens = len(batch.token_ids)
    heads_of = [(heads, k_dim), (kv_heads, k_dim), (kv_heads, v_dim)]
    q, k, v = (torch.randn(tokens, 2 * n, d).to(dtype)[:, :n] for n, d in heads_of)  # views, as of a fused projection
    here = KVCache(KVSpec.uniform(2, kv_heads, k_dim, v_dim, dtype, int8), num_pages, page_size)
    fill(here)
    there = copy_of(here, DEVICE)
    limits = {"scale": k_dim**-0.5, "window": window, "softcap": softcap}
    sinks = None if level is None else torch.linspace(-3, 3, heads) + level
    want = ReferenceAttention().forward(1, q, k, v, batch, here, **limits, sinks=sinks)
    on = [part.to(DEVICE) for part in (q, k, v)]
    there_sinks = None if sinks is None else sinks.to(DEVICE)
    got = TritonAttention().forward(1, *on, on_device(batch), there, **limits, sinks=there_sinks)
    bounds = close(dtype)
    if level is not None and dtype == torch.float32:
        bounds["atol"] *= min(1.0, float(want.abs().max()))  # what a high sink leaves is small, but right
    torch.testing.assert_close(got.cpu(), want, **bounds)
    for a, b in zip(there.page_tensors, here.page_tensors, strict=True):
        assert torch.equal(a.cpu(), b), "a write went elsewhere"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("magnitude", [0.0, 1e-33, 1.0, 1e6])
def test_codes_are_those_of_the_reference(dtype: torch.dtype, magnitude: float) -> None:
    here = KVCache(KVSpec.uniform(1, 2, 24, 40, dtype, int8=True), 4, 5)
    fill(here)
    there = copy_of(here, DEVICE)
    k, v = (torch.randn(15, 2, dim).mul(magnitude).to(dtype) for dim in (24, 40))
    k[3] = (torch.arange(24) - 12) * 0.5 * magnitude  # ties
    k[3, :, 0] = 127 * magnitude
    slots = torch.randperm(20)[:15]
    store(k.to(DEVICE), v.to(DEVICE), slots.to(DEVICE), there, 0)
    here.write(0, k, v, slots)
    for a, b in zip(there.page_tensors, here.page_tensors, strict=True):
        assert torch.equal(a.cpu(), b)


@pytest.mark.parametrize("int8", [False, True], ids=["plain", "int8"])
def test_a_row_reads_its_own_tokens_only(int8: bool) -> None:
    """Everything in the cache that no row holds is NaN, which would spread."""
    rows = [Row([0] * 20, [4, 1], 13), Row([0] * 9, [3], 8), Row([0] * 17, [0, 5], 16)]
    batch = on_device(make_batch(rows, [7, 1, 1], 16))
    cache = KVCache(KVSpec.uniform(1, 2, 16, 16, torch.float32, int8), 6, 16, DEVICE)
    poison(cache)
    for pages in cache.page_tensors:
        for row in rows:
            for position in range(row.cached):
                pages[row.pages[position // 16], :, position % 16] = 1
    q, k, v = (torch.randn(9, n, 16, device=DEVICE) for n in (4, 2, 2))
    assert TritonAttention().forward(0, q, k, v, batch, cache, scale=0.25).isfinite().all()


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 256, 1000])
@pytest.mark.parametrize("kv_heads", [1, 8])
@pytest.mark.parametrize("longest", [1, 64, 65, 4096, 131072])
def test_splits(rows: int, kv_heads: int, longest: int) -> None:
    parts = num_splits(rows, kv_heads, longest)
    assert 1 <= parts <= 64
    assert parts <= -(-longest // 64), "parts that can never have a token"
    assert parts == 1 or (parts - 1) * rows * kv_heads < 264, "more programs than a GPU runs at once"


@pytest.mark.parametrize("max_rows", [1, 5, 24, 300])
@pytest.mark.parametrize("kv_heads", [1, 3, 8])
@pytest.mark.parametrize("page_size, columns", [(1, 700), (5, 1), (16, 4), (16, 300), (100, 9)])
def test_some_decodes_launch_what_all_of_them_would(max_rows: int, kv_heads: int, page_size: int, columns: int) -> None:
    def kind_of(rows: int, width: int, shared: bool) -> tuple[bool, int, bool]:
        return shared, _block(num_parts(rows, kv_heads, width * page_size, shared)[0]), rows <= MOST_ROWS

    kinds = TritonAttention().decode_kinds(max_rows, kv_heads, page_size, columns)
    found = [kind_of(kind.rows, kind.columns, kind.shared) for kind in kinds]
    assert len(found) == len(set(found)) <= 14
    assert all(kind.rows <= max_rows and kind.columns <= columns for kind in kinds)
    assert set(found) >= {
        kind_of(rows, width, shared)
        for shared in (False, True)
        for rows in range(1 + shared, max_rows + 1)
        for width in {*range(1, columns, max(1, columns // 30)), columns}
    }
