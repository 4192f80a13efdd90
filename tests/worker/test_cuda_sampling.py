"""What runs on a GPU besides the model: sampler, random numbers and the slots' page tables give what they give on the
CPU. Needs a GPU, as on a CPU it would compare a thing with itself."""

import pytest
import torch

from common.sampling_params import DrawParams
from worker_proc.random import uniforms
from worker_proc.sampler import Sampler
from worker_proc.staging import Staging

pytest.importorskip("triton")

from worker_proc.cuda.sampling import draw_rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="compares a GPU with the CPU")

DRAWS = [
    DrawParams(temperature=0.0),
    DrawParams(temperature=0.7, seed=3),
    DrawParams(temperature=1.5, top_k=7, seed=4),
    DrawParams(top_p=0.8, seed=5),
    DrawParams(min_p=0.08, seed=6),
    DrawParams(temperature=1.4, top_k=50, top_p=0.9, min_p=0.01, seed=7),
]


def test_random_numbers_have_the_same_bits() -> None:
    seeds, positions = torch.arange(1000) * 2**33 - 5, torch.arange(1000) * 7919
    assert torch.equal(uniforms(seeds.cuda(), positions.cuda()).cpu(), uniforms(seeds, positions))


@pytest.mark.parametrize("vocab", [40, 1000, 151_936])
def test_draws_equal_those_of_the_cpu(vocab: int) -> None:
    rows = 48
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1)) * 3
    draws = [DRAWS[i % len(DRAWS)] for i in range(rows)]
    slots, positions = torch.arange(rows), torch.arange(rows) * 13
    drawn = []
    for device in ("cpu", "cuda"):
        staging = Staging(device)
        sampler = Sampler(rows, device, draw_rows if device == "cuda" else None)
        sampler.set_params(range(rows), draws, staging)
        drawing = sampler.prepare(slots, positions, staging)
        staging.send()
        drawn.append(sampler.sample(logits.to(device), drawing).cpu())
    differing = int((drawn[0] != drawn[1]).sum())
    assert differing <= 1, "only an exponential's last bit may move a draw, which is rare"
