"""Collectives between the tensor-parallel ranks of one machine.

Nothing here may be reached from another machine: the rendezvous is a file, and the sockets that gloo and NCCL open
between the ranks are bound to the loopback interface.
"""

import atexit
import logging
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor

from worker_proc.errors import ModelError
from worker_proc.shared_memory import SharedMemory, supported

log = logging.getLogger(__name__)

# torch's stubs hide or miss most of what is used here.
dist: Any = torch.distributed

_LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"


class Sums(Protocol):
    """A quicker way for some sums of a step, see `worker_proc/cuda/symmetric.py`."""

    def takes(self, tensor: Tensor) -> bool: ...

    def all_reduce(self, tensor: Tensor) -> Tensor: ...


class TensorParallel:
    """A rank and the group that it computes with. Every collective must be called by all ranks in the same order.

    A dead or silent peer makes a collective raise RuntimeError, at the latest after `timeout` seconds. `collectives`
    counts those that are done, and `waiting` is true inside of one, for who watches from another thread.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        group: Any = None,
        device: torch.device | str = "cpu",
        memory: SharedMemory | None = None,
    ) -> None:
        """Use `TensorParallel()` for a single rank and `connect` for several. `group` is a torch c10d backend, `memory`
        a quicker way for the collectives of a step where there is one."""
        if not 0 <= rank < size:
            raise ModelError("rank", rank, f"must be in 0..{size - 1} for {size} ranks")
        if size > 1 and group is None:
            raise ValueError("a group of several ranks needs a process group: use TensorParallel.connect")
        self.rank = rank
        self.size = size
        self.group = group
        self.device = torch.device(device)
        self.memory = memory
        self.sums: Sums | None = None
        self.collectives = 0
        self.waiting = False

    @classmethod
    def connect(
        cls,
        rank: int,
        size: int,
        store_path: str | Path,
        device: torch.device | str = "cpu",
        timeout: float = 60.0,
    ) -> "TensorParallel":
        """Join `size` ranks that meet in the file `store_path` (fresh for each group; made by whoever comes first).

        Shared memory and gloo on a CPU, NCCL on a CUDA device, and symmetric memory for small sums where there is any.
        Raises RuntimeError if the others are not there within `timeout` seconds.
        """
        if size == 1:
            return cls(rank, size, None, device)
        if not 0 <= rank < size:
            raise ModelError("rank", rank, f"must be in 0..{size - 1} for {size} ranks")
        device = torch.device(device)
        store = dist.FileStore(str(store_path), size)
        patience = timedelta(seconds=timeout)
        store.set_timeout(patience)
        if device.type == "cuda":
            group = _nccl_group(store, rank, size, device, patience)
        else:
            group = _gloo_group(store, rank, size, patience)
        joined = cls(rank, size, group, device)
        if device.type == "cuda":
            from worker_proc.cuda.symmetric import SymmetricSum

            joined.sums = SymmetricSum.connect(group, rank, size, device, joined.min)
        if device.type == "cpu" and supported():
            joined.memory = joined._share_memory(store, timeout)
        # gloo's threads abort the process if they are still there when the interpreter is torn down
        atexit.register(joined.close)
        return joined

    def close(self) -> None:
        """Leave the group; collectives are no longer possible. Calling it again does nothing."""
        self.memory = None
        self.sums = None
        group, self.group = self.group, None
        if group is not None and self.device.type == "cuda":
            dist.destroy_process_group()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Replace `tensor` (contiguous) on every rank by the sum over ranks, and return it."""
        if self.size > 1:
            self.waiting = True
            if self.memory is not None:
                self.memory.all_reduce(tensor)
            elif self.sums is not None and self.sums.takes(tensor):
                self.sums.all_reduce(tensor)
            else:
                self.group.allreduce([tensor]).wait()  # NCCL: on a stream of its own, for which that of the step waits
            self._done()
        return tensor

    def gather_to_rank0(self, shard: Tensor) -> Tensor:
        """Join shards `[S, n]` of the last dimension: rank 0 gets `[S, n * size]` in rank order, others `[0, n]`."""
        if self.size == 1:
            return shard
        shard = shard.contiguous()
        self.waiting = True
        gathered = self._gather(shard) if self.memory is None else self.memory.gather(shard)
        self._done()
        return shard[:0] if gathered is None else torch.cat(gathered, dim=-1)

    def _gather(self, shard: Tensor) -> list[Tensor] | None:
        options = dist.GatherOptions()
        options.rootRank = 0
        if self.rank != 0:
            self.group.gather([], [shard], options).wait()
            return None
        parts = [torch.empty_like(shard) for _ in range(self.size)]
        self.group.gather([parts], [shard], options).wait()
        return parts

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Overwrite `tensor` (contiguous) on every rank with that of rank 0, and return it."""
        if self.size > 1:
            self.waiting = True
            if self.memory is not None:
                self.memory.broadcast(tensor)
            else:
                self.group.broadcast(tensor, 0).wait()
            self._done()
        return tensor

    def _done(self) -> None:
        self.waiting = False
        self.collectives += 1

    def _share_memory(self, store: Any, timeout: float) -> SharedMemory | None:
        """Memory that all ranks have opened, or None on every rank when one of them could not."""
        store.set(f"pid{self.rank}", str(os.getpid()))
        handle = -1
        if self.rank == 0:
            try:
                handle, path = SharedMemory.create(self.size)
            except OSError:
                path = Path("/nowhere")
            store.set("memory", str(path))
        pids = [int(store.get(f"pid{rank}")) for rank in range(self.size)]
        memory = None
        try:
            memory = SharedMemory(Path(store.get("memory").decode()), self.rank, self.size, pids, timeout)
        except OSError as error:
            log.warning("no shared memory between ranks, they use gloo: %s", error)
        everyone = self.min(int(memory is not None))
        if handle >= 0:
            os.close(handle)
        return memory if everyone else None

    def min(self, value: int) -> int:
        """The smallest `value` that any rank passes, e.g. the number of pages that fits everywhere."""
        if self.size == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.int64, device=self.device)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        self.group.allreduce([tensor], options).wait()
        return int(tensor.item())


def _gloo_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    # Built directly, because init_process_group leaves gloo to pick an interface from the host's name; the explicit
    # device pins it to loopback without touching the environment.
    gloo = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = timeout
    return gloo(store, rank, size, options)


def _nccl_group(store: Any, rank: int, size: int, device: torch.device, timeout: timedelta) -> Any:
    # NCCL takes the interface of its bootstrap sockets from the environment only.
    os.environ["NCCL_SOCKET_IFNAME"] = f"={_LOOPBACK_INTERFACE}"
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=timeout, device_id=device)
    return dist.group.WORLD
