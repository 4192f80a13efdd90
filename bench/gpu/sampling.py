"""What drawing tokens takes on the GPU, by search and by sorting, and whether both draw the same.

    python -m bench.gpu.sampling

Medians in microseconds for rows of 151,936 random logits. Both work on the same weights: all tokens must be the same.
"""

import sys
from functools import partial

import click
import torch

from bench.gpu.limits import seconds
from common.sampling_params import DrawParams
from worker_proc.cuda.sampling import draw
from worker_proc.sampler import Sampler
from worker_proc.staging import Staging

CASES = {
    "greedy": DrawParams(temperature=0.0),
    "temperature": DrawParams(0.8),
    "top_k 50": DrawParams(0.8, top_k=50),
    "top_p 0.95": DrawParams(0.8, top_p=0.95),
    "min_p 0.05": DrawParams(0.8, min_p=0.05),
    "top_k 50, top_p 0.95": DrawParams(0.8, 50, 0.95),
}


@click.command()
@click.option("--vocab", default=151_936)
@click.option("--rows", multiple=True, type=int, default=(1, 64, 256))
@torch.inference_mode()
def main(vocab: int, rows: tuple[int, ...]) -> None:
    failed = False
    for count in rows:
        logits = torch.randn(count, vocab, device="cuda") * 3
        slots = torch.arange(count)
        for name, kind in CASES.items():
            draws = [DrawParams(kind.temperature, kind.top_k, kind.top_p, kind.min_p, seed=i) for i in range(count)]
            times, drawn = [], []
            for draw_rows in (draw, None):
                staging = Staging("cuda")
                sampler = Sampler(count, "cuda", draw_rows)
                sampler.set_params(range(count), draws, staging)
                drawing = sampler.prepare(slots, slots * 7, staging)
                staging.send()
                drawn.append(sampler.sample(logits, drawing))
                times.append(seconds(partial(sampler.sample, logits, drawing), repeats=10))
            same = float((drawn[0] == drawn[1]).float().mean())
            failed |= same < 1
            print(
                f"{count:>4} rows, {name:<22} search {times[0] * 1e6:9.1f} us  sort {times[1] * 1e6:9.1f} us  "
                f"same {same:.1%}{' WRONG' * (same < 1)}",
                flush=True,
            )
    sys.exit(failed)


if __name__ == "__main__":
    main()
