"""Which sums go through symmetric memory, and how. torch's operations, which need two GPUs, have a stand-in."""

from typing import Any

import pytest
import torch
from torch import Tensor

from worker_proc.cuda.symmetric import SymmetricSum
from worker_proc.parallel import TensorParallel


class Ops:
    """torch.ops.symm_mem of a rank whose peers hold the same numbers."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.calls: list[str] = []

    def one_shot_all_reduce_out(self, shared: Tensor, op: str, group: str, out: Tensor) -> Tensor:
        self.calls.append("one shot")
        return out.copy_(shared * self.size)

    def two_shot_all_reduce_(self, shared: Tensor, op: str, group: str) -> Tensor:
        self.calls.append("two shots")
        return shared.mul_(self.size)

    def multimem_all_reduce_(self, shared: Tensor, op: str, group: str) -> Tensor:
        self.calls.append("multicast")
        return shared.mul_(self.size)


def make(size: int, *, multicast: bool) -> tuple[SymmetricSum, Ops]:
    ops = Ops(size)
    return SymmetricSum(torch.zeros(2**20, dtype=torch.uint8), "0", size, multicast=multicast, ops=ops), ops


@pytest.mark.parametrize(
    ("size", "multicast", "count", "wanted"),
    [
        (2, False, 4096, "one shot"),
        (2, False, 2**17, "one shot"),
        (2, False, 2**17 + 8, "two shots"),
        (2, True, 8, "one shot"),  # two ranks gain nothing by the switch
        (4, True, 8, "multicast"),
    ],
)
def test_sums(size: int, multicast: bool, count: int, wanted: str) -> None:
    summed, ops = make(size, multicast=multicast)
    tensor = torch.randn(count // 8, 8).to(torch.bfloat16)
    before = tensor.clone()
    assert summed.takes(tensor)
    assert summed.all_reduce(tensor) is tensor
    assert torch.equal(tensor, before * size) and ops.calls == [wanted]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(8, dtype=torch.float16),
        torch.zeros(8, dtype=torch.int64),
        torch.zeros(3),  # not a multiple of 16 bytes
        torch.zeros(0),
        torch.zeros(2**18 + 4),
    ],
)
def test_others_go_through_the_group(tensor: Tensor) -> None:
    class Work:
        def wait(self) -> None: ...

    class Group:
        def __init__(self) -> None:
            self.tensors: list[Tensor] = []

        def allreduce(self, tensors: list[Tensor]) -> Work:
            self.tensors += tensors
            return Work()

    summed, ops = make(2, multicast=False)
    assert not summed.takes(tensor)
    group: Any = Group()
    tp = TensorParallel(0, 2, group)
    tp.sums = summed
    tp.all_reduce(tensor)
    assert group.tensors == [tensor] and not ops.calls
    small = torch.ones(4)
    assert tp.all_reduce(small).tolist() == [2.0] * 4 and len(group.tensors) == 1 and tp.collectives == 2


def test_ranks_without_gpus_agree_on_none() -> None:
    asked: list[int] = []

    def agree(value: int) -> int:
        asked.append(value)
        return value

    assert SymmetricSum.connect(None, 0, 2, torch.device("cpu"), agree) is None
    assert asked == [0]
