"""Drawing tokens without sorting the vocabulary: thresholds by search, the draw by inversion.

Top-k, top-p and min-p all keep the tokens whose weight reaches a threshold, and the threshold of a filter is the
largest one that still keeps enough: k tokens, or a share p of the mass. Floats that are not negative are ordered like
their bits, so the threshold is searched for among integers. Every pass over the row tries three pivots and moves both
ends of the interval to weights that occur, so about nine passes find it in 150,000 tokens (FlashInfer's sampling
searches with two pivots). Weights are whole numbers whose float64 sums are exact in any order, so the tokens kept and
drawn are to the last one those that `worker_proc/sampler.py` gets by sorting.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["index_ptr", "index_row"])  # see attention_kernels.py
def weights_kernel(
    logits_ptr, best_ptr, params_ptr, index_ptr, weights_ptr,
    vocab, logits_row, index_row, never, unit,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (i, j): block j of row i of `weights` float32 `[R, vocab]`, from row `index[0, i]` of `logits` float32,
    its largest in `best`, and the temperature of slot `index[1, i]`, as `worker_proc.sampler.weights_of` has it.

    Every operation is rounded as IEEE 754 says, and the exponential from float64, so that the bits are those of torch.
    """
    row = tl.program_id(0)
    source = tl.load(index_ptr + row)
    temperature = tl.load(params_ptr + tl.load(index_ptr + index_row + row)).to(tl.float32)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + source * logits_row + at, mask=at < vocab, other=0.0)
    scaled = tl.div_rn(logits - tl.load(best_ptr + source), temperature)
    scaled = tl.maximum(scaled, never, propagate_nan=tl.PropagateNan.ALL)
    powers = tl.exp(scaled.to(tl.float64)).to(tl.float32)
    middle = 4503599627370496.0  # 2**52: what is added to it and taken away again is rounded to a whole number
    weights = ((powers.to(tl.float64) * unit + middle) - middle).to(tl.float32)
    tl.store(weights_ptr + row.to(tl.int64) * vocab + at, weights, mask=at < vocab)


@triton.jit(do_not_specialize=["index_ptr", "index_row"])  # see attention_kernels.py
def draw_kernel(
    weights_ptr, params_ptr, seeds_ptr, index_ptr, tokens_ptr,
    vocab, weights_row, params_row, index_row, unit,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program i draws for row i of `weights` float32 `[R, vocab]`.

    `index` int64 `[3, R]` has the row's place in `tokens` (int64), its slot and its position. `params` float64
    `[4, slots]` are temperature, top_k, top_p, min_p; `seeds` int64 `[slots]`; `unit` is the largest weight.
    """
    row = tl.program_id(0)
    slot = tl.load(index_ptr + index_row + row)
    top_k = tl.load(params_ptr + params_row + slot)
    top_p = tl.load(params_ptr + 2 * params_row + slot)
    min_p = tl.load(params_ptr + 3 * params_row + slot)
    weights_ptr += row.to(tl.int64) * weights_row
    edge = 0
    if (top_k > 0) & (top_k < vocab):
        edge = _search(weights_ptr, vocab, edge, top_k, False, BLOCK)
    if top_p < 1:
        edge = _search(weights_ptr, vocab, edge, top_p * _mass(weights_ptr, vocab, edge, BLOCK), True, BLOCK)
    if min_p > 0:
        edge = tl.maximum(edge, (min_p * unit).to(tl.float32).to(tl.int32, bitcast=True))

    position = tl.load(index_ptr + 2 * index_row + row)
    low, high = (position & 0xFFFFFFFF).to(tl.uint32), ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = low * 0
    first, second, _, _ = tl.philox(tl.load(seeds_ptr + slot).to(tl.uint64, bitcast=True), low, high, zero, zero)
    bits = (first.to(tl.int64) << 21) | (second.to(tl.int64) >> 11)
    target = bits.to(tl.float64) * 1.1102230246251565e-16 * _mass(weights_ptr, vocab, edge, BLOCK)

    at = tl.arange(0, BLOCK)
    reached = target * 0.0
    found = 0
    start = 0
    while (start < vocab) & (reached <= target):
        weights = _kept(weights_ptr, start + at, vocab, edge)
        total = reached + tl.sum(weights, 0)
        if total > target:
            found = start + tl.sum((reached + tl.cumsum(weights, 0) <= target).to(tl.int32), 0)
        reached = total
        start += BLOCK
    tl.store(tokens_ptr + tl.load(index_ptr + row), tl.minimum(found, vocab - 1).to(tl.int64))


@triton.jit
def _kept(weights_ptr, at, vocab, edge):
    """float64 weights at `at`, 0 for those whose bits are below `edge`."""
    weights = tl.load(weights_ptr + at, mask=at < vocab, other=0.0)
    return tl.where(weights.to(tl.int32, bitcast=True) >= edge, weights, 0.0).to(tl.float64)


@triton.jit
def _mass(weights_ptr, vocab, edge, BLOCK: tl.constexpr):
    """The sum of the weights that reach `edge`."""
    at = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, vocab, BLOCK):
        total += _kept(weights_ptr, start + at, vocab, edge)
    return tl.sum(total, 0)


@triton.jit
def _search(weights_ptr, vocab, low, wanted, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The bits of the largest threshold that leaves at least `wanted` tokens, or so much mass with `MASS`.

    `low` leaves enough. A row of NaN ends the search, with any result.
    """
    at = tl.arange(0, BLOCK)
    high = (low * 0) + 0x50800001  # the bits of 2**34, the largest weight, and one
    while high - low > 1:
        width = high - low
        p1, p2, p3 = low + (width + 3) // 4, low + (width + 1) // 2, high - width // 4
        f1 = tl.zeros([BLOCK], tl.float64)
        f2 = tl.zeros([BLOCK], tl.float64)
        f3 = tl.zeros([BLOCK], tl.float64)
        up1 = tl.zeros([BLOCK], tl.int32) + 0x7FFFFFFF  # the smallest weight from a pivot on
        up2 = up1
        up3 = up1
        down1 = tl.zeros([BLOCK], tl.int32)  # the largest weight below a pivot
        down2 = down1
        down3 = down1
        for start in range(0, vocab, BLOCK):
            weights = tl.load(weights_ptr + start + at, mask=start + at < vocab, other=0.0)
            bits = tl.where(start + at < vocab, weights.to(tl.int32, bitcast=True), -1)
            value = weights.to(tl.float64)
            if not MASS:
                value = value * 0.0 + 1.0
            f1 += tl.where(bits >= p1, value, 0.0)
            f2 += tl.where(bits >= p2, value, 0.0)
            f3 += tl.where(bits >= p3, value, 0.0)
            up1 = tl.minimum(up1, tl.where(bits >= p1, bits, 0x7FFFFFFF))
            up2 = tl.minimum(up2, tl.where(bits >= p2, bits, 0x7FFFFFFF))
            up3 = tl.minimum(up3, tl.where(bits >= p3, bits, 0x7FFFFFFF))
            down1 = tl.maximum(down1, tl.where(bits < p1, bits, 0))
            down2 = tl.maximum(down2, tl.where(bits < p2, bits, 0))
            down3 = tl.maximum(down3, tl.where(bits < p3, bits, 0))
        if tl.sum(f3, 0) >= wanted:
            low = tl.min(up3, 0)
        elif tl.sum(f2, 0) >= wanted:
            low = tl.min(up2, 0)
            high = tl.max(down3, 0) + 1
        elif tl.sum(f1, 0) >= wanted:
            low = tl.min(up1, 0)
            high = tl.max(down2, 0) + 1
        else:
            high = tl.minimum(high - 1, tl.max(down1, 0) + 1)
    return low
