"""What native recurrent layers gain over torch's, in processor time of one thread and in the same run.

    python -m bench.cpu_recurrent
    python -m bench.cpu_recurrent --level generic

Both have native products. A layer of torch's is called once for each chunk and once for all decodes.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import click
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from worker_proc.attention.interface import ForwardBatch
from worker_proc.cpu.features import LEVELS, Level, cpu_features
from worker_proc.cpu.library import NativeLibrary, load_library
from worker_proc.cpu.modules import pack_modules
from worker_proc.models.mixers import Mixers, keeps_states
from worker_proc.recurrent import RecurrentStates, StateRows

# as in Qwen3.5-0.8B, Qwen3-Next-80B-A3B, Granite-4.0-H-1B, LFM2-1.2B and Falcon-Mamba-7B
_LAYERS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"hidden_size": 1024, "linear_num_key_heads": 16, "linear_num_value_heads": 16},
    "qwen3_next": {"hidden_size": 2048, "linear_num_key_heads": 16, "linear_num_value_heads": 32},
    "granitemoehybrid": {
        "hidden_size": 1536,
        "mamba_n_heads": 48,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "num_local_experts": 0,
    },
    "lfm2": {"hidden_size": 2048, "layer_types": ["conv"], "conv_L_cache": 3},
    "falcon_mamba": {"hidden_size": 4096, "intermediate_size": 8192, "time_step_rank": 256, "layer_types": None},
}
_SMALL = {
    "num_hidden_layers": 1, "vocab_size": 64, "intermediate_size": 64, "num_experts": 2, "num_experts_per_tok": 1,
    "layer_types": ["linear_attention"], "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
_BATCHES = ([1], [1] * 16, [64], [512], [64] * 4 + [1] * 8)  # tokens of rows
_SECONDS = 1.0  # per figure


class Layer:
    """A recurrent layer of random weights, and states for as many rows as there may be."""

    def __init__(self, kind: str, native: NativeLibrary, own: bool) -> None:
        """`own`: with a native recurrence, not just products."""
        torch.manual_seed(0)
        fields = {name: value for name, value in (_SMALL | _LAYERS[kind]).items() if value is not None}
        config = AutoConfig.for_model(kind, **fields)
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        self._layer = next(module for module in model.modules() if keeps_states(module))
        self._mixers = Mixers(self._layer, native if own else None)
        hidden = int(config.hidden_size)
        with self._mixers.recorded() as recorder:
            self._layer(torch.zeros(1, 8, hidden, dtype=torch.bfloat16))
        self._states = RecurrentStates(tuple(recorder.specs.values()), max(map(len, _BATCHES)), 0)
        self._states.clear(range(self._states.slots))
        pack_modules(self._layer, native, compress=False)
        self.hidden = hidden

    def step(self, x: Tensor, q_lens: list[int]) -> None:
        none = torch.empty(0, dtype=torch.int64)
        chunks = sum(length > 1 for length in q_lens)
        rows = StateRows(list(range(len(q_lens))))
        with self._mixers.on(
            ForwardBatch(none, none, none, none, none, q_lens, q_lens, chunks, none, states=rows), self._states
        ):
            self._layer(x)


def processor_seconds(call: Callable[[], object]) -> float:
    """The least that a call takes."""
    call()
    least, end = float("inf"), time.process_time() + _SECONDS
    while (begin := time.process_time()) < end:
        call()
        least = min(least, time.process_time() - begin)
    return least


@click.command()
@click.option("--level", type=click.Choice(LEVELS), default=cpu_features().levels()[0])
def main(level: Level) -> None:
    torch.set_num_threads(1)
    native = load_library(level)
    native.set_threads(1)
    print(f"{level}, one thread\nlayer         tokens of rows      torch ms  native ms  times as fast")
    for kind in _LAYERS:
        plain, own = (Layer(kind, native, own) for own in (False, True))
        for q_lens in _BATCHES:
            x = torch.randn(1, sum(q_lens), own.hidden).to(torch.bfloat16)
            before, after = (processor_seconds(partial(layer.step, x, q_lens)) for layer in (plain, own))
            counts = " + ".join(f"{q_lens.count(n)} x {n}" for n in sorted(set(q_lens), reverse=True))
            print(f"{kind:13} {counts:18} {before * 1e3:9.2f} {after * 1e3:10.2f} {before / after:14.1f}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
