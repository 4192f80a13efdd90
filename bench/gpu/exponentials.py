"""Whether the weights that tokens are drawn from can depend on whose float64 exponential is used. Needs no GPU.

    python -m bench.gpu.exponentials

`weights_of` rounds exponentials from float64 to float32, then to whole numbers. Libraries' float64 exponentials err by
one unit in the last place at most (CUDA's and SLEEF's, which torch uses on CPUs, say so). For every float32 argument
that gives neither 1 nor 0, the two numbers that are one unit from the true one must give the same weight. The true ones
are looked up, with Python's decimal, where torch's is less than four units from a border between two float32 numbers.
"""

import math
import sys
from decimal import Decimal, getcontext

import click
import torch

from worker_proc.sampler import NEVER, UNIT

_LEAST = -27  # exp(-2**-27) is 1 in float32
_NEAR = 4


def can_differ(argument: float) -> bool:
    """Whether two float64 numbers within a unit of the true exponential have different weights."""
    exact = Decimal(argument).exp()
    unit = Decimal(math.ulp(float(exact)))
    ends = torch.tensor([float(exact - unit), float(exact + unit)], dtype=torch.float64)
    low, high = ends.float().mul_(UNIT).round_().tolist()
    return bool(low != high)


@click.command()
def main() -> None:
    getcontext().prec = 60
    torch.set_num_threads(1)
    total, quick, near, other = 0, 0, 0, []
    for exponent in range(_LEAST, 6):
        first, last = (int(torch.tensor(-(2.0**e)).view(torch.int32)) for e in (exponent, exponent + 1))
        arguments = torch.arange(first, last, dtype=torch.int32).view(torch.float32)
        arguments = arguments[arguments >= NEVER]
        powers = arguments.double().exp_()
        border = ((powers.view(torch.int64) & 0x1FFFFFFF) - 0x10000000).abs() < _NEAR
        total, near = total + len(arguments), near + int(border.sum())
        quick += int((arguments.exp() != powers.float()).sum())
        other += [argument for argument in arguments[border].tolist() if can_differ(argument)]
    print(f"{total:,} arguments, {near} of them less than {_NEAR} units of float64 from a border of float32")
    print(f"arguments whose weight can differ: {other or 'none'}")
    print(f"torch's float32 exponential has another last bit for {quick / total:.1%} of all arguments")
    sys.exit(bool(other))


if __name__ == "__main__":
    main()
