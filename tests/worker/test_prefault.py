"""Memory that is handed out before it is written."""

import threading
from pathlib import Path

import pytest
import torch

from worker_proc.cpu import prefault
from worker_proc.cpu.memory import HUGE_PAGE as HUGE
from worker_proc.cpu.memory import HugePages
from worker_proc.cpu.prefault import Prefault, populate


def resident() -> int:
    """Bytes of this process that are in memory."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss:"))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefault, "_LEAST_BYTES", 0)


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="reads Linux's account of the process")
@pytest.mark.usefixtures("small")
def test_memory_is_there_before_it_is_written_and_keeps_what_it_holds() -> None:
    memory = HugePages(64 * HUGE).take(64 * HUGE, torch.uint8)
    memory[5] = 7
    if not populate(-(-memory.data_ptr() // HUGE) * HUGE, HUGE):
        pytest.skip("a kernel before 5.14")
    before = resident()
    work = Prefault([memory[: 32 * HUGE], memory[32 * HUGE :]], threads=2)
    assert work.wait(30)
    assert resident() - before >= 60 * HUGE
    assert memory[5] == 7
    assert memory.count_nonzero() == 1


@pytest.mark.usefixtures("small")
def test_every_whole_huge_page_is_populated_once_the_first_of_each_tensor_first() -> None:
    whole = HugePages(9 * HUGE).take(9 * HUGE, torch.uint8)
    first, second = whole[: 3 * HUGE], whole[3 * HUGE : 8 * HUGE + 100]
    seen: list[tuple[int, int]] = []
    assert Prefault([first, second], 1, lambda begin, size: not seen.append((begin, size))).wait(30)
    at = [(begin - whole.data_ptr()) // HUGE for begin, _ in seen]
    assert at == [0, 3, 1, 4, 2, 5, 6, 7]
    assert {size for _, size in seen} == {HUGE}


def test_a_small_cache_is_left_alone() -> None:
    seen: list[int] = []
    memory = HugePages(2 * HUGE).take(2 * HUGE, torch.uint8)
    assert Prefault([memory], 1, lambda begin, size: not seen.append(begin)).wait(30)
    assert not seen


@pytest.mark.usefixtures("small")
def test_a_system_that_cannot_is_asked_once_per_thread() -> None:
    memory = HugePages(8 * HUGE).take(8 * HUGE, torch.uint8)
    seen: list[int] = []

    def refuse(begin: int, size: int) -> bool:
        seen.append(begin)
        return False

    assert Prefault([memory], 2, refuse).wait(30)
    assert len(seen) == 2


@pytest.mark.usefixtures("small")
def test_after_stepping_back_work_goes_on_only_while_the_worker_rests() -> None:
    memory = HugePages(8 * HUGE).take(8 * HUGE, torch.uint8)
    go, asked, resting = threading.Event(), threading.Event(), threading.Event()
    seen: list[int] = []

    def advise(begin: int, size: int) -> bool:
        go.wait(30)
        seen.append(begin)
        return True

    def rests() -> bool:
        asked.set()
        return resting.is_set()

    work = Prefault([memory], 1, advise)
    work.step_back(rests)
    go.set()
    assert asked.wait(30)
    assert len(seen) <= 1  # what had begun
    assert not work.wait(0)
    resting.set()
    assert work.wait(30)
    assert len(seen) == 8
