"""Benchmarks of what one process computes run, and print what they are asked for. Nothing else would notice when the
parts that they measure take another form; their figures are of no interest here."""

import importlib
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from worker_proc.cpu.features import cpu_features
from worker_proc.cpu.library import load_library

MODEL = Path(__file__).parents[2] / "demo_model"
LEVEL = cpu_features().levels()[0]


@dataclass(frozen=True)
class Case:
    module: str
    arguments: str
    lines: tuple[str, ...]  # what some line begins with
    constants: dict[str, Any] = field(default_factory=dict)  # that make it small


_FEW = {"_MEMORY": 2**20, "_REPEATS": 1}
CASES = {
    "attention": Case("cpu_attention", "--threads 1 --cases 'decode 1 x 128'", ("decode 1 x 128",), _FEW),
    "attention, int8": Case("cpu_attention", "--threads 1 --int8 --cases 'decode 1 x 128'", ("decode 1 x 128",), _FEW),
    "kernels": Case("cpu_kernels", "--threads 1 --rows 1,8 --shapes o", ("o ",), {"_MEMORY": 1}),
    "kernels, 12 bits": Case("cpu_kernels", "--threads 1 --rows 1 --shapes o --compressed", ("o ",), {"_MEMORY": 1}),
    "kernels, int4": Case(
        "cpu_kernels", "--threads 1 --rows 1 --shapes o --quantization int4 --zeros", ("o ",), {"_MEMORY": 1}
    ),
    "recurrent layers": Case(
        "cpu_recurrent", "", ("lfm2 ", "qwen3_5_text ", "falcon_mamba "), {"_SECONDS": 0.001, "_BATCHES": ([1], [8])}
    ),
    "steps": Case(
        "cpu_steps", f"--model '{MODEL}' --threads 1 --repeats 1 --cases 'decode 1 x 192,shared'",
        ("decode 1 x 192", "shared 8 x", "| attention", "| all"),
    ),
    "compression": Case(
        "compression", f"--model '{MODEL}' --threads 1 --decodes 1 --prompts 16 --repeats 4", ("| decode", "| prefill")
    ),
    "sampling": Case("sampling_cost", "--rows 2 --vocab 1000 --known 16 --rounds 1", ("| nothing",)),
    "speculation": Case("speculation_cost", "--steps 20 --repeats 1 --batches 1", ("| 1 |",)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_benchmark_runs(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(f"bench.{case.module}")
    for name, value in case.constants.items():
        monkeypatch.setattr(module, name, value)
    output = run(module.main, case.arguments)
    for beginning in case.lines:
        assert any(line.startswith(beginning) for line in output), output


@pytest.mark.skipif(cpu_features().machine != "x86_64", reason="heads are looked through in int8 on x86 alone")
def test_the_one_of_heads_runs() -> None:
    from bench.cpu_head import main

    output = run(main, "--threads 1 --vocabulary 16384 --repeats 1")
    rows = [[float(number) for number in line.split()] for line in output[2:]]
    assert [int(row[0]) for row in rows] == [1, 2, 4, 8, 16, 32, 64, 128]
    assert all(len(row) == 8 and min(row) > 0 for row in rows)


def run(main: Any, arguments: str) -> list[str]:
    """The lines that it prints."""
    try:
        result = CliRunner().invoke(main, shlex.split(arguments), catch_exceptions=False)
    finally:
        load_library(LEVEL).set_threads(1)  # for the tests that come after
    assert result.exit_code == 0, result.output
    return result.output.splitlines()
