"""Paged attention in Triton: split-KV decode for grouped-query heads, and varlen prefill over pages.

Decode splits the cached tokens of a row over several programs (Flash-Decoding, Dao et al., 2023) and joins their
results by the log of their weights' sums. Rows that begin with the same pages attend to them together, and the results
are more parts to join (Hydragen, Juravsky et al., 2024; FlashInfer's cascades), of several prefixes one inside the
other. Prefill is FlashAttention-2 (Dao, 2023) whose keys come from pages. A program of any of them reads K and V of one
KV head once for all of its query heads. Accumulation is float32; powers are of two.

With `INT8`, pages hold codes, and `k_scales`, `v_scales` float32 `[pages, Hkv, PAGE]` what to multiply them by. They
are not widened in memory: the scales of K multiply the scores, those of V the weights.

With `SINKS`, `sinks` float32 `[Hq]` has one more score for every query of a head, which has no value: its weight is
added when all others have been, so that parts of a row know nothing of it.

Arguments that change from step to step are not specialized on (whether they are 1, or multiples of 16, as addresses
are): another kernel would have to be compiled while requests wait. They are numbers and lists of int64 that are read
one by one.
"""

import triton
import triton.language as tl

from worker_proc.cuda.kv_codes import head_codes, head_scale
from worker_proc.cuda.overlap import fetch, take_turn


@triton.jit(do_not_specialize=["slots_ptr"])
def store_kernel(
    k_ptr, v_ptr, k_pages_ptr, v_pages_ptr, k_scales_ptr, v_scales_ptr, slots_ptr,
    k_token, k_head, v_token, v_head, k_page_stride, k_head_stride, v_page_stride, v_head_stride,
    PAGE: tl.constexpr, DIM_K: tl.constexpr, DIM_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    INT8: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (t, h) writes K and V of token t and KV head h to slot `slots[t]`."""
    take_turn(OVERLAP)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    page, offset = slot // PAGE, slot % PAGE
    dims_k, dims_v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    k = tl.load(k_ptr + token * k_token + head * k_head + dims_k, mask=dims_k < DIM_K, other=0.0)
    v = tl.load(v_ptr + token * v_token + head * v_head + dims_v, mask=dims_v < DIM_V, other=0.0)
    k_to = k_pages_ptr + page * k_page_stride + head * k_head_stride + offset * DIM_K
    v_to = v_pages_ptr + page * v_page_stride + head * v_head_stride + offset * DIM_V
    if INT8:
        k, v = k.to(tl.float32), v.to(tl.float32)
        k_scale, v_scale = head_scale(tl.max(tl.abs(k), 0)), head_scale(tl.max(tl.abs(v), 0))
        place = (page * tl.num_programs(1) + head) * PAGE + offset
        tl.store(k_scales_ptr + place, k_scale)
        tl.store(v_scales_ptr + place, v_scale)
        tl.store(k_to + dims_k, head_codes(k, k_scale), mask=dims_k < DIM_K)
        tl.store(v_to + dims_v, head_codes(v, v_scale), mask=dims_v < DIM_V)
    else:
        tl.store(k_to + dims_k, k, mask=dims_k < DIM_K)
        tl.store(v_to + dims_v, v, mask=dims_v < DIM_V)


@triton.jit(do_not_specialize=["table_ptr", "lens_ptr", "skipped_ptr", "splits", "parts", "table_row"])
def decode_kernel(
    q_ptr, k_pages_ptr, v_pages_ptr, k_scales_ptr, v_scales_ptr, partial_ptr, sums_ptr, table_ptr,
    lens_ptr, skipped_ptr, scale, softcap, splits, parts,
    q_row, q_head, k_page_stride, k_head_stride, v_page_stride, v_head_stride, table_row,
    PAGE: tl.constexpr, GROUP: tl.constexpr, DIM_K: tl.constexpr, DIM_V: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, INT8: tl.constexpr, SHARED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (b, h, s): part s of the tokens of row b, for the query heads of KV head h.

    `partial` float32 `[B, Hq, parts, DIM_V]` gets the weighted mean of V, `sums` float32 `[B, Hq, parts]` the binary
    logarithm of the weights' sum, -inf for a part without tokens; the first `splits` parts are this kernel's. `WINDOW`
    0 is none. With `SHARED`, the first `skipped[b]` tokens are left to `shared_kernel`.
    """
    row, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lens_ptr + row).to(tl.int32)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    if SHARED:
        first = tl.load(skipped_ptr + row).to(tl.int32)
    each = tl.cdiv(tl.cdiv(length - first, splits), BLOCK_N) * BLOCK_N
    begin = first + part * each
    end = tl.minimum(begin + each, length)

    members, dims_k, dims_v = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    real = members < GROUP
    heads = head * GROUP + members
    if OVERLAP:
        table = table_ptr + row * table_row
        _fetch(k_pages_ptr + head * k_head_stride, table, begin, end, k_page_stride, PAGE, DIM_K, BLOCK_N)
        _fetch(v_pages_ptr + head * v_head_stride, table, begin, end, v_page_stride, PAGE, DIM_V, BLOCK_N)
    take_turn(OVERLAP)
    q_at = q_ptr + row * q_row + heads[:, None] * q_head + dims_k[None, :]
    q = tl.load(q_at, mask=real[:, None] & (dims_k[None, :] < DIM_K), other=0.0)
    mean, logs = _attend_part(
        q, k_pages_ptr + head * k_head_stride, v_pages_ptr + head * v_head_stride, k_scales_ptr + head * PAGE,
        v_scales_ptr + head * PAGE, table_ptr + row * table_row,
        begin, end, scale, softcap, k_page_stride, v_page_stride, tl.num_programs(1) * PAGE,
        PAGE, DIM_K, DIM_V, BLOCK_G, BLOCK_K, BLOCK_V, BLOCK_N, SOFTCAP, INT8,
    )  # fmt: skip
    place = (row * tl.num_programs(1) * GROUP + heads) * parts + part
    to_mean = partial_ptr + place[:, None] * DIM_V + dims_v[None, :]
    tl.store(to_mean, mean, mask=real[:, None] & (dims_v[None, :] < DIM_V))
    tl.store(sums_ptr + place, logs, mask=real)


@triton.jit(do_not_specialize=["table_ptr", "tiles_ptr", "own", "splits", "parts", "table_row"])
def shared_kernel(
    q_ptr, k_pages_ptr, v_pages_ptr, k_scales_ptr, v_scales_ptr, partial_ptr, sums_ptr, table_ptr,
    tiles_ptr, scale, softcap, own, splits, parts,
    q_row, q_head, k_page_stride, k_head_stride, v_page_stride, v_head_stride, table_row,
    PAGE: tl.constexpr, GROUP: tl.constexpr, DIM_K: tl.constexpr, DIM_V: tl.constexpr, MEMBERS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr, INT8: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (t, h, s): part s of the tokens that the rows of tile t share, for their query heads of KV head h.

    `tiles` int64 `[T, 4 + MEMBERS]` are those of `SharedPages`. Results go to `partial` and `sums` behind the `own`
    parts of `decode_kernel`, `splits` of each level after those of the one before.
    """
    take_turn(OVERLAP)
    tile, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tile_ptr = tiles_ptr + tile * (4 + MEMBERS)
    first, last = tl.load(tile_ptr + 1).to(tl.int32), tl.load(tile_ptr + 2).to(tl.int32)
    if first == last:
        return
    each = tl.cdiv(tl.cdiv(last - first, splits), BLOCK_N) * BLOCK_N
    begin = first + part * each
    end = tl.minimum(begin + each, last)

    queries, dims_k, dims_v = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    rows = tl.load(tile_ptr + 4 + queries // GROUP, mask=queries < MEMBERS * GROUP, other=-1)
    real = rows >= 0
    heads = head * GROUP + queries % GROUP
    q_at = q_ptr + (rows * q_row + heads * q_head)[:, None] + dims_k[None, :]
    q = tl.load(q_at, mask=real[:, None] & (dims_k[None, :] < DIM_K), other=0.0)
    mean, logs = _attend_part(
        q, k_pages_ptr + head * k_head_stride, v_pages_ptr + head * v_head_stride, k_scales_ptr + head * PAGE,
        v_scales_ptr + head * PAGE, table_ptr + tl.load(tile_ptr) * table_row,
        begin, end, scale, softcap, k_page_stride, v_page_stride, tl.num_programs(1) * PAGE,
        PAGE, DIM_K, DIM_V, BLOCK_G, BLOCK_K, BLOCK_V, BLOCK_N, SOFTCAP, INT8,
    )  # fmt: skip
    behind = own + tl.load(tile_ptr + 3) * splits + part
    place = (rows * tl.num_programs(1) * GROUP + heads) * parts + behind
    to_mean = partial_ptr + place[:, None] * DIM_V + dims_v[None, :]
    tl.store(to_mean, mean, mask=real[:, None] & (dims_v[None, :] < DIM_V))
    tl.store(sums_ptr + place, logs, mask=real)


@triton.jit
def _fetch(
    pages, table, begin, end, page_stride, PAGE: tl.constexpr, DIM: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Ask for the first `BLOCK_N` tokens of `begin` .. `end`, of which the last may not have been written yet."""
    EACH: tl.constexpr = 1024 // pages.dtype.element_ty.primitive_bitwidth  # numbers in a line of a cache
    tokens = begin + tl.arange(0, BLOCK_N)
    page = tl.load(table + tokens // PAGE, mask=tokens < end, other=0)
    lines = tl.arange(0, triton.next_power_of_2((DIM + EACH - 1) // EACH)) * EACH
    places = page * page_stride + (tokens % PAGE) * DIM
    fetch(pages + places[:, None] + tl.minimum(lines, DIM - 1)[None, :])


@triton.jit
def _attend_part(
    q, k_pages_ptr, v_pages_ptr, k_scales_ptr, v_scales_ptr, table_ptr, begin, end, scale, softcap,
    k_page_stride, v_page_stride, scale_page,
    PAGE: tl.constexpr, DIM_K: tl.constexpr, DIM_V: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """`q` `[BLOCK_G, BLOCK_K]` over tokens `begin` .. `end` of one row's pages: the weighted mean of V and the binary
    logarithm of the weights' sum."""
    tokens, dims_k, dims_v = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    highest = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    mean = tl.zeros([BLOCK_G, BLOCK_V], tl.float32)
    for start in range(begin, end, BLOCK_N):
        at = start + tokens
        here = at < end
        page = tl.load(table_ptr + at // PAGE, mask=here, other=0).to(tl.int64)
        k_at = page * k_page_stride + (at % PAGE) * DIM_K
        v_at = page * v_page_stride + (at % PAGE) * DIM_V
        k_mask = here[:, None] & (dims_k[None, :] < DIM_K)
        k = tl.load(k_pages_ptr + k_at[:, None] + dims_k[None, :], mask=k_mask, other=0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * 1.4426950408889634)
        scaled = page * scale_page + at % PAGE
        if INT8:
            scores *= tl.load(k_scales_ptr + scaled, mask=here, other=0.0)[None, :]
        if SOFTCAP:
            scores = _cap(scores, softcap)
        scores = tl.where(here[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(highest - higher)
        v_mask = here[:, None] & (dims_v[None, :] < DIM_V)
        v = tl.load(v_pages_ptr + v_at[:, None] + dims_v[None, :], mask=v_mask, other=0)
        total = total * shrink + tl.sum(weights, 1)
        if INT8:
            weights, v = _scaled(weights, v, tl.load(v_scales_ptr + scaled, mask=here, other=0.0), q.dtype)
        mean = mean * shrink[:, None] + tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision="ieee")
        highest = higher
    some = total > 0
    mean = mean / tl.where(some, total, 1.0)[:, None]
    return mean, tl.where(some, highest + tl.log2(tl.where(some, total, 1.0)), float("-inf"))


@triton.jit(do_not_specialize=["levels_ptr", "sinks_ptr", "own", "splits", "parts"])
def combine_kernel(
    partial_ptr, sums_ptr, out_ptr, levels_ptr, sinks_ptr, own, splits, parts, out_row, out_head,
    DIM_V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_S: tl.constexpr, SHARED: tl.constexpr, SINKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (b, h) joins the parts that `decode_kernel` computed for row b and query head h, and, with `SHARED`,
    those of `shared_kernel`, on as many levels as `levels[b]` says; with `SINKS`, the sink of h too."""
    take_turn(OVERLAP)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    place = (row * tl.num_programs(1) + head) * parts
    numbers, dims = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_V)
    count = own
    if SHARED:
        count = own + tl.load(levels_ptr + row).to(tl.int32) * splits
    logs = tl.load(sums_ptr + place + numbers, mask=numbers < count, other=float("-inf"))
    highest, others = tl.max(logs, 0), 0.0
    if SINKS:
        sink = _sink(sinks_ptr + head)
        others = _sink_weight(sink, highest)
        highest = tl.maximum(highest, sink)
    weights = tl.exp2(logs - highest)
    at = partial_ptr + (place + numbers)[:, None] * DIM_V + dims[None, :]
    means = tl.load(at, mask=(numbers[:, None] < count) & (dims[None, :] < DIM_V), other=0.0)
    result = tl.sum(means * weights[:, None], 0) / (tl.sum(weights, 0) + others)
    to = out_ptr + row * out_row + head * out_head + dims
    tl.store(to, result.to(out_ptr.dtype.element_ty), mask=dims < DIM_V)


@triton.jit(do_not_specialize=["table_ptr", "lens_ptr", "starts_ptr", "sinks_ptr", "table_row"])
def prefill_kernel(
    q_ptr, k_pages_ptr, v_pages_ptr, k_scales_ptr, v_scales_ptr, out_ptr, table_ptr, lens_ptr, starts_ptr, sinks_ptr,
    scale, softcap,
    q_token, q_head, out_token, out_head, k_page_stride, k_head_stride, v_page_stride, v_head_stride, table_row,
    PAGE: tl.constexpr, GROUP: tl.constexpr, DIM_K: tl.constexpr, DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, INT8: tl.constexpr, SINKS: tl.constexpr, ALIKE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (i, h, b): queries i * BLOCK_M .. of row b and KV head h; a token has one for each query head of that
    KV head. Tokens `starts[b] .. starts[b + 1]` of `q` are the newest ones of the row, whose keys are in the
    cache already."""
    take_turn(OVERLAP)
    block, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(starts_ptr + row)
    count = (tl.load(starts_ptr + row + 1) - start).to(tl.int32)
    if block * BLOCK_M >= count * GROUP:
        return
    length = tl.load(lens_ptr + row).to(tl.int32)
    queries = block * BLOCK_M + tl.arange(0, BLOCK_M)
    asking, heads = queries // GROUP, kv_head * GROUP + queries % GROUP
    real = asking < count
    position = length - count + asking
    dims_k, dims_v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    q_at = q_ptr + ((start + asking) * q_token + heads * q_head)[:, None] + dims_k[None, :]
    q = tl.load(q_at, mask=real[:, None] & (dims_k[None, :] < DIM_K), other=0.0)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mean = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    table_ptr += row.to(tl.int64) * table_row
    k_pages_ptr, v_pages_ptr = k_pages_ptr + kv_head * k_head_stride, v_pages_ptr + kv_head * v_head_stride
    k_scales_ptr, v_scales_ptr = k_scales_ptr + kv_head * PAGE, v_scales_ptr + kv_head * PAGE
    scale_page = tl.num_programs(1) * PAGE
    first_key = 0
    first_query = length - count + block * BLOCK_M // GROUP
    if WINDOW > 0:
        first_key = tl.maximum(first_query - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    seen_by_all = first_key
    last_key = tl.minimum(length, length - count + ((block + 1) * BLOCK_M - 1) // GROUP + 1)
    if WINDOW == 0 and q_ptr.dtype.element_ty != tl.float32:  # whose products take long to compile
        seen_by_all = (first_query + 1) // BLOCK_N * BLOCK_N
        for at_key in range(first_key, seen_by_all, BLOCK_N):  # which takes no mask
            highest, total, mean = _attend_block(
                q, highest, total, mean, at_key, last_key, position, k_pages_ptr, v_pages_ptr, k_scales_ptr,
                v_scales_ptr, table_ptr, scale, softcap, k_page_stride, v_page_stride, scale_page,
                PAGE, DIM_K, DIM_V, BLOCK_K, BLOCK_V, BLOCK_N, WINDOW, SOFTCAP, INT8, ALIKE, False,
            )  # fmt: skip
    for at_key in range(seen_by_all, last_key, BLOCK_N):
        highest, total, mean = _attend_block(
            q, highest, total, mean, at_key, last_key, position, k_pages_ptr, v_pages_ptr, k_scales_ptr, v_scales_ptr,
            table_ptr, scale, softcap, k_page_stride, v_page_stride, scale_page,
            PAGE, DIM_K, DIM_V, BLOCK_K, BLOCK_V, BLOCK_N, WINDOW, SOFTCAP, INT8, ALIKE, True,
        )  # fmt: skip
    if SINKS:
        sink = _sink(sinks_ptr + heads)
        higher = tl.maximum(highest, sink)
        shrink = tl.exp2(highest - higher)
        total = total * shrink + _sink_weight(sink, highest)
        mean *= shrink[:, None]
    mean = mean / tl.where(total > 0, total, 1.0)[:, None]
    to = out_ptr + ((start + asking) * out_token + heads * out_head)[:, None] + dims_v[None, :]
    tl.store(to, mean.to(out_ptr.dtype.element_ty), mask=real[:, None] & (dims_v[None, :] < DIM_V))


@triton.jit
def _attend_block(
    q, highest, total, mean, at_key, last_key, position, k_pages_ptr, v_pages_ptr, k_scales_ptr, v_scales_ptr,
    table_ptr, scale, softcap, k_page_stride, v_page_stride, scale_page,
    PAGE: tl.constexpr, DIM_K: tl.constexpr, DIM_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, INT8: tl.constexpr, ALIKE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """`BLOCK_N` keys from `at_key` on join the running highest score, sum of weights and weighted sum of values of a
    block of queries at `position`. Without `MASKED` all queries see all of them. `ALIKE`: pages of V lie as those of K.
    """
    at = at_key + tl.arange(0, BLOCK_N)
    dims_k, dims_v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    here = at < last_key
    if MASKED:
        page = tl.load(table_ptr + at // PAGE, mask=here, other=0).to(tl.int64)
    else:
        page = tl.load(table_ptr + at // PAGE).to(tl.int64)
    k_at = page * k_page_stride + (at % PAGE) * DIM_K
    if ALIKE:
        v_at = k_at
    else:
        v_at = page * v_page_stride + (at % PAGE) * DIM_V
    k = _load_block(k_pages_ptr + k_at[:, None] + dims_k[None, :], here, dims_k, DIM_K, BLOCK_K, MASKED)
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * (scale * 1.4426950408889634)
    scaled = page * scale_page + at % PAGE
    if INT8:
        scores *= tl.load(k_scales_ptr + scaled, mask=here, other=0.0)[None, :]
    if SOFTCAP:
        scores = _cap(scores, softcap)
    if MASKED:
        seen = here[None, :] & (at[None, :] <= position[:, None])
        if WINDOW > 0:
            seen &= at[None, :] > position[:, None] - WINDOW
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(highest, tl.max(scores, 1))
    base = higher
    if MASKED:
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen no key yet stays at no weight
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(highest - base)
    v = _load_block(v_pages_ptr + v_at[:, None] + dims_v[None, :], here, dims_v, DIM_V, BLOCK_V, MASKED)
    total = total * shrink + tl.sum(weights, 1)
    if INT8:
        weights, v = _scaled(weights, v, tl.load(v_scales_ptr + scaled, mask=here, other=0.0), q.dtype)
    mean = mean * shrink[:, None]
    mean = tl.dot(weights.to(q.dtype), v.to(q.dtype), mean, input_precision="ieee")
    return higher, total, mean


@triton.jit
def _load_block(at, here, dims, DIM: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Keys or values `[BLOCK_N, BLOCK]`."""
    if MASKED:
        return tl.load(at, mask=here[:, None] & (dims[None, :] < DIM), other=0)
    if DIM == BLOCK:
        return tl.load(at)
    return tl.load(at, mask=(dims < DIM)[None, :], other=0)


@triton.jit
def _sink(sinks_at):
    """Sinks in the units of scores here."""
    return tl.load(sinks_at) * 1.4426950408889634


@triton.jit
def _sink_weight(sink, highest):
    """The weight of a sink beside scores up to `highest`. One above them has 1: to take a rounded product from itself,
    fused, would leave an error of any size."""
    return tl.where(sink >= highest, 1.0, tl.exp2(sink - tl.maximum(highest, sink)))


@triton.jit
def _scaled(weights, codes, scales, dtype: tl.constexpr):
    """Weights and values whose product is `weights` x (`codes` * `scales`). float16 has no room for tiny products of
    weights and scales: there the values get their scales."""
    if dtype == tl.float16:
        values = codes.to(tl.float32) * scales[:, None]
    else:
        weights = weights * scales[None, :]
        values = codes
    return weights, values


@triton.jit
def _cap(scores, softcap):
    """softcap * tanh(score / softcap), of scores that are in units of log2(e) already."""
    x = scores / (softcap * 1.4426950408889634)
    e = tl.exp2(-2.0 * 1.4426950408889634 * tl.abs(x))
    tanh = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -tanh, tanh) * (softcap * 1.4426950408889634)
