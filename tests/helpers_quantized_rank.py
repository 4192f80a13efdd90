"""One of two ranks for tests: `python -m tests.helpers_quantized_rank RANK STORE OUT CHECKPOINT GROUP PROMPTS TOKENS`

Generates greedily, weights in int4 (as they are stored if GROUP is 0) and KV in int8, with the best kernels of this
machine; writes the tokens as JSON.
"""

import json
import sys
from pathlib import Path

import torch

from tests.helpers_paged import generate
from worker_proc.attention.reference import ReferenceAttention
from worker_proc.cpu.library import best_library
from worker_proc.models.registry import load_model
from worker_proc.parallel import TensorParallel
from worker_proc.quantization.scheme import Scheme


def main() -> None:
    rank, store, out, path, group, prompts, tokens = sys.argv[1:]
    torch.set_num_threads(1)
    tp = TensorParallel.connect(int(rank), 2, store, "cpu", timeout=60)
    model = load_model(
        path, dtype=torch.bfloat16, device="cpu", tp=tp, attention=ReferenceAttention(), native=best_library(),
        quantization=Scheme(4, int(group)) if int(group) else None,
    )  # fmt: skip
    outputs = generate(model, json.loads(prompts), int(tokens), int8=True, tp=tp)
    Path(out).write_text(json.dumps(outputs))


if __name__ == "__main__":
    main()
