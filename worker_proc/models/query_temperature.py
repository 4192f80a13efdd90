"""Llama 4's scales of queries, by the positions of the batch.

Its layers without rotation scale each query by the logarithm of its position, and count positions from the start of
what they are given: of a batch of several sequences, that is wrong.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class QueryTemperature:
    """Keeps a model from scaling queries by itself, but in `own`."""

    def __init__(self, model: nn.Module) -> None:
        self._modules: list[Any] = [module for module in model.modules() if _scales(module)]
        self._set(False)

    @contextmanager
    def own(self) -> Iterator[None]:
        """The model scales queries by itself, of one sequence from its start."""
        self._set(True)
        try:
            yield
        finally:
            self._set(False)

    def _set(self, on: bool) -> None:
        for module in self._modules:
            module.attn_temperature_tuning = on


def tempered(module: Any, query: Tensor, positions: Tensor) -> Tensor:
    """`query` `[1, H, T, D]` at `positions` `[T]`, scaled where the layer `module` does that."""
    if not _scales(module):
        return query
    scales = torch.log1p(torch.floor((positions.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
    scaled: Tensor = query * scales[:, None]
    return scaled.to(query.dtype)


def _scales(module: Any) -> bool:
    named = hasattr(module, "floor_scale") and hasattr(module, "attn_scale")
    return named and bool(module.config.attn_temperature_tuning) and not module.use_rope
