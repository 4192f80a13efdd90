"""One of two ranks that check collectives round after round: `python -m tests.helpers_tp_rounds RANK STORE WAY`.

WAY is "memory", or "gloo" as on machines where ranks cannot share memory. Sizes are nothing, below, at and beyond what
fits in one piece of shared memory.
"""

import sys

import torch

import worker_proc.parallel
from worker_proc.parallel import TensorParallel

SIZES = (0, 1, 7, 4096, 2**18, 2**18 + 1, 700_001)
DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def main() -> None:
    rank, store, way = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    if way == "gloo":
        worker_proc.parallel.supported = lambda: False
    tp = TensorParallel.connect(rank, 2, store, timeout=30)
    assert (tp.memory is not None) == (way == "memory")
    choose = torch.Generator().manual_seed(3)
    for i in range(120):
        size = SIZES[int(torch.randint(len(SIZES), (1,), generator=choose))]
        zero, one = ((torch.arange(size) % 13 + r + i % 5).to(DTYPES[i % 3]) for r in range(2))
        own = one if rank else zero
        assert torch.equal(tp.all_reduce(own.clone()), zero + one), i
        assert torch.equal(tp.broadcast(own.clone()), zero), i
        gathered = tp.gather_to_rank0(own[None])
        assert gathered.shape[0] == 0 if rank else torch.equal(gathered, torch.cat((zero, one))[None]), i
    tp.close()


if __name__ == "__main__":
    main()
