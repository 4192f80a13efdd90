"""A step of nobody's, so that kernels and lazy parts are ready before the first request."""

import torch
from torch import Tensor

from worker_proc.attention.interface import TILE_COLUMNS, ForwardBatch, SharedPages
from worker_proc.kv_cache import KVCache
from worker_proc.shared_pages import max_tiles


def idle_step(cache: KVCache, chunk: int, decodes: int, columns: int, shared: bool = False) -> ForwardBatch:
    """A chunk of so many tokens, if any, and decodes of one token each, all on the scratch page, in a page table of
    `columns`; with `shared`, the decodes have tiles of no tokens in common."""
    device, lengths = cache.device, [chunk] * (chunk > 0) + [1] * decodes

    def fill(*shape: int, value: int = 0) -> Tensor:
        return torch.full(shape, value, dtype=torch.int64, device=device)

    ends = torch.tensor(lengths, device=device)
    return ForwardBatch(
        token_ids=fill(chunk + decodes),
        positions=torch.cat((torch.arange(chunk, device=device), fill(decodes))),
        slot_mapping=fill(chunk + decodes, value=cache.scratch_page * cache.page_size),
        page_table=fill(len(lengths), columns, value=cache.scratch_page),
        kv_lens=ends,
        q_lens=lengths,
        kv_lens_host=lengths,
        num_prefill_rows=int(chunk > 0),
        logit_rows=ends.cumsum(0) - 1,
        shared=SharedPages(fill(decodes), fill(decodes), fill(max_tiles(decodes), TILE_COLUMNS)) if shared else None,
    )
