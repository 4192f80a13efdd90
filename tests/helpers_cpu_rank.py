"""One tensor-parallel rank of the CPU decoder: `python -m tests.helpers_cpu_rank RANK SIZE STORE OUT LEVEL MODEL...`

Computes `probe_batch` with every checkpoint and writes the logits that rank 0 sees, and the greedy tokens, as JSON.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from tests.helpers_paged import Row, make_batch
from worker_proc.attention.interface import ForwardBatch
from worker_proc.attention.reference import ReferenceAttention
from worker_proc.cpu.decoder import CpuDecoder
from worker_proc.cpu.features import LEVELS
from worker_proc.cpu.library import load_library
from worker_proc.kv_cache import KVCache
from worker_proc.models.registry import load_model
from worker_proc.parallel import TensorParallel

PAGES, PAGE_SIZE = 24, 8


def probe_batch(vocab_size: int) -> ForwardBatch:
    """Three prompts, computed from their first token, logits of several of their tokens."""
    generator = torch.Generator().manual_seed(4)
    lengths = (3, 40, 21)
    prompts = [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]
    rows = [Row(prompt, list(range(6 * i, 6 * i + 6))) for i, prompt in enumerate(prompts)]
    return replace(make_batch(rows, list(lengths), PAGE_SIZE), logit_rows=torch.tensor([63, 0, 2, 17, 42, 2]))


def main() -> None:
    rank, size, store, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    native = next(load_library(level) for level in LEVELS if level == sys.argv[5])
    torch.set_num_threads(1)
    tp = TensorParallel.connect(rank, size, store, "cpu", timeout=60)
    reports = []
    for path in sys.argv[6:]:
        model = load_model(
            path, dtype=torch.bfloat16, device="cpu", tp=tp, attention=ReferenceAttention(), native=native
        )
        assert isinstance(model, CpuDecoder)
        batch = probe_batch(model.vocab_size)
        cache = KVCache(model.kv_spec, PAGES, PAGE_SIZE)
        model.forward(replace(batch, logit_rows=batch.logit_rows[:0]), cache)  # as in a chunk of a prompt
        logits = model.forward(batch, cache)
        tokens = model.greedy(batch, KVCache(model.kv_spec, PAGES, PAGE_SIZE))
        reports.append({"logits": logits.tolist(), "tokens": tokens.tolist(), "shape": list(logits.shape)})
    out.write_text(json.dumps(reports))


if __name__ == "__main__":
    main()
