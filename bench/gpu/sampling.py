"""What drawing tokens takes on the GPU, by search and by sorting, and whether both draw the same.

    python -m bench.gpu.sampling [--small]

Medians in microseconds for rows of 151,936 random logits, weights included; what sorts waits for the GPU on its way, so
that its times have some of the host's in them. Weights of the kernel and of torch must have the same bits, and all
tokens must be the same.
"""

import sys
from functools import partial

import click
import torch

from bench.gpu.limits import seconds
from common.sampling_params import DrawParams
from worker_proc.cuda.sampling import Weights, draw_rows, make_weights
from worker_proc.sampler import Sampler, weights_of
from worker_proc.staging import Staging

CASES = {
    "greedy": DrawParams(temperature=0.0),
    "temperature": DrawParams(0.8),
    "top_k 50": DrawParams(0.8, top_k=50),
    "top_p 0.95": DrawParams(0.8, top_p=0.95),
    "min_p 0.05": DrawParams(0.8, min_p=0.05),
    "top_k 50, top_p 0.95": DrawParams(0.8, 50, 0.95),
}


def weights(logits: torch.Tensor) -> bool:
    """Whether both make the same weights, and what that takes."""
    count = len(logits)
    params, rows = torch.full((4, count), 0.8, dtype=torch.float64, device="cuda"), torch.arange(count, device="cuda")
    index, best = torch.stack((rows, rows, rows)), logits.max(-1).values

    def by_kernel() -> Weights:
        return make_weights(logits, best, params, index)

    def by_torch() -> torch.Tensor:
        return weights_of(logits.index_select(0, rows), best[rows], params[0].float(), exact=True)

    same = torch.equal(by_kernel().weights, by_torch())
    times = [seconds(make, repeats=10, queued=True) * 1e6 for make in (by_kernel, by_torch)]
    bits = "same bits" if same else "OTHER BITS: WRONG"
    print(f"{count:>4} rows, weights: kernel {times[0]:9.1f} us, torch {times[1]:9.1f} us, {bits}", flush=True)
    return same


@click.command()
@click.option("--small", is_flag=True, help="Few rows of a small vocabulary, for slow tools.")
@torch.inference_mode()
def main(small: bool) -> None:
    failed, vocab = False, 9001 if small else 151_936
    for count in (3,) if small else (1, 64, 256):
        logits = torch.randn(count, vocab, device="cuda") * 3
        failed |= not weights(logits)
        slots = torch.arange(count)
        for name, kind in CASES.items():
            draws = [DrawParams(kind.temperature, kind.top_k, kind.top_p, kind.min_p, seed=i) for i in range(count)]
            times, drawn = [], []
            for how in (draw_rows, None):
                staging = Staging("cuda")
                sampler = Sampler(count, "cuda", how)
                sampler.set_params(range(count), draws, staging)
                drawing = sampler.prepare(slots, slots * 7, staging)
                staging.send()
                drawn.append(sampler.sample(logits, drawing))
                times.append(seconds(partial(sampler.sample, logits, drawing), repeats=10, queued=True))
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
