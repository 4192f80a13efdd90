"""One tensor-parallel rank for tests: `python -m tests.helpers_tp_rank RANK SIZE STORE OUT VOCAB CHECKPOINT...`

Generates greedily from every checkpoint and writes what it saw as JSON to OUT.
"""

import json
import sys
from pathlib import Path
from typing import Any

import psutil
import torch

from tests.helpers_paged import NEW_TOKENS, generate, make_prompts
from worker_proc.attention.reference import ReferenceAttention
from worker_proc.models.registry import load_model
from worker_proc.parallel import TensorParallel


def collectives(tp: TensorParallel) -> dict[str, Any]:
    halves = torch.full((3,), tp.rank + 0.5, dtype=torch.bfloat16)
    gathered = tp.gather_to_rank0(torch.full((2, 2), float(tp.rank)))
    return {
        "sum": tp.all_reduce(halves).tolist(),
        "gathered": gathered.tolist(),
        "gathered_shape": list(gathered.shape),
        "broadcast": tp.broadcast(torch.full((2,), tp.rank + 7)).tolist(),
        "min": tp.min(10 - tp.rank),
    }


def main() -> None:
    rank, size, store, out, vocab = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5])
    torch.set_num_threads(1)
    tp = TensorParallel.connect(rank, size, store, "cpu", timeout=60)
    sockets = psutil.Process().net_connections(kind="inet")
    report: dict[str, Any] = {
        "addresses": sorted({connection.laddr.ip for connection in sockets}),
        "collectives": collectives(tp),
        "outputs": {},
        "kv_heads": {},
    }
    for path in sys.argv[6:]:
        model = load_model(path, dtype=torch.float32, device="cpu", tp=tp, attention=ReferenceAttention())
        outputs = [
            generate(model, make_prompts(vocab), NEW_TOKENS, page_size=page_size, chunk=chunk, tp=tp)
            for page_size, chunk in ((16, 10_000), (1, 9))
        ]
        assert outputs[0] == outputs[1]
        report["outputs"][path] = outputs[0]
        report["kv_heads"][path] = model.kv_spec.num_kv_heads
    report["transformers"] = "transformers" in sys.modules
    Path(out).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
