"""From logits to tokens, for a whole batch at once.

One token is drawn by inversion of the cumulative distribution: it needs one random number per token, where the Gumbel
trick needs one per vocabulary entry (39 million for 256 rows of 151,936, each ten Philox rounds).

Probabilities are held as weights relative to the likeliest token and rounded to multiples of 2**-34, scaled to whole
numbers. Sums of up to 2**19 of them are exact in float64, so they do not depend on the order of the additions: a row
of logits draws the same token alone and in any batch, however a kernel splits the work. What rounding can move is
less than 2**-35 of the likeliest token's probability per token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from common.sampling_params import DrawParams
from worker_proc.random import uniforms
from worker_proc.staging import Staged, Staging

UNIT = float(2**34)  # the weight of the likeliest token
_FIRST_CANDIDATES = 256  # a nucleus is searched among so many tokens first: nearly always enough, and cheap
_MAX_ELEMENTS = 2**24  # weights that are worked on at once, which bounds the memory of a step
_BLOCK = 128  # tokens that are added up first
NEVER = -40.0  # exp of this rounds to no weight at all; exp of much less is slow on CPUs
_FEW = 128  # more tokens of a row are not worth a look for
_COLDEST = 1e-30  # lower temperatures, which float32 cannot divide by, leave no token but the likeliest either

_TEMPERATURE, _TOP_K, _TOP_P, _MIN_P = range(4)


@dataclass(frozen=True, slots=True)
class Drawing:
    """The R rows of a step that draw at random."""

    params: Tensor  # float64 [4, R], host
    index: Staged  # int64 [3, R]: row of the step, slot, tokens before the drawn one


@dataclass(frozen=True, slots=True, eq=False)
class _DrawingRows:
    """The rows that draw at random when a step has these `slots`, for the next step with them."""

    slots: Tensor
    numbers: Tensor  # int64 [R]
    params: Tensor  # as in Drawing
    index: Tensor  # as in Drawing, host, but for the tokens, which change with every step


class DrawRows(Protocol):
    """Draws for some rows in a kernel of its own, see `worker_proc/cuda/sampling.py` and `worker_proc/cpu/sampling.py`:
    writes a token for each column of `index` (int64 `[3, R]`: row of the step, slot, tokens before the drawn one) to
    `tokens` int64 `[S]`. `best` float32 `[S]` is the largest of each row; `params` float64 `[4, max_slots]` and `seeds`
    int64 `[max_slots]` are those of all slots."""

    def __call__(
        self, logits: Tensor, best: Tensor, params: Tensor, seeds: Tensor, index: Tensor, tokens: Tensor
    ) -> None: ...


BestRows = Callable[[Tensor], tuple[Tensor, Tensor]]  # the largest logit of each row, and where it is


class Sampler:
    """The draw parameters of every slot, and the draw itself.

    Parameters are on the device, where they are used, and on the host, where they say which rows need which work:
    greedy rows cost one maximum, and only rows with a filter pay for it.
    """

    def __init__(
        self,
        max_slots: int,
        device: torch.device | str = "cpu",
        draw_rows: DrawRows | None = None,
        best_rows: BestRows | None = None,
    ) -> None:
        """`draw_rows` filters and draws instead of this class, `best_rows` finds the likeliest tokens."""
        self.device = torch.device(device)
        self._best_rows = best_rows
        self._draw_rows = draw_rows
        self._host = torch.zeros(4, max_slots, dtype=torch.float64)
        self._params = self._host.to(self.device)
        self._seeds = torch.zeros(max_slots, dtype=torch.int64, device=self.device)
        self._rows: _DrawingRows | None = None  # of the last step, while nobody comes

    def set_params(self, slots: Sequence[int], draws: Sequence[DrawParams], staging: Staging) -> None:
        """From now on slot `slots[i]` draws as `draws[i]` says; on the device when `staging` is sent."""
        if not slots:
            return
        rows = [(max(d.temperature, _COLDEST) if d.temperature else 0.0, d.top_k, d.top_p, d.min_p) for d in draws]
        self._rows = None
        params = torch.tensor(rows, dtype=torch.float64).T.contiguous()
        index = torch.tensor(slots, dtype=torch.int64)
        self._host[:, index] = params
        seeds = torch.tensor([d.seed for d in draws], dtype=torch.int64)
        places, values = staging.put(torch.stack((index, seeds))), staging.put(params)

        def write() -> None:
            slots, seeds = places.tensor
            self._params.index_copy_(1, slots, values.tensor)
            self._seeds.index_copy_(0, slots, seeds)

        staging.then(write)

    def is_greedy(self, slots: Tensor) -> bool:
        """Whether none of `slots` (int64 `[S]`, host) draws at random."""
        return not bool(self._host[_TEMPERATURE].index_select(0, slots).any())

    def filters(self, slots: Tensor) -> Tensor | None:
        """Temperature, top_k, top_p and min_p of each row, contiguous float64 `[4, S]` (host), where these keep few
        tokens of every row of `slots` (int64 `[S]`, host); else None."""
        params = self._host[:, slots].contiguous()
        few = (params[_TOP_K] > 0) & (params[_TOP_K] <= _FEW)
        likely = (params[_MIN_P] > 0) & (params[_TOP_P] >= 1)
        return params if bool((few | likely | (params[_TEMPERATURE] == 0)).all()) else None

    def prepare(self, slots: Tensor, positions: Tensor, staging: Staging) -> Drawing | None:
        """What `sample` needs of a step whose rows have the parameters of `slots` (int64 `[S]`, host) and `positions`
        (int64 `[S]`, host) tokens before the drawn one; None if no row draws at random."""
        rows = self._rows
        if rows is None or rows.slots is not slots:  # in a steady batch, it is the same tensor
            params = self._host[:, slots]
            numbers = params[_TEMPERATURE].nonzero().squeeze(1)
            index = torch.stack((numbers, slots[numbers], numbers))
            rows = self._rows = _DrawingRows(slots, numbers, params[:, numbers], index)
        if not len(rows.numbers):
            return None
        torch.index_select(positions, 0, rows.numbers, out=rows.index[2])
        return Drawing(rows.params, staging.put(rows.index))

    def warm_up(self, logits: Tensor) -> None:
        """Have each row of logits (float32 `[S, vocab]`, device) drawn by the kernels, where there are any. What slots
        have asked for stays."""
        if self._draw_rows is None or not len(logits):
            return
        best, tokens = logits.max(dim=-1) if self._best_rows is None else self._best_rows(logits)
        params, rows = torch.empty_like(self._params), torch.arange(len(logits), device=self.device)
        for which, value in ((_TEMPERATURE, 1.0), (_TOP_K, 2.0), (_TOP_P, 0.5), (_MIN_P, 0.1)):
            params[which] = value
        index = torch.stack((rows, 0 * rows, rows))
        self._draw_rows(logits, best, params, self._seeds, index, tokens)

    def sample(self, logits: Tensor, drawing: Drawing | None) -> Tensor:
        """One token per row, int64 `[S]` on the device.

        `logits` is float32 `[S, vocab]` on the device and is not changed. `drawing` is from `prepare`, and sent. A row
        that holds NaN gets some token of the vocabulary.
        """
        best, tokens = logits.max(dim=-1) if self._best_rows is None else self._best_rows(logits)
        if drawing is None:
            return tokens
        index = drawing.index.tensor
        numbers = None if self._draw_rows is not None else uniforms(self._seeds[index[1]], index[2])
        step = max(1, _MAX_ELEMENTS // logits.shape[1])
        for start in range(0, index.shape[1], step):
            part = slice(start, start + step)
            if self._draw_rows is not None:
                self._draw_rows(logits, best, self._params, self._seeds, index[:, part], tokens)
                continue
            assert numbers is not None
            rows, on_device = index[0, part], self._params[:, index[1, part]]
            temperature, exact = on_device[_TEMPERATURE].float(), self.device.type != "cpu"
            weights = weights_of(logits.index_select(0, rows), best[rows], temperature, exact=exact)
            _filter(weights, drawing.params[:, part], on_device)
            tokens[rows] = _draw(weights, numbers[part])
        return tokens


def weights_of(logits: Tensor, best: Tensor, temperature: Tensor, *, exact: bool) -> Tensor:
    """Whole numbers in proportion to `softmax(logits / temperature)`, 2**34 for the likeliest; overwrites `logits`.

    With `exact`, exponentials are the nearest float32 numbers: they are rounded from float64. Without, they are those
    of torch for float32, which are quicker on a CPU, and whose last bit depends on its vector units.
    """
    scaled = logits.sub_(best[:, None]).div_(temperature[:, None]).clamp_min_(NEVER)
    powers = scaled.double().exp_().float() if exact else scaled.exp_()
    return powers.mul_(UNIT).round_()


def _filter(weights: Tensor, host: Tensor, device: Tensor) -> None:
    """Set what top_k, top_p and min_p exclude to 0, in this order. `host` and `device` hold the rows' parameters.

    Each filter keeps the tokens above a threshold, so tokens of equal probability are kept or excluded together.
    """
    vocab = weights.shape[1]
    rows = ((host[_TOP_K] > 0) & (host[_TOP_K] < vocab)).nonzero().squeeze(1)
    if len(rows):
        most = int(host[_TOP_K, rows].max())
        rows = rows.to(weights.device)
        part = weights.index_select(0, rows)
        last = device[_TOP_K, rows].to(torch.int64)[:, None] - 1
        least = part.topk(most).values.gather(1, last)
        weights.index_copy_(0, rows, part.masked_fill_(part < least, 0))
    rows = (host[_TOP_P] < 1).nonzero().squeeze(1)
    if len(rows):
        rows = rows.to(weights.device)
        part = weights.index_select(0, rows)
        wanted = device[_TOP_P, rows, None] * part.sum(1, keepdim=True, dtype=torch.float64)
        edge = _nucleus_edge(part, wanted, _FIRST_CANDIDATES)
        weights.index_copy_(0, rows, part.masked_fill_(part < edge, 0))
    if bool((host[_MIN_P] > 0).any()):
        weights.masked_fill_(weights < (device[_MIN_P] * UNIT).float()[:, None], 0)


def _nucleus_edge(weights: Tensor, wanted: Tensor, candidates: int) -> Tensor:
    """The smallest weight `[R, 1]` in the smallest set of tokens whose weights add up to at least `wanted` `[R, 1]`.

    Only the `candidates` largest weights are sorted; rows that need more are searched again among eight times more.
    """
    top = weights.topk(min(candidates, weights.shape[1])).values
    sums = top.cumsum(1, dtype=torch.float64)
    size = (sums - top < wanted).sum(1, keepdim=True).clamp_min_(1)
    edge = top.gather(1, size - 1)
    if candidates < weights.shape[1]:
        short = (sums[:, -1:] < wanted).squeeze(1).nonzero().squeeze(1)
        if len(short):
            edge[short] = _nucleus_edge(weights[short], wanted[short], 8 * candidates)
    return edge


def _draw(weights: Tensor, numbers: Tensor) -> Tensor:
    """The tokens at `numbers` (float64 `[R]` in [0, 1)) of the cumulative distributions of `weights` `[R, vocab]`.

    First the block of tokens is found, then the token in it: adding up blocks is much faster than a running sum.
    """
    rows, vocab = weights.shape
    blocks = pad(weights, (0, -vocab % _BLOCK)).view(rows, -1, _BLOCK)
    sums = blocks.sum(2, dtype=torch.float64).cumsum(1)
    # A number below 1 times a whole number below 2**53 rounds to less than that number: some sum is larger. And what
    # is left of it inside the block is a difference that float64 holds exactly.
    target = numbers[:, None] * sums[:, -1:]
    block = torch.searchsorted(sums, target, right=True).clamp_max_(sums.shape[1] - 1)
    target -= pad(sums, (1, 0)).gather(1, block)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK)).squeeze(1).cumsum(1, dtype=torch.float64)
    token = block * _BLOCK + torch.searchsorted(inside, target, right=True)
    return token.squeeze(1).clamp_max_(vocab - 1)
