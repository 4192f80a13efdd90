"""Counter-based random numbers: a pure function of (seed, position), so there is no generator state to keep or lose.

Philox 4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011) in int64 tensor
operations, which give the same bits on every device.
"""

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)  # for counter words 0 and 2
_WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the key words from round to round
_ROUNDS = 10
_MASK = 0xFFFFFFFF


def philox4x32(counter: Tensor, key: Tensor) -> Tensor:
    """The four output words, int64 `[4, N]` in 0 .. 2**32 - 1, for `counter` `[4, N]` and `key` `[2, N]` alike.

    Words 0 and 2 of the state go through one tensor and words 1 and 3 through another, so a round is seven operations
    for any N. A product of two 32-bit words wraps around in int64, which leaves all of its 64 bits in place.
    """
    device = counter.device
    multipliers = torch.tensor(_MULTIPLIERS, dtype=torch.int64, device=device)[:, None]
    weyl = torch.tensor(_WEYL, dtype=torch.int64, device=device)[:, None]
    rounds = torch.arange(_ROUNDS, dtype=torch.int64, device=device)[:, None, None]
    keys = (key + rounds * weyl) & _MASK
    even, odd = counter[0::2], counter[1::2]
    for round_key in keys.unbind():
        product = (even * multipliers).flip(0)
        even = ((product >> 32) ^ odd ^ round_key) & _MASK
        odd = product & _MASK
    return torch.stack((even, odd), dim=1).flatten(0, 1)


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """float64 `[N]`, multiples of 2**-53 in [0, 1), from int64 `seeds` `[N]` (the key) and `positions` `[N]`."""
    zeros = torch.zeros_like(positions)
    counter = torch.stack((positions & _MASK, (positions >> 32) & _MASK, zeros, zeros))
    key = torch.stack((seeds & _MASK, (seeds >> 32) & _MASK))
    high, low = philox4x32(counter, key)[:2]
    bits: Tensor = (high << 21) | (low >> 11)
    return bits.to(torch.float64).mul_(2.0**-53)
