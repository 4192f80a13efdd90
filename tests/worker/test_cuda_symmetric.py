"""Which sums go through symmetric memory, and how. torch's operations, which need two GPUs, have a stand-in."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from worker_proc.cuda import symmetric
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


def fails(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("not here")


def works(*args: Any, **kwargs: Any) -> Any:
    return torch.zeros(2**23, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("allocate", "meet", "ranks", "asked"),
    [
        (works, works, 2, [1, 1, 1, 1]),
        (fails, fails, 2, [1, 0]),  # does not make others wait at the meeting
        (works, fails, 2, [1, 1, 0]),
        (works, works, 3, [1, 1, 1, 0]),  # more than the stand-in adds up
    ],
)
def test_ranks_go_on_only_where_all_of_them_have_come(
    allocate: Callable[..., Any],
    meet: Callable[..., Any],
    ranks: int,
    asked: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ops, found = Ops(2), []
    monkeypatch.setattr(symmetric, "_reachable", lambda size, device: True)
    monkeypatch.setattr(symmetric_memory, "empty", allocate)
    monkeypatch.setattr(symmetric_memory, "rendezvous", meet)
    monkeypatch.setattr(torch.ops, "symm_mem", ops)

    def agree(value: int) -> int:
        found.append(value)
        return value

    ops.one_shot_all_reduce_out = lambda shared, op, group, out: (ops.calls.append("one shot"), out.fill_(3.0))[1]
    ops.two_shot_all_reduce_ = lambda shared, op, group: (ops.calls.append("two shots"), shared.fill_(3.0))[1]
    group = SimpleNamespace(group_name="0")
    made = SymmetricSum.connect(group, 0, ranks, torch.device("cpu"), agree)
    assert found == asked and (made is not None) == all(asked)
    assert ops.calls == ([] if len(asked) < 4 else ["one shot", "two shots"]), "no rank leaves a sum out"


def test_no_rank_goes_on_where_another_one_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric, "_reachable", lambda size, device: True)
    monkeypatch.setattr(symmetric_memory, "empty", works)
    monkeypatch.setattr(symmetric_memory, "rendezvous", lambda *args: pytest.fail("the other rank never comes"))
    answers = iter([1, 0])  # of the group: the other one has no buffer
    made = SymmetricSum.connect(SimpleNamespace(group_name="0"), 0, 2, torch.device("cpu"), lambda _: next(answers))
    assert made is None
