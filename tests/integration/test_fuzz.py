"""A minute of fuzzing: HTTP from its descriptions, and what takes bytes under atheris. `--fuzz-seconds` makes it
longer, as do `python -m tests.fuzz.http` and `python -m tests.fuzz.wire`."""

import platform
import sys
from pathlib import Path

import pytest

from tests.fuzz import http, wire
from tests.fuzz.targets import TARGETS

on_linux_x86 = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="atheris has no packages for other platforms"
)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("api", http.APIS)
def test_http(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], api: str) -> None:
    seconds: int = request.config.getoption("--fuzz-seconds")
    assert http.run([api], seconds, seed=None), capsys.readouterr().out


@on_linux_x86
@pytest.mark.parametrize("target", TARGETS)
def test_bytes(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert wire.fuzz(target, 2, tmp_path), capsys.readouterr().out
