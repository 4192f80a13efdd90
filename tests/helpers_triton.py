"""Where Triton kernels are tested: on the GPU where there is one, else in Triton's interpreter on the CPU.

conftest.py chooses, before anything imports Triton.
"""

import torch

from worker_proc.attention.interface import ForwardBatch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def on_device(batch: ForwardBatch) -> ForwardBatch:
    """The batch with its tensors on `DEVICE`."""
    return ForwardBatch(
        batch.token_ids.to(DEVICE),
        batch.positions.to(DEVICE),
        batch.slot_mapping.to(DEVICE),
        batch.page_table.to(DEVICE),
        batch.kv_lens.to(DEVICE),
        batch.q_lens,
        batch.kv_lens_host,
        batch.num_prefill_rows,
        batch.logit_rows.to(DEVICE),
    )
