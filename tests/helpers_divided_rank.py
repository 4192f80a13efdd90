"""One tensor-parallel rank of a model that runs through transformers:
`python -m tests.helpers_divided_rank RANK SIZE STORE OUT LEVEL VOCAB CHECKPOINT...`

Generates greedily in float32 from every checkpoint, computes logits in bfloat16 with the native kernels of a level, and
writes what it saw as JSON to OUT.
"""

import gc
import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.helpers_paged import NEW_TOKENS, Row, generate, make_batch, make_prompts
from worker_proc.attention.cpu import CpuAttention
from worker_proc.attention.reference import ReferenceAttention
from worker_proc.cpu.decoder import CpuDecoder
from worker_proc.cpu.features import LEVELS
from worker_proc.cpu.library import load_library
from worker_proc.gguf.names import gguf_files
from worker_proc.kv_cache import KVCache
from worker_proc.models.interface import LanguageModel
from worker_proc.models.registry import load_model
from worker_proc.parallel import TensorParallel
from worker_proc.recurrent import StateRows


def paged_logits(model: LanguageModel, prompt: list[int]) -> torch.Tensor:
    """Of all tokens of a prompt, in chunks and a single token."""
    cache = KVCache(model.kv_spec, 10, 16, slots=1)
    if cache.states is not None:
        cache.states.clear([0])
    row, parts = Row(prompt, list(range(10))), []
    for count in (30, len(prompt) - 31, 1):
        batch = replace(make_batch([row], [count], 16), logit_rows=torch.arange(count), states=StateRows([0]))
        parts.append(model.forward(batch, cache))
        row.cached += count
    return torch.cat(parts)


def native_modules(model: Any) -> dict[str, int]:
    """How many there are of each kind; none in one that the native decoder computes."""
    if isinstance(model, CpuDecoder):
        return {}
    names = (type(module).__name__ for module in model.model.modules())
    return dict(Counter(name for name in names if name.startswith("Native")))


def plain_layers() -> int:
    """Linear layers of torch in bfloat16 that anything holds."""
    gc.collect()
    return sum(type(held) is nn.Linear and held.weight.dtype == torch.bfloat16 for held in gc.get_objects())


def float32_report(path: str, tp: TensorParallel, prompts: list[list[int]]) -> dict[str, Any]:
    model: Any = load_model(path, dtype=torch.float32, device="cpu", tp=tp, attention=ReferenceAttention())
    outputs = [
        generate(model, prompts, NEW_TOKENS, page_size=page_size, chunk=chunk, tp=tp)
        for page_size, chunk in ((16, 10_000), (1, 9))
    ]
    assert outputs[0] == outputs[1]
    return {
        "outputs": outputs[0],
        "kv_heads": model.kv_spec.num_kv_heads,
        "state_bytes": model.kv_spec.bytes_per_state,
        "weight_bytes": sum(weight.nbytes for weight in model.model.parameters()),
    }


def main() -> None:
    rank, size, store, out, vocab = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[6])
    native = next(load_library(level) for level in LEVELS if level == sys.argv[5])
    torch.set_num_threads(1)
    native.set_threads(1)
    tp = TensorParallel.connect(rank, size, store, "cpu", timeout=60)
    prompts, reports = make_prompts(vocab), {}
    for path in sys.argv[7:]:
        exact = float32_report(path, tp, prompts) if not gguf_files(Path(path)) else {}
        rounded: Any = load_model(
            path, dtype=torch.bfloat16, device="cpu", tp=tp, attention=CpuAttention(native), native=native
        )
        reports[path] = {
            "state_bytes": rounded.kv_spec.bytes_per_state,
            "native_modules": native_modules(rounded),
            "plain_layers": plain_layers(),
            "logits": paged_logits(rounded, prompts[4]).tolist(),
        } | exact
    Path(out).write_text(json.dumps(reports))


if __name__ == "__main__":
    main()
