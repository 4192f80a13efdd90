"""A GPU on paper: tensors that say they are on one, and a record of every copy to and from it and of every wait.

What would be an error on a GPU (tensors of the host and of the device in one operation) is one here. Numbers live in
the host's memory, so results are real.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

GPU = torch.device("cuda", 0)
_WAITS = {
    "tolist", "item", "nonzero", "masked_select", "unique", "numpy", "cpu", "bincount", "equal", "is_nonzero",
    "__bool__", "__int__", "__float__", "__index__", "__contains__", "__array__", "allclose",
}  # fmt: skip
_CONSTRUCTORS = {"tensor", "as_tensor", "from_numpy", "frombuffer"}


class GpuTensor(torch.Tensor):
    """Says that it is on the device of a `SimulatedGpu`."""


def on_gpu(tensor: Tensor) -> Tensor:
    """The same memory, as if it were the GPU's."""
    return tensor.as_subclass(GpuTensor)


def on_host(value: Any) -> Any:
    """The memory of all GPU tensors in a structure, as the host's."""
    with torch._C.DisableTorchFunctionSubclass():
        return tree_map(lambda x: x.as_subclass(torch.Tensor) if isinstance(x, GpuTensor) else x, value)


class SimulatedGpu(TorchFunctionMode):
    """While it is entered, `events` lists "upload", "download" (both asynchronous) and "wait: ..."."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self._pinned: set[int] = set()
        self._off = False

    def kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` as something that runs on the GPU: it is given and gives plain tensors."""

        def run(*args: Any) -> Any:
            self._off = True
            try:
                result = function(*on_host(args))
            finally:
                self._off = False
            return tree_map(lambda x: on_gpu(x) if isinstance(x, Tensor) else x, result)

        return run

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self._off:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = [tensor for tensor in tensors if isinstance(tensor, GpuTensor)]
        if func == torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            return GPU if there else func(*args)
        if name == "to":
            return self._to(args, kwargs)
        if name == "copy_":
            self._note_copy(args[0], args[1], bool(kwargs.get("non_blocking")))
        elif there:
            self._check(name, args, kwargs, tensors)
        wanted = kwargs.get("device")
        makes = wanted is not None and torch.device(wanted).type == "cuda"
        if wanted is not None:
            kwargs["device"] = "cpu"
        if makes and name in _CONSTRUCTORS:
            self.events.append(f"wait: {name} on the device")
        pin = kwargs.pop("pin_memory", False) or name == "pin_memory"
        result = on_host(args[0]) if name == "pin_memory" else func(*on_host(args), **on_host(kwargs))
        if pin:
            self._pinned.add(result.untyped_storage().data_ptr())
        stays = (there or makes) and name not in _WAITS
        return tree_map(lambda x: on_gpu(x) if isinstance(x, Tensor) else x, result) if stays else result

    def _to(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        source, *rest = args
        devices = [x for x in (*rest, kwargs.get("device")) if isinstance(x, (str, torch.device))]
        kinds = [x for x in (*rest, kwargs.get("dtype")) if isinstance(x, torch.dtype)]
        goes = bool(devices) and torch.device(devices[0]).type == "cuda"
        result = on_host(source).to(kinds[0]) if kinds else on_host(source)
        if not devices:
            return on_gpu(result) if isinstance(source, GpuTensor) else result
        if goes != isinstance(source, GpuTensor):
            self._note_copy(on_gpu(result) if goes else result, source, bool(kwargs.get("non_blocking")))
            result = result.clone()
        return on_gpu(result) if goes else result

    def _note_copy(self, target: Tensor, source: Tensor, non_blocking: bool) -> None:
        up = isinstance(target, GpuTensor)
        if up == isinstance(source, GpuTensor):
            return
        host = on_host(source if up else target)
        quick = non_blocking and host.untyped_storage().data_ptr() in self._pinned
        kind = "upload" if up else "download"
        self.events.append(kind if quick else f"wait: {kind} of {list(source.shape)}")

    def _check(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> None:
        if name in _WAITS:
            self.events.append(f"wait: {name}")
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            self.events.append("wait: repeat_interleave without a size")
        if name in ("__getitem__", "__setitem__"):
            for index in tree_leaves(args[1]):
                if isinstance(index, Tensor) and index.dtype == torch.bool:
                    self.events.append("wait: a mask as an index")
            if isinstance(args[1], list):
                self.events.append("wait: a list as an index")
        mixed = [tensor for tensor in tensors if not isinstance(tensor, GpuTensor) and tensor.dim()]
        if mixed:
            raise RuntimeError(f"{name}: a tensor of the host {list(mixed[0].shape)} beside one of the GPU")
