"""The reference attention against attention written one query token at a time."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers_paged import sent
from worker_proc.attention.interface import ForwardBatch
from worker_proc.attention.reference import ReferenceAttention
from worker_proc.kv_cache import KVCache, KVSpec
from worker_proc.staging import Staging


def naive(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None) -> Tensor:
    """`q` `[N, Hq, D]` are the last N of the positions of `k`, `v` `[L, Hkv, D]`; float64, token by token."""
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for i in range(q.shape[0]):
        position = k.shape[0] - q.shape[0] + i
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(q.shape[1]):
            keys = k[first : position + 1, head // group].double()
            scores = keys @ q[i, head].double() * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            out[i, head] = scores.softmax(0) @ v[first : position + 1, head // group].double()
    return out


@settings(max_examples=200, deadline=None)
@given(
    chunks=st.lists(st.tuples(st.integers(1, 9), st.just(0) | st.integers(0, 20)), max_size=3),
    decodes=st.lists(st.integers(1, 24), max_size=4),
    page_size=st.sampled_from([1, 3, 16]),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    dims=st.sampled_from([(8, 8), (12, 8)]),
    window=st.sampled_from([None, 1, 2, 4, 5, 100]),
    softcap=st.sampled_from([None, 2.0]),
    seed=st.integers(0, 1000),
)
def test_equals_token_by_token_attention(
    chunks: list[tuple[int, int]],
    decodes: list[int],
    page_size: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    window: int | None,
    softcap: float | None,
    seed: int,
) -> None:
    lengths = [(new, old + new) for new, old in chunks] + [(1, total) for total in decodes]
    if not lengths:
        return
    torch.manual_seed(seed)
    pages_of = [-(-total // page_size) for _, total in lengths]
    spec = KVSpec.uniform(2, heads[1], dims[0], dims[1], torch.float32)
    cache = KVCache(spec, sum(pages_of) + 2, page_size)
    for tensor in (*cache.k, *cache.v):
        tensor.fill_(float("nan"))  # memory of no row: must not leak into any
    free = list(range(cache.num_pages))
    random.Random(seed).shuffle(free)
    tables = [[free.pop() for _ in range(count)] for count in pages_of]
    full = [(torch.randn(total, heads[1], dims[0]), torch.randn(total, heads[1], dims[1])) for _, total in lengths]
    slots = []
    for (new, total), table, (k, v) in zip(lengths, tables, full, strict=True):
        row = torch.tensor([table[p // page_size] * page_size + p % page_size for p in range(total)])
        if new < total:
            cache.write(1, k[: total - new], v[: total - new], row[: total - new])
        slots.append(row[total - new :])
    width = max(pages_of)
    batch = ForwardBatch(
        token_ids=torch.zeros(sum(new for new, _ in lengths), dtype=torch.int64),
        positions=torch.cat([torch.arange(total - new, total) for new, total in lengths]),
        slot_mapping=torch.cat(slots),
        page_table=torch.tensor([(table + [0] * width)[:width] for table in tables]),
        kv_lens=torch.tensor([total for _, total in lengths]),
        q_lens=[new for new, _ in lengths],
        kv_lens_host=[total for _, total in lengths],
        num_prefill_rows=len(chunks),
        logit_rows=torch.zeros(0, dtype=torch.int64),
    )
    q = torch.randn(len(batch.token_ids), heads[0], dims[0])
    k, v = (
        torch.cat([pair[i][total - new :] for (new, total), pair in zip(lengths, full, strict=True)]) for i in (0, 1)
    )
    scale = 1 / math.sqrt(dims[0])
    out = ReferenceAttention().forward(1, q, k, v, batch, cache, scale=scale, window=window, softcap=softcap)
    start = 0
    for (new, _), (row_k, row_v) in zip(lengths, full, strict=True):
        expected = naive(q[start : start + new], row_k, row_v, scale, window, softcap)
        torch.testing.assert_close(out[start : start + new].double(), expected, atol=2e-6, rtol=2e-5)
        start += new


def test_copies_are_made_in_every_layer_and_reads_before_it_writes() -> None:
    cache = KVCache(KVSpec.uniform(2, 1, 2, 3, torch.float32), 4, 2)
    for tensor in (*cache.k, *cache.v):
        tensor.copy_(torch.arange(5.0)[:, None, None, None].expand_as(tensor))
    with sent() as staging:
        cache.stage_copies([0, 1, 3], [1, 2, 0], staging)
    for tensor in (*cache.k, *cache.v):
        assert tensor[:, 0, 0, 0].tolist() == [3, 0, 1, 3, 4]


@pytest.mark.parametrize(
    ("src", "dst"),
    [([0], []), ([0], [4]), ([-1], [0]), ([0, 1], [2, 2])],
    ids=["length", "scratch", "negative", "twice"],
)
def test_impossible_copies_are_refused(src: list[int], dst: list[int]) -> None:
    with pytest.raises(ValueError, match="copies"):
        KVCache(KVSpec.uniform(1, 1, 2, 2, torch.float32), 4, 2).stage_copies(src, dst, Staging("cpu"))


def test_bytes_per_token() -> None:
    assert KVSpec.uniform(3, 2, 8, 4, torch.bfloat16).bytes_per_token == 3 * 2 * (8 + 4) * 2
