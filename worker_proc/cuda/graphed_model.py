"""Models that a GPU's own decoder does not compute, layer by layer in torch, whose decodes are replayed as CUDA graphs.

Such a step is hundreds of small kernels, whose launches take longer than they do. It becomes a graph if it never waits
for the GPU: mixtures that ask how many tokens each expert has do, and go on without.
"""

import torch
from torch import Tensor

from worker_proc.attention.interface import ForwardBatch
from worker_proc.cuda.attention import TritonAttention
from worker_proc.cuda.graphs import DecodeGraphs, StepInputs, do_all, graph_sizes, recorder
from worker_proc.cuda.pieces import Outputs, Recorder
from worker_proc.kv_cache import KVCache, KVSpec
from worker_proc.models.interface import LanguageModel
from worker_proc.models.loading import Progress


class GraphedModel:
    """A model with `TritonAttention` whose decodes are replayed. Implements `GreedyModel`. `record` is for tests
    without a GPU."""

    def __init__(self, model: LanguageModel, max_rows: int, context_len: int, record: Recorder | None = None) -> None:
        self._model = model
        self._record = record
        self._decodes = DecodeGraphs(self._step, TritonAttention(), max_rows, context_len, shares_pages=False)
        self._logits: Tensor  # of all graphs: their steps write there what they give, so that none keeps memory for it
        self._best: Tensor

    @property
    def kv_spec(self) -> KVSpec:
        """See `LanguageModel`."""
        return self._model.kv_spec

    @property
    def vocab_size(self) -> int:
        """See `LanguageModel`."""
        return self._model.vocab_size

    @torch.inference_mode()
    def capture(self, cache: KVCache, progress: Progress | None = None) -> None:
        """Capture all graphs for `cache`. `progress(done, total)` counts them."""
        most, device = self._decodes.sizes[-1], cache.device
        self._logits = torch.empty(most, self.vocab_size, dtype=torch.float32, device=device)
        self._best = torch.empty(most, dtype=torch.int64, device=device)
        with recorder(device, self._record) as record:
            do_all(self._decodes.captures(cache, record), progress)

    def _step(self, batch: ForwardBatch, cache: KVCache) -> Outputs:
        rows = len(batch.q_lens)
        logits, best = self._logits[:rows], self._best[:rows]
        logits.copy_(self._model.forward(batch, cache))
        torch.argmax(logits, -1, out=best)
        return logits, best

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """See `LanguageModel`."""
        replayed = self._decodes.replay(batch, cache)
        return self._model.forward(batch, cache) if replayed is None else replayed[0]

    @torch.inference_mode()
    def greedy(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """See `GreedyModel`."""
        replayed = self._decodes.replay(batch, cache)
        if replayed is None:
            return self._model.forward(batch, cache).argmax(-1)
        return replayed[1].clone()  # the next replay writes over it


def never_waits(model: LanguageModel, cache: KVCache) -> bool:
    """Whether a decode of `model` leaves the host free, by having torch refuse what would wait for the GPU."""
    batch = StepInputs.idle(1, 1, cache).batch(1, shared=False)
    model.forward(batch, cache)  # what happens once, happens now
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model.forward(batch, cache)
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return False
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    return True


def shared_bytes(max_rows: int, vocab_size: int, columns: int) -> int:
    """Memory of the logits that all graphs share, and of their page table."""
    return graph_sizes(max_rows)[-1] * (vocab_size * torch.float32.itemsize + columns * torch.int64.itemsize)
