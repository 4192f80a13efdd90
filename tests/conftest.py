"""Shared fixtures: short private directories (Unix socket paths are limited) and hypothesis without time limits."""

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from common.memory import settle_memory

if shutil.which("nvidia-smi") is None:  # before anything imports Triton, whose own functions look for it then
    os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile("soak", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("soak"), max_examples=25)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--soak",
        type=int,
        help="runs of the scheduler's state machine; all tests then, properties thoroughly",
    )
    parser.addoption("--emulate-amx", action="store_true", help="see tests/emulated_amx.py")
    parser.addoption("--emulate-arm", action="store_true", help="see tests/emulated_arm.py")
    parser.addoption("--fuzz-seconds", type=int, help="of new inputs for each description of the HTTP API")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    """The tests' tensors are small: several threads would mostly wait for each other, for whole time slices where other
    processes want the same cores (the tests of models took sixteen times as long)."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A private directory with a path short enough for Unix sockets, removed afterwards."""
    path = Path(tempfile.mkdtemp(prefix="rz-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what takes many seconds, where no soak is asked for. `make test` has it all."""
    if config.getoption("--soak") is None:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("soak")])
        items[:] = [item for item in items if not item.get_closest_marker("soak")]


def pytest_collection_finish() -> None:
    """What was imported stays: looking for garbage in it, again and again, took a seventh of the time of all tests."""
    settle_memory()


def pytest_configure(config: pytest.Config) -> None:
    """Before tests are collected, which asks for the CPU's features."""
    settings.load_profile("quick" if config.getoption("--soak") is None else "soak")
    config.addinivalue_line("markers", "soak: takes many seconds, and runs where `--soak N` is given")
    if config.getoption("--emulate-amx"):
        from tests.emulated_amx import emulate_amx

        emulate_amx()
    if config.getoption("--emulate-arm"):
        from tests.emulated_arm import emulate_arm

        emulate_arm()
    # a shell's background jobs ignore SIGINT, and so would every child that a test wants to interrupt
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
