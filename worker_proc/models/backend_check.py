"""A proof by example, at load time, that a transformers model computes the same through paged attention.

Architectures can depend on masks, positions or caches in ways that no signature shows (ALiBi, positions counted from
the start of the batch, state kept between tokens). Two short sequences are run in chunks and single tokens, packed
into shared steps on scattered pages, and their logits compared with those of the model's own attention.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from worker_proc.attention.interface import ForwardBatch
from worker_proc.errors import ModelError
from worker_proc.kv_cache import KVCache

if TYPE_CHECKING:
    from worker_proc.models.transformers_backend import TransformersModel

_PAGE_SIZE = 4
_PAGES = ([5, 0, 7, 2], [3, 6])  # of sequence 0 (15 tokens) and 1 (6 tokens)
_LENGTHS = (15, 6)
# (sequence, first token, end) of the rows of each step: chunks first, then decodes
_STEPS = (((0, 0, 9), (1, 0, 5)), ((0, 9, 14), (1, 5, 6)), ((0, 14, 15),))
# relative error of the logits: rounding is far below, a wrong mask or position far above
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}


def check_against_plain_attention(model: "TransformersModel", device: torch.device) -> None:
    """Raises ModelError with the model type if the two ways of computing the same logits disagree."""
    tokens = [(torch.arange(length, device=device) * 7 + 3) % model.vocab_size for length in _LENGTHS]
    plain = [model.forward_plain(sequence) for sequence in tokens]
    cache = KVCache(model.kv_spec, 8, _PAGE_SIZE, device)
    for step in _STEPS:
        logits = model.forward(_batch(step, tokens, device), cache)
        for row, (sequence, _, end) in enumerate(step):
            expected = plain[sequence][end - 1]
            error = ((logits[row] - expected).norm() / expected.norm()).item()
            if not error <= _TOLERANCE.get(model.kv_spec.dtype, 0.1):
                reason = f"logits through paged attention differ from the model's own by {error:.1%}"
                raise ModelError("model_type", model.config.model_type, reason)


def _batch(step: Sequence[tuple[int, int, int]], tokens: list[Tensor], device: torch.device) -> ForwardBatch:
    def tensor(values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    positions = [range(start, end) for _, start, end in step]
    tables = [_PAGES[sequence] for sequence, _, _ in step]
    slots = [
        table[position // _PAGE_SIZE] * _PAGE_SIZE + position % _PAGE_SIZE
        for table, row in zip(tables, positions, strict=True)
        for position in row
    ]
    q_lens = [end - start for _, start, end in step]
    kv_lens = [end for _, _, end in step]
    width = max(len(table) for table in tables)
    return ForwardBatch(
        token_ids=torch.cat([tokens[sequence][start:end] for sequence, start, end in step]),
        positions=tensor([position for row in positions for position in row]),
        slot_mapping=tensor(slots),
        page_table=tensor([table + [0] * (width - len(table)) for table in tables]),
        kv_lens=tensor(kv_lens),
        q_lens=q_lens,
        kv_lens_host=kv_lens,
        num_prefill_rows=sum(count > 1 for count in q_lens),
        logit_rows=tensor(q_lens).cumsum(0) - 1,
    )
