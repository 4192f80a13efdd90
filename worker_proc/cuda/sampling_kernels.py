"""Drawing tokens without sorting the vocabulary: thresholds by search, the draw by inversion.

Top-k, top-p and min-p all keep the tokens whose weight reaches a threshold, and the threshold of a filter is the
largest one that still keeps enough: k tokens, or a share p of the mass. Floats that are not negative are ordered like
their bits, so the threshold is searched for among integers.

Where weights are made, each block of them is counted and added up by ranges of bits. That says in which range a
threshold is, and which block a draw without filters is in. Tokens from the lowest such range on, nearly always few, are
laid together in their order, each block's where those of the blocks before it end, and everything else is done in
registers (a radix selection's first digit, then the others by search with sixteen pivots at a time). Where they are
many, each pass goes over the row instead, and moves both ends of the interval to weights that occur (FlashInfer's
sampling searches so, with two pivots).

Weights are whole numbers whose float64 sums are exact in any order, so the tokens kept and drawn are to the last one
those that `worker_proc/sampler.py` gets by sorting.
"""

import triton
import triton.language as tl

from worker_proc.cuda.overlap import take_turn

PIVOTS = tl.constexpr(16)
RANGES = tl.constexpr(16)  # of 2^24 bits each, from weights of 8 on; the last one ends beyond the largest weight
_FIRST = tl.constexpr(0x41)
_BEYOND = tl.constexpr(0x50800001)  # the bits of 2**34, the largest weight, and one


@triton.jit(do_not_specialize=["index_ptr", "index_row"])  # see attention_kernels.py
def weights_kernel(
    logits_ptr, best_ptr, params_ptr, index_ptr, weights_ptr, masses_ptr, ranges_ptr,
    vocab, logits_row, params_row, index_row, never, unit,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (i, j): block j of row i of `weights` float32 `[R, vocab]`, from row `index[0, i]` of `logits` float32,
    its largest in `best`, and the temperature of slot `index[1, i]`, as `worker_proc.sampler.weights_of` has it; their
    sum to `masses` float64 `[R, blocks]`, and, where the slot has top_k or top_p, how many there are in each range, and
    their sums where they decide, to `ranges` float64 `[R, blocks, 2, RANGES]`.

    Every operation is rounded as IEEE 754 says, and the exponential from float64, so that the bits are those of torch.
    """
    take_turn(OVERLAP)
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
    values = tl.where(at < vocab, weights, 0.0).to(tl.float64)
    block = row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(masses_ptr + block, tl.sum(values, 0))
    slot = tl.load(index_ptr + index_row + row)
    top_k, top_p, _ = _filters(params_ptr, params_row, slot)
    by_k = (top_k > 0) & (top_k < vocab)
    if by_k | (top_p < 1):
        places = tl.where(at < vocab, (weights.to(tl.int32, bitcast=True) >> 24) - _FIRST, -1)
        ranges_ptr += block * 2 * RANGES
        for number in tl.static_range(RANGES):
            here = places == number
            tl.store(ranges_ptr + number, tl.sum(here.to(tl.int32), 0).to(tl.float64))
            if not by_k:
                tl.store(ranges_ptr + RANGES + number, tl.sum(tl.where(here, values, 0.0), 0))


@triton.jit
def _filters(params_ptr, params_row, slot):
    """top_k, top_p and min_p of a slot."""
    at = params_ptr + slot
    return tl.load(at + params_row), tl.load(at + 2 * params_row), tl.load(at + 3 * params_row)


@triton.jit(do_not_specialize=["index_ptr", "index_row"])  # see attention_kernels.py
def gather_kernel(
    weights_ptr, masses_ptr, ranges_ptr, few_ptr, names_ptr, params_ptr, index_ptr,
    vocab, blocks, weights_row, params_row, index_row,
    SUMMED: tl.constexpr, BLOCKS: tl.constexpr, EACH: tl.constexpr, ROOM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (i, j): of row i, the tokens of blocks j * EACH .. that may be kept by top_k or top_p, to their places in
    `few` float32 and `names` int32 `[R, ROOM]`, if there are no more than `ROOM` in the row. See `draw_kernel`."""
    take_turn(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    top_k, top_p, _ = _filters(params_ptr, params_row, tl.load(index_ptr + index_row + row))
    by_k, by_p = (top_k > 0) & (top_k < vocab), top_p < 1
    if by_k | by_p:
        numbers, which = tl.arange(0, BLOCKS), tl.arange(0, RANGES)
        masses = tl.load(masses_ptr + row * blocks + numbers, mask=numbers < blocks, other=0.0)
        enough, left = _first_range(
            ranges_ptr + row * blocks * 2 * RANGES, numbers, blocks, by_k, top_k, top_p * tl.sum(masses, 0), vocab
        )  # fmt: skip
        if left <= ROOM:
            at = ranges_ptr + (row * blocks + numbers)[:, None] * 2 * RANGES + which[None, :]
            wanted = (numbers < blocks)[:, None] & (which >= enough)[None, :]
            counts = tl.sum(tl.load(at, mask=wanted, other=0.0), 1).to(tl.int32)
            if enough < 0:  # all that there are
                counts = tl.minimum(tl.maximum(vocab - numbers * SUMMED, 0), SUMMED)
            places = row * ROOM + tl.cumsum(counts, 0) - counts
            for number in range(tl.program_id(1) * EACH, tl.program_id(1) * EACH + EACH):
                if tl.sum(tl.where(numbers == number, counts, 0), 0) > 0:
                    inside = number * SUMMED + tl.arange(0, SUMMED)
                    weights = tl.load(weights_ptr + row * weights_row + inside, mask=inside < vocab, other=0.0)
                    ranges = (weights.to(tl.int32, bitcast=True) >> 24) - _FIRST
                    kept = (inside < vocab) & (((ranges >= enough) & (ranges < RANGES)) | (enough + 0 * ranges < 0))
                    place = tl.sum(tl.where(numbers == number, places, 0), 0) + tl.cumsum(kept.to(tl.int32), 0) - 1
                    tl.store(few_ptr + place, weights, mask=kept)
                    tl.store(names_ptr + place, inside, mask=kept)


@triton.jit
def _first_range(ranges_ptr, numbers, blocks, by_k, top_k, mass, vocab):
    """The range in which the threshold of a row's first filter is, `top_k` tokens or so much `mass`, -1 where it is
    below all; and how many tokens are in it and those above."""
    which = tl.arange(0, RANGES)
    at, real = ranges_ptr + numbers[:, None] * 2 * RANGES + which[None, :], (numbers < blocks)[:, None]
    counts = _from(tl.sum(tl.load(at, mask=real, other=0.0), 0))
    if by_k:
        enough = tl.max(tl.where(counts >= top_k, which, -1), 0)
    else:
        sums = _from(tl.sum(tl.load(at + RANGES, mask=real, other=0.0), 0))
        enough = tl.max(tl.where(sums >= mass, which, -1), 0)
    left = tl.sum(tl.where(which == enough, counts, 0.0), 0)
    return enough, tl.where(enough < 0, vocab, left).to(tl.int32)


@triton.jit(do_not_specialize=["index_ptr", "index_row"])  # see attention_kernels.py
def draw_kernel(
    weights_ptr, masses_ptr, ranges_ptr, few_ptr, names_ptr, params_ptr, seeds_ptr, index_ptr, tokens_ptr,
    vocab, blocks, weights_row, params_row, index_row, unit,
    SUMMED: tl.constexpr, BLOCKS: tl.constexpr, SEARCHED: tl.constexpr, ROOM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program i draws for row i of `weights` float32 `[R, vocab]`, whose `masses` and `ranges` of blocks of `SUMMED`
    are those of `weights_kernel`; there are `blocks`, at most `BLOCKS`.

    `index` int64 `[3, R]` has the row's place in `tokens` (int64), its slot and its position. `params` float64
    `[4, slots]` are temperature, top_k, top_p, min_p; `seeds` int64 `[slots]`; `unit` is the largest weight. `few`
    float32 and `names` int32 `[R, ROOM]` are those of `gather_kernel`.
    """
    take_turn(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(index_ptr + index_row + row)
    top_k, top_p, min_p = _filters(params_ptr, params_row, slot)
    weights_ptr += row * weights_row
    by_k, by_p = (top_k > 0) & (top_k < vocab), top_p < 1
    smallest = (min_p * unit).to(tl.float32).to(tl.int32, bitcast=True)
    numbers = tl.arange(0, BLOCKS)
    masses = tl.load(masses_ptr + row * blocks + numbers, mask=numbers < blocks, other=0.0)
    everything = tl.sum(masses, 0)

    position = tl.load(index_ptr + 2 * index_row + row)
    low, high = (position & 0xFFFFFFFF).to(tl.uint32), ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = low * 0
    first, second, _, _ = tl.philox(tl.load(seeds_ptr + slot).to(tl.uint64, bitcast=True), low, high, zero, zero)
    bits = (first.to(tl.int64) << 21) | (second.to(tl.int64) >> 11)
    share = bits.to(tl.float64) * 1.1102230246251565e-16

    if by_k | by_p:
        enough, left = _first_range(
            ranges_ptr + row * blocks * 2 * RANGES, numbers, blocks, by_k, top_k, top_p * everything, vocab
        )  # fmt: skip
        least = tl.where(enough < 0, 0, (enough + _FIRST) << 24)
        next_range = (enough + 1 + _FIRST) << 24
        if left <= ROOM:
            found = _draw_few(
                few_ptr + row * ROOM, names_ptr + row * ROOM, left, least, next_range, by_k, by_p, top_k, top_p,
                everything, tl.where(min_p > 0, smallest, 0), share, ROOM,
            )  # fmt: skip
        else:
            edge = least
            if by_k:
                edge = _search(weights_ptr, vocab, edge, next_range, top_k, False, SEARCHED)
            if by_p:
                wanted = top_p * everything
                if by_k:
                    next_range = edge * 0 + _BEYOND
                    wanted = top_p * _mass(weights_ptr, vocab, edge, SEARCHED)
                edge = _search(weights_ptr, vocab, edge, next_range, wanted, True, SEARCHED)
            if min_p > 0:
                edge = tl.maximum(edge, smallest)
            found = _draw_many(weights_ptr, vocab, edge, share * _mass(weights_ptr, vocab, edge, SEARCHED), SEARCHED)
    elif min_p > 0:
        mass = _mass(weights_ptr, vocab, smallest, SEARCHED)
        found = _draw_many(weights_ptr, vocab, smallest, share * mass, SEARCHED)
    else:
        target = share * everything
        block = tl.minimum(tl.sum((tl.cumsum(masses, 0) <= target).to(tl.int32), 0), blocks - 1)
        before = tl.sum(tl.where(numbers < block, masses, 0.0), 0)
        inside = block * SUMMED + tl.arange(0, SUMMED)
        weights = tl.load(weights_ptr + inside, mask=inside < vocab, other=0.0).to(tl.float64)
        found = block * SUMMED + tl.sum((before + tl.cumsum(weights, 0) <= target).to(tl.int32), 0)
    tl.store(tokens_ptr + tl.load(index_ptr + row), tl.minimum(found, vocab - 1).to(tl.int64))


@triton.jit
def _from(parts):
    """Sums of `parts` `[RANGES]` from each on."""
    which = tl.arange(0, RANGES)
    return tl.sum(tl.where(which[None, :] >= which[:, None], parts[None, :], 0.0), 1)


@triton.jit
def _draw_few(
    few_ptr, names_ptr, held, least, next_range, by_k, by_p, top_k, top_p, everything, smallest, share,
    ROOM: tl.constexpr,
):  # fmt: skip
    """The token drawn from the `held` ones of a row, which have bits from `least` on, where the first filter's
    threshold is below `next_range`."""
    places = tl.arange(0, ROOM)
    weights = tl.load(few_ptr + places, mask=places < held, other=0.0).to(tl.float64)
    bits = tl.load(few_ptr + places, mask=places < held, other=-1.0).to(tl.int32, bitcast=True)
    edge = least
    if by_k:
        edge = _search_few(bits, weights * 0.0 + 1.0, least, next_range, top_k)
    if by_p:
        if by_k:
            mass = tl.sum(tl.where(bits >= edge, weights, 0.0), 0)
            edge = _search_few(bits, weights, edge, edge * 0 + _BEYOND, top_p * mass)
        else:
            edge = _search_few(bits, weights, edge, next_range, top_p * everything)
    edge = tl.maximum(edge, smallest)
    weights = tl.where(bits >= edge, weights, 0.0)
    target = share * tl.sum(weights, 0)
    place = tl.sum((tl.cumsum(weights, 0) <= target).to(tl.int32), 0)
    return tl.load(names_ptr + tl.minimum(place, held - 1))


@triton.jit
def _search_few(bits, values, low, high, wanted):
    """The largest threshold from which on `values` add up to `wanted`: `low` is small enough, `high` too large."""
    steps = tl.arange(0, PIVOTS)
    while high - low > 1:
        step = (high - low + PIVOTS - 1) // PIVOTS
        pivots = low + steps * step
        sums = tl.sum(tl.where(bits[None, :] >= pivots[:, None], values[None, :], 0.0), 1)
        low += step * tl.max(tl.where((sums >= wanted) & (pivots < high), steps, 0), 0)
        high = tl.minimum(high, low + step)
    return low


@triton.jit
def _draw_many(weights_ptr, vocab, edge, target, BLOCK: tl.constexpr):
    """The first token up to which the weights that reach `edge` add up to more than `target`."""
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
    return found


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
def _search(weights_ptr, vocab, low, high, wanted, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The bits of the largest threshold that leaves at least `wanted` tokens, or so much mass with `MASS`.

    `low` leaves enough, `high` does not. A row of NaN ends the search, with any result.
    """
    at = tl.arange(0, BLOCK)
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
