"""What a step tells the device: numbers laid together on the host and sent in one copy, and what then happens."""

from collections.abc import Callable

import torch
from torch import Tensor

_RESERVED = 17  # 2^17 numbers of 8 bytes are what a step of many long prompts sends
_IN_FLIGHT = 4  # steps that are launched or whose buffers are about to be free, one more than seen


def reserve_pinned(device: torch.device | str) -> None:
    """Have torch keep pinned memory for steps on a GPU, by powers of two: to get some later holds up a step."""
    if torch.device(device).type == "cuda":
        for power in range(_RESERVED + 1):
            _ = [torch.empty(1 << power, dtype=torch.int64, pin_memory=True) for _ in range(_IN_FLIGHT)]


class Staged:
    """A tensor that is on the device, or will be when its `Staging` is sent."""

    __slots__ = ("_sent", "_tensor")

    def __init__(self, tensor: Tensor, *, sent: bool = True) -> None:
        self._tensor = tensor
        self._sent = sent

    @property
    def tensor(self) -> Tensor:
        """On the device. Raises RuntimeError before it was sent."""
        if not self._sent:
            raise RuntimeError("what is staged can be used only after it was sent")
        return self._tensor

    @property
    def host(self) -> Tensor:
        """What will be sent. Raises RuntimeError after that."""
        if self._sent:
            raise RuntimeError("what was sent is no longer on the host")
        return self._tensor

    def arrive(self, tensor: Tensor) -> None:
        """`tensor` holds the same numbers on the device."""
        self._tensor, self._sent = tensor, True


class Staging:
    """Host numbers of one step for `device`. On a CPU nothing is copied.

    On a GPU everything goes through one pinned buffer in one asynchronous copy, so that the host waits for nothing:
    torch's pinned memory is used again only after the copies that read it are done.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._parts: list[Staged] = []
        self._actions: list[Callable[[], object]] = []

    def put(self, part: Tensor) -> Staged:
        """Send `part` (int64 or float64, host, any shape), which must not change before the step is over."""
        if self._device.type == "cpu":
            return Staged(part)
        if part.dtype not in (torch.int64, torch.float64):
            raise TypeError(f"numbers of 8 bytes are sent, not {part.dtype}")
        self._parts.append(Staged(part, sent=False))
        return self._parts[-1]

    def then(self, action: Callable[[], object]) -> None:
        """Do this when everything has been sent, after what was named before."""
        self._actions.append(action)

    def send(self) -> None:
        """Send what was put since the last time, and do what was to be done then."""
        parts, actions = self._parts, self._actions
        self._parts, self._actions = [], []
        if parts:
            flat = [part.host.flatten().view(torch.int64) for part in parts]
            sizes = [len(part) for part in flat]
            buffer = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=True)
            torch.cat(flat, out=buffer)
            sent = torch.split(buffer.to(self._device, non_blocking=True), sizes)
            for part, there in zip(parts, sent, strict=True):
                part.arrive(there.view(part.host.dtype).view(part.host.shape))
        for action in actions:
            action()
