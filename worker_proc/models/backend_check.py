"""A proof by example, at load time, that a transformers model computes the same through paged attention.

Architectures can depend on masks, positions or caches in ways that no signature shows (ALiBi, positions counted from
the start of the batch, state kept between tokens). Four short sequences are run in chunks and single tokens, packed
into shared steps on scattered pages, and their logits compared with those of the model's own attention.

In 16 bits, rounding alone can send a token to another expert of a mixture, which moves its row and, a little, those
that follow. What is computed wrongly moves nearly all rows of a kind, so there it is the better rows that count.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from worker_proc.attention.interface import ForwardBatch
from worker_proc.errors import ModelError
from worker_proc.kv_cache import KVCache
from worker_proc.recurrent import StateRows

if TYPE_CHECKING:
    from worker_proc.models.transformers_backend import TransformersModel

_PAGE_SIZE = 4
_PAGES = ([5, 0, 7, 2], [3, 6, 9, 14], [1, 4, 12, 8], [10, 15, 11, 13])  # of each sequence
_LENGTH = 15
# (sequence, first token, end) of the rows of each step: chunks first, then decodes
_STEPS = (
    ((0, 0, 9), (1, 0, 7), (2, 0, 10), (3, 0, 11)),
    ((0, 9, 13), (1, 7, 12), (3, 11, 13), (2, 10, 11)),
    ((2, 11, 13), (0, 13, 14), (1, 12, 13), (3, 13, 14)),
    ((0, 14, 15), (1, 13, 14), (2, 13, 14), (3, 14, 15)),
)
# relative error of a row's logits: rounding is far below, a wrong mask or position far above
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}
_JUDGED = {torch.float16: 0.25, torch.bfloat16: 0.25}  # the quantile of the errors; else the largest


def check_against_plain_attention(model: "TransformersModel", device: torch.device) -> None:
    """Raises ModelError with the model type if the two ways of computing the same logits disagree."""
    counted = torch.arange(_LENGTH, device=device) * 7 + 3
    tokens = [(counted + 50 * sequence) % model.vocab_size for sequence in range(len(_PAGES))]
    plain = [model.forward_plain(sequence) for sequence in tokens]
    cache = KVCache(model.kv_spec, sum(map(len, _PAGES)), _PAGE_SIZE, device, slots=len(_PAGES))
    if cache.states is not None:
        cache.states.clear(range(cache.states.slots))
    errors: dict[str, list[Tensor]] = {"first chunks": [], "later chunks": [], "single tokens": []}
    for step in _STEPS:
        logits = model.forward(_batch(step, tokens, device), cache)
        counts = [end - start if len(logits) else 0 for _, start, end in step]
        rows = torch.split(logits, counts)
        for (sequence, start, end), found in zip(step, rows, strict=True):
            expected = plain[sequence][start:end]
            kind = "first chunks" if not start else "later chunks" if end - start > 1 else "single tokens"
            errors[kind].append((found - expected).norm(dim=-1) / expected.norm(dim=-1))
    dtype = model.kv_spec.dtype
    if not len(plain[0]):
        return  # of several ranks, only one sees logits
    for kind, parts in errors.items():
        error = torch.cat(parts).quantile(_JUDGED.get(dtype, 1.0)).item()  # NaN if one is
        if not error <= _TOLERANCE.get(dtype, 0.1):
            reason = f"logits of {kind} through paged attention differ from the model's own by {error:.1%}"
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
        logit_rows=torch.arange(sum(q_lens), device=device),
        states=StateRows([sequence for sequence, _, _ in step]),
    )
