"""Rhizome beside other systems: the same weights, the same precision, the same machine, in turn.

    python -m bench.compare --model DIR --vllm VENV --openvino VENV --openvino-model DIR_OV \
        --llama-cpp BUILD/bin/llama-server --llama-cpp-model FILE.gguf --transformers VENV --repeats 3

Every system runs every case once per repeat, in an order that rotates, while the others rest (stopped by a signal, so
that they use no CPU; Rhizome is ended and started again). Before its cases a system has some seconds to settle, like a
server that starts before its users come: where a host hands out memory slowly, whoever has just started pays for that
in the middle of steps. The figures are medians over the repeats. The floor is what the machine's own rates, measured
before, between and after, allow: decode steps read weights and keys and values once, prompts take their arithmetic. A
system that is not named is left out. bench.compare_plot draws what --json-file holds.
"""

import ctypes
import json
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import click

from bench.clusters import ROOT, machine
from bench.peers.systems import BenchError, Case, HttpSystem, InProcess, Rhizome, System, free_port
from scheduler_proc.cost_model import CostError, ModelShape
from worker_proc.cpu.library import best_library
from worker_proc.cpu.machine import num_cpus

CASES = (
    Case("in 128 out 128, concurrency 1", 3, 0, 128, 128, 1),
    Case("in 128 out 128, concurrency 8", 16, 0, 128, 128, 8),
    Case("in 128 out 128, concurrency 32", 32, 0, 128, 128, 32),
    Case("in 1024 out 16, concurrency 4", 12, 0, 1024, 16, 4),
    Case("512 common + 64 own in, out 32, concurrency 8", 32, 512, 64, 32, 8),
)
FIGURES = {"ttft_ms": "TTFT p50, ms", "itl_p99_ms": "ITL p99, ms", "itl_max_ms": "ITL max, ms"}
WARM_UP = Case("warm up", 8, 0, 128, 16, 8)
READ_BYTES = 2**30
Results = dict[str, dict[str, list[dict[str, float]]]]  # figures by system and case, or "start" and "memory"
LLAMA_CPP_TOKENS = 18432  # 2 GiB with the shape of Qwen3-0.6B


def measure_limits() -> tuple[float, float]:
    """Bytes read per second and floating-point operations per second, the best of five each, on all CPUs."""
    import torch  # takes longer than all that else is loaded for --help, or for a look at the cases

    library = best_library()
    if library is None:
        raise click.ClickException("the floor needs the native kernels, which do not build here")
    library.set_threads(num_cpus())
    memory = torch.ones(READ_BYTES // 4, dtype=torch.int32)
    bandwidth = flops = 0.0
    for _ in range(5):
        started = time.perf_counter()
        library.functions.rhizome_read(ctypes.c_void_p(memory.data_ptr()), READ_BYTES)
        bandwidth = max(bandwidth, READ_BYTES / (time.perf_counter() - started))
        started = time.perf_counter()
        done = library.functions.rhizome_multiply(200_000)
        flops = max(flops, done / (time.perf_counter() - started))
    library.set_threads(1)
    return bandwidth, flops


def floor_s(case: Case, shape: ModelShape, bandwidth: float, flops: float) -> float:
    """Seconds that a case takes when every step runs at the machine's rates: arithmetic of all prompt tokens that have
    to be computed, then decode steps that read the weights, what all share once, and each request's own rest.
    Every token counts in every layer, though of a prompt's the last layer needs no more than keys and values (3 %)."""
    rounds = case.requests / case.concurrency
    computed = case.prefix + case.requests * case.input
    pairs = case.requests * (case.input * case.prefix + case.input**2 / 2)
    arithmetic = (
        shape.flops_per_token * computed + shape.flops_per_pair * pairs + shape.flops_per_sample * case.requests
    )
    own = case.input + case.output / 2
    step = shape.weight_bytes + shape.kv_bytes_per_token * (case.prefix + case.concurrency * own)
    step_flops = case.concurrency * (shape.flops_per_token + shape.flops_per_sample)
    return arithmetic / flops + rounds * (case.output - 1) * max(step / bandwidth, step_flops / flops)


def run_all(
    systems: list[System], cases: list[Case], repeats: int, settle_s: float
) -> tuple[Results, list[tuple[float, float]]]:
    """results[system][case] of all repeats, and the limits of the machine before each."""
    results: Results = defaultdict(lambda: defaultdict(list))
    limits = [measure_limits()]
    for repeat in range(repeats):
        for system in systems[repeat % len(systems) :] + systems[: repeat % len(systems)]:
            if repeat == 0:
                system.start()
            else:
                system.wake()
            results[system.name]["start"].append({"start_s": system.start_s})
            time.sleep(settle_s)
            system.run(WARM_UP)
            for case in cases:
                figures = system.run(case)
                results[system.name][case.name].append(figures)
                click.echo(f"  {system.name}: {case.name}: {figures[case.rate]:.1f} tok/s", err=True)
            results[system.name]["memory"].append({"bytes": system.memory()})
            system.rest()
        limits.append(measure_limits())
    return results, limits


def print_table(names: list[str], cases: list[Case], results: Results, floors: dict[str, float]) -> None:
    """Systems beside each other, Rhizome first, and beside the floors, which are rates."""

    def medians(key: str, figure: str) -> list[float]:
        return [statistics.median(figures[figure] for figures in results[name][key]) for name in names]

    click.echo("| case | " + " | ".join(names) + " | floor | Rhizome / best other | Rhizome / floor |")
    click.echo("|---" * (len(names) + 4) + "|")
    for case in cases:
        rates = medians(case.name, case.rate)
        ahead = f"{rates[0] / max(rates[1:]):.2f}" if len(rates) > 1 else ""
        floor, of_floor = "", ""
        if case.name in floors:
            floor, of_floor = f"{floors[case.name]:.1f}", f"{rates[0] / floors[case.name]:.0%}"
        unit = "output tok/s" if case.rate.startswith("output") else "total tok/s"
        shown = " | ".join(f"{rate:.1f}" for rate in rates)
        click.echo(f"| {case.name}, {unit} | {shown} | {floor} | {ahead} | {of_floor} |")
        for figure, label in FIGURES.items():
            click.echo(f"| {label} | " + " | ".join(f"{v:.0f}" for v in medians(case.name, figure)) + " | | | |")
    for key, figure, scale, label in (
        ("start", "start_s", 1.0, "start-up, s"),
        ("memory", "bytes", 2**30, "memory, GiB"),
    ):
        click.echo(f"| {label} | " + " | ".join(f"{v / scale:.1f}" for v in medians(key, figure)) + " | | | |")


def _counted(case: Case) -> int:
    """Tokens that the rate of a case counts."""
    prompts = case.requests * (case.prefix + case.input) if case.rate == "total_tokens_per_s" else 0
    return case.requests * case.output + prompts


@click.command(context_settings={"show_default": True})
@click.option("--model", type=click.Path(path_type=Path, exists=True), required=True, help="The checkpoint, bfloat16.")
@click.option("--vllm", type=click.Path(path_type=Path), default=None, help="Environment with vLLM's CPU build.")
@click.option("--vllm-preload", default="", help="LD_PRELOAD of a second vLLM, such as libiomp5.so; not run if empty.")
@click.option("--openvino", type=click.Path(path_type=Path), default=None, help="Environment with openvino-genai.")
@click.option("--openvino-model", type=click.Path(path_type=Path), default=None, help="The model as converted for it.")
@click.option("--llama-cpp", type=click.Path(path_type=Path), default=None, help="llama.cpp's llama-server.")
@click.option("--llama-cpp-model", type=click.Path(path_type=Path), default=None, help="The model as a GGUF file.")
@click.option("--transformers", type=click.Path(path_type=Path), default=None, help="Environment with transformers 5.")
@click.option("--vocabulary", default=8000, help="Prompts are of token ids below.")
@click.option(
    "--flag", "flags", multiple=True, help="A further argument of launch.py, such as --flag=--kv-memory=3GiB."
)
@click.option("--only", default="", help="Cases whose names begin so, separated by semicolons; all if empty.")
@click.option("--repeats", default=3)
@click.option("--settle", default=15.0, help="Seconds without requests after every start, which count for none.")
@click.option("--json-file", type=click.File("w"), default=None)
def main(
    model: Path, vllm: Path | None, vllm_preload: str, openvino: Path | None, openvino_model: Path | None,
    llama_cpp: Path | None, llama_cpp_model: Path | None, transformers: Path | None, vocabulary: int,
    flags: tuple[str, ...], only: str, repeats: int, settle: float, json_file: Any,
) -> None:  # fmt: skip
    """Print one table: systems beside each other and beside the floor."""
    cases = [case for case in CASES if case.name.startswith(tuple(only.split(";")))]
    if not cases:
        raise click.BadParameter("no case begins so", param_hint="--only")
    for name, program, converted in (
        ("openvino", openvino, openvino_model),
        ("llama-cpp", llama_cpp, llama_cpp_model),
    ):
        if (program is None) != (converted is None):
            raise click.BadParameter(f"--{name} and --{name}-model go together", param_hint=f"--{name}")
    port = free_port()
    launch = [sys.executable, str(ROOT / "launch.py")]
    command = [*launch, "--model", str(model), "--context-len", "4096", "--port", str(port)]
    systems: list[System] = [Rhizome("Rhizome", [*command, *flags], port, vocabulary)]
    if vllm is not None:
        for name, preload in (("vLLM", ""), ("vLLM, preload", vllm_preload)):
            if name == "vLLM" or preload:
                systems.append(_vllm(name, vllm, model, preload, vocabulary))
    if openvino is not None and openvino_model is not None:
        arguments = (str(openvino_model), str(vocabulary))
        systems.append(InProcess("OpenVINO GenAI", openvino / "bin" / "python", "openvino_cases.py", *arguments))
    if llama_cpp is not None and llama_cpp_model is not None:
        systems.append(llama_server(llama_cpp, llama_cpp_model, vocabulary))
    if transformers is not None:
        arguments = (str(model), str(vocabulary), str(num_cpus()))
        systems.append(InProcess("transformers", transformers / "bin" / "python", "transformers_cases.py", *arguments))
    try:
        shape = ModelShape.of_config(model)
    except CostError as error:
        shape = None
        click.echo(f"  no floor is shown: {error}", err=True)
    try:
        results, limits = run_all(systems, cases, repeats, settle)
    except BenchError as error:
        raise click.ClickException(str(error)) from None
    finally:
        for system in systems:
            system.stop()
    bandwidth = statistics.median(b for b, _ in limits)
    flops = statistics.median(f for _, f in limits)
    click.echo(f"{machine()}; {repeats} repeats, medians; {bandwidth / 1e9:.1f} GB/s, {flops / 1e12:.2f} TFLOP/s\n")
    floors: dict[str, float] = {}
    if shape is not None:
        floors = {case.name: _counted(case) / floor_s(case, shape, bandwidth, flops) for case in cases}
    print_table([system.name for system in systems], cases, results, floors)
    if json_file is not None:
        rates_of = {case.name: case.rate for case in cases}
        report = {"machine": machine(), "limits": limits, "floors": floors, "rates": rates_of, "results": results}
        json.dump(report, json_file, indent=1)


def _vllm(name: str, venv: Path, model: Path, preload: str, vocabulary: int) -> HttpSystem:
    port = free_port()
    env = {
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{num_cpus() - 1}", "LD_PRELOAD": preload,
    }  # fmt: skip
    command = [
        str(venv / "bin" / "vllm"), "serve", str(model), "--served-model-name", "m", "--host", "127.0.0.1",
        "--port", str(port), "--dtype", "bfloat16", "--max-model-len", "4096",
    ]  # fmt: skip
    return HttpSystem(name, command, port, vocabulary, env)


def llama_server(server: Path, model: Path, vocabulary: int) -> HttpSystem:
    """llama.cpp's server, with a slot for every request of the widest case and one KV cache for all of them, twice what
    any case needs. Its prompt cache is on, as by default."""
    port = free_port()
    threads, slots = str(num_cpus()), max(case.concurrency for case in CASES)
    command = [
        str(server), "--model", str(model), "--host", "127.0.0.1", "--port", str(port), "--parallel", str(slots),
        "--kv-unified", "--ctx-size", str(LLAMA_CPP_TOKENS), "--threads", threads, "--threads-batch", threads,
    ]  # fmt: skip
    return HttpSystem("llama.cpp", command, port, vocabulary, ready="/health")


if __name__ == "__main__":
    main()
