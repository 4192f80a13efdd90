"""Sampled tokens on their way from the device to the host, which need not wait for them."""

import torch
from torch import Tensor


class DrawnTokens:
    """`tokens` int64 `[S]` of a step that has been handed to the device. On a GPU a copy into pinned memory follows the
    step on its stream, so that the next step can be launched before the host has seen the tokens of this one."""

    def __init__(self, tokens: Tensor) -> None:
        self._host = tokens
        self._copied: torch.cuda.Event | None = None
        if tokens.device.type == "cuda":
            self._host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._host.copy_(tokens, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(tokens.device))

    @property
    def ready(self) -> bool:
        """Whether `tolist` would not wait."""
        return self._copied is None or bool(self._copied.query())  # type: ignore[no-untyped-call]

    def tolist(self) -> list[int]:
        """The tokens, waiting for them."""
        if self._copied is not None:
            self._copied.synchronize()
        tokens: list[int] = self._host.tolist()
        return tokens
