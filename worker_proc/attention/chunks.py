"""Attention that begins anew after so many tokens (Llama 4's layers with rotation), by any backend.

A query sees the keys of its own chunk of the sequence alone. Chunks are whole pages, and backends know positions by
lengths only: so what a row computes within a chunk is a row of its own, whose page table begins there.
"""

from dataclasses import replace

import torch

from worker_proc.attention.interface import ForwardBatch


def in_chunks(batch: ForwardBatch, size: int, page_size: int) -> ForwardBatch:
    """`batch` as layers see it that attend within chunks of `size` tokens, whole pages: the same tokens, in as many or
    more rows."""
    if max(batch.kv_lens_host) <= size:
        return batch
    rows: list[int] = []
    first_pages: list[int] = []
    q_lens: list[int] = []
    kv_lens: list[int] = []
    num_prefill_rows = 0
    for row, (count, end) in enumerate(zip(batch.q_lens, batch.kv_lens_host, strict=True)):
        start = end - count
        while start < end:
            base = start // size * size
            stop = min(base + size, end)
            rows.append(row)
            first_pages.append(base // page_size)
            q_lens.append(stop - start)
            kv_lens.append(stop - base)
            num_prefill_rows += row < batch.num_prefill_rows
            start = stop
    device = batch.page_table.device
    columns = torch.arange(-(-max(kv_lens) // page_size), device=device)
    columns = columns + torch.tensor(first_pages, device=device)[:, None]
    table = batch.page_table[torch.tensor(rows, device=device)]
    return replace(
        batch,
        page_table=table.gather(1, columns.clamp_max(table.shape[1] - 1)),
        kv_lens=torch.tensor(kv_lens, device=device),
        q_lens=q_lens,
        kv_lens_host=kv_lens,
        num_prefill_rows=num_prefill_rows,
        chunk_starts=None,
        shared=None,
    )
