"""Where Triton kernels are tested: on the GPU where there is one, else in Triton's interpreter on the CPU.

conftest.py chooses, before anything imports Triton.
"""

from importlib.util import find_spec

import torch

from worker_proc.attention.interface import TILE_COLUMNS, ForwardBatch, SharedPages
from worker_proc.shared_pages import Tile, layout

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu" and find_spec("triton") is not None:
    from tests.quick_triton import quicken

    quicken()


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


def shared_pages(tiles: list[Tile], rows: int, page_size: int, idle: int = 0) -> SharedPages:
    """The tiles of a batch of `rows` decodes on `DEVICE`, and some that are idle, as in a graph."""
    skipped, levels, numbers = (torch.tensor(part, dtype=torch.int64) for part in layout(tiles, rows, page_size))
    table = torch.cat((numbers.view(-1, TILE_COLUMNS), torch.zeros(idle, TILE_COLUMNS, dtype=torch.int64)))
    return SharedPages(skipped.to(DEVICE), levels.to(DEVICE), table.to(DEVICE))
