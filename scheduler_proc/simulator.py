"""`python -m scheduler_proc.simulator`: the scheduler against a cost model and a workload. See docs/simulator.md."""

import dataclasses
import itertools
import json
import time
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from common.config import CacheConfig, ConfigError, SchedulerConfig
from scheduler_proc.cost_model import NO_OVERHEADS, CostError, CostModel, Costs, ModelShape, Overheads, Roofline
from scheduler_proc.kv_manager import KVManager
from scheduler_proc.scheduler import Scheduler
from scheduler_proc.sim_report import Report, SimulationReport, as_table, as_text
from scheduler_proc.simulation import Simulation, Stuck
from scheduler_proc.trace import read_trace
from scheduler_proc.workload import KINDS, Lengths, Recipe, Traffic, Vocabulary, Workload, WorkloadError, generate

DEFAULT_KV_TOKENS = 131072
OPTIONS: dict[str, Any] = {
    **typing.get_type_hints(SchedulerConfig),
    "page_size": int,
    "kv_tokens": int,
    "prefix_cache": bool,
    "host_kv_tokens": int,
    "snapshots": int,
}


@dataclass(frozen=True, slots=True)
class Setup:
    """What is simulated beside the workload."""

    scheduler: SchedulerConfig
    num_pages: int
    page_size: int
    context_len: int
    cost: CostModel
    overheads: Overheads = NO_OVERHEADS
    prefix_cache: bool = True
    host_pages: int = 0
    transfer_s: float = 0.0  # of a page to the host or back
    snapshots: int | None = None  # of a recurrent model


def simulate(
    setup: Setup, workload: Workload, vocabulary: Vocabulary, check_every: int = 0, *, leaps: bool = True
) -> SimulationReport:
    """Run a workload to its end. Raises Stuck, or InvariantViolation when `check_every` is not 0. Without `leaps` every
    step is taken by itself, which changes nothing but the time it takes."""
    started = time.perf_counter()
    kv = KVManager(
        setup.num_pages,
        setup.page_size,
        prefix_cache=setup.prefix_cache,
        host_pages=setup.host_pages,
        recurrent=setup.snapshots is not None,
        snapshots=setup.snapshots or 0,
    )
    scheduler = Scheduler(setup.scheduler, kv, setup.context_len)
    traffic = Traffic(workload, vocabulary)
    simulation = Simulation(
        scheduler, traffic, vocabulary, setup.cost, setup.overheads, check_every, leaps, setup.transfer_s
    )
    simulation.run()
    report, meter, stats = Report.of(list(simulation.records.values())), simulation.meter, scheduler.stats()
    steps, busy = max(1, meter.steps), max(1, meter.busy)
    return SimulationReport(
        report=report,
        steps=meter.steps,
        mean_batch=meter.rows / steps,
        mean_step_tokens=meter.tokens / steps,
        worker_busy=meter.busy / 1e9 / report.duration_s if report.duration_s else 0.0,
        preemptions=stats["preempted"],
        evicted_pages=stats["evicted_pages"],
        copied_pages=stats["copied_pages"],
        offloaded_pages=stats["offloaded_pages"],
        loaded_pages=stats["loaded_pages"],
        discarded_tokens=stats["discarded_tokens"],
        kv_usage_mean=meter.pages / busy / setup.num_pages,
        kv_usage_peak=meter.most_pages / setup.num_pages,
        wall_s=time.perf_counter() - started,
    )


def configure(
    values: dict[str, Any],
    context_len: int,
    cost: CostModel,
    overheads: Overheads = NO_OVERHEADS,
    token_transfer_s: float = 0.0,
) -> Setup:
    """A setup from values of OPTIONS; `token_transfer_s` is the time of a token's keys and values to the host tier or
    back. Raises ConfigError when one is out of range."""
    fields = {f.name for f in dataclasses.fields(SchedulerConfig)}
    values = dict(values)
    host_tokens, snapshots = values.pop("host_kv_tokens", 0), values.pop("snapshots", None)
    scheduler = SchedulerConfig(**{k: v for k, v in values.items() if k in fields})
    cache = CacheConfig(**{"kv_tokens": DEFAULT_KV_TOKENS, **{k: v for k, v in values.items() if k not in fields}})
    assert cache.kv_tokens is not None
    pages, host_pages = cache.kv_tokens // cache.page_size, host_tokens // cache.page_size
    if host_tokens and not (cache.prefix_cache and host_pages > 0):
        raise ConfigError("host_kv_tokens must be 0, or at least one page and with the prefix cache")
    if snapshots is not None and (snapshots < 0 or host_tokens or scheduler.speculation != "off"):
        raise ConfigError("snapshots must be at least 0, without a host tier and speculation")
    setup = Setup(scheduler, pages, cache.page_size, context_len, cost, overheads, cache.prefix_cache)
    transfer_s = token_transfer_s * cache.page_size
    return dataclasses.replace(setup, host_pages=host_pages, transfer_s=transfer_s, snapshots=snapshots)


def parse_option(text: str) -> tuple[str, list[Any]]:
    """`name=value,value,...` with the option's type. Raises ConfigError."""
    name, equals, values = text.partition("=")
    name = name.strip().replace("-", "_")
    if not equals or name not in OPTIONS:
        raise ConfigError(f"{text}: must be OPTION=VALUE with an option of {', '.join(OPTIONS)}")
    kind = OPTIONS[name]
    try:
        return name, [_parse_bool(v) if kind is bool else kind(v.strip()) for v in values.split(",")]
    except (KeyError, ValueError):
        raise ConfigError(f"{text}: {name} takes values of type {kind.__name__}") from None


def _parse_bool(text: str) -> bool:
    return {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}[text.strip().lower()]


def _cost(
    costs: Path | None, model: Path | None, bandwidth: float | None, tflops: float | None, overhead_us: float
) -> tuple[CostModel, Overheads]:
    if costs is not None:
        if model is not None or bandwidth is not None or tflops is not None:
            raise click.UsageError("--costs excludes --model, --bandwidth and --tflops")
        fitted = Costs.load(costs)
        return fitted.step, fitted.overheads
    if model is None or bandwidth is None or tflops is None:
        raise click.UsageError("give --costs, or all of --model, --bandwidth and --tflops")
    return Roofline(ModelShape.of_config(model), bandwidth * 1e9, tflops * 1e12, overhead_us / 1e6), NO_OVERHEADS


def _token_transfer(cost: CostModel, bandwidth: float | None, kv_bytes: int | None) -> float:
    """Seconds for the keys and values of a token."""
    if bandwidth is None:
        if kv_bytes is not None:
            raise click.UsageError("--kv-bytes is for --host-bandwidth")
        return 0.0
    if bandwidth <= 0:
        raise click.UsageError("--host-bandwidth must be more than 0")
    if kv_bytes is None:
        if not isinstance(cost, Roofline):
            raise click.UsageError("--host-bandwidth needs --kv-bytes with --costs")
        kv_bytes = cost.shape.kv_bytes_per_token
    return kv_bytes / (bandwidth * 1e9)


def _only_trace(context: click.Context) -> None:
    """A trace says all about the requests: refuse options that would be ignored."""
    names = ("workload", "requests", "rate", "concurrency", "prompt_tokens", "output_tokens", "max_tokens")
    for name in (*names, "prefixes", "prefix_tokens", "turns", "think"):
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--trace excludes --{name.replace('_', '-')}")


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--workload", type=click.Choice(KINDS), default="random", help="What is generated.")
@click.option("--trace", type=click.File(), default=None, help="Requests from a JSONL file instead.")
@click.option("--requests", type=int, default=1000)
@click.option("--rate", type=float, default=None, help="Sessions per second, as a Poisson process.")
@click.option("--concurrency", type=int, default=None, help="Sessions kept going (closed loop).")
@click.option("--prompt-tokens", default="256", help="N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA.")
@click.option("--output-tokens", default="128", help="As above.")
@click.option("--max-tokens", type=int, default=None, help="What requests ask for.  [default: what they get]")
@click.option("--prefixes", type=int, default=1, help="Different prefixes: few-shot examples, documents.")
@click.option("--prefix-tokens", type=int, default=512, help="Length of a prefix.")
@click.option("--turns", type=int, default=4, help="Requests per session of a chat.")
@click.option("--think", type=float, default=0.0, help="Seconds between an answer and the next turn.")
@click.option("--seed", type=int, default=0)
@click.option("--costs", type=click.Path(path_type=Path), default=None, help="Fitted costs, from validate_simulator.")
@click.option("--model", type=click.Path(path_type=Path), default=None, help="config.json, for costs by its sizes.")
@click.option("--bandwidth", type=float, default=None, help="Memory bandwidth in GB/s.")
@click.option("--tflops", type=float, default=None, help="Rate of arithmetic in TFLOP/s.")
@click.option("--step-overhead-us", type=float, default=0.0, help="Fixed time of a step beside the two.")
@click.option("--host-bandwidth", type=float, default=None, help="GB/s to the host tier and back.  [default: no time]")
@click.option("--kv-bytes", type=int, default=None, help="Of a token, for --host-bandwidth.  [default: by --model]")
@click.option("--context-len", type=int, default=None, help="Context window.  [default: what the workload needs]")
@click.option("--set", "settings", multiple=True, metavar="OPTION=VALUE", help="A scheduler or cache option.")
@click.option("--compare", multiple=True, metavar="OPTION=V1,V2,...", help="One run per combination.")
@click.option("--check", type=int, default=0, help="Check all invariants every so many steps; 0 is never.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def cli(
    workload: str, trace: typing.TextIO | None, requests: int, rate: float | None, concurrency: int | None,
    prompt_tokens: str, output_tokens: str, max_tokens: int | None, prefixes: int, prefix_tokens: int, turns: int,
    think: float, seed: int, costs: Path | None, model: Path | None, bandwidth: float | None, tflops: float | None,
    step_overhead_us: float, host_bandwidth: float | None, kv_bytes: int | None, context_len: int | None,
    settings: Sequence[str], compare: Sequence[str], check: int,
    as_json: bool,
) -> None:  # fmt: skip
    """Run the scheduler against a cost model and a workload, faster than real time.

    Options of --set and --compare are those of the scheduler (policy, admission, chunk_tokens, steps_in_flight, ...)
    and kv_tokens, page_size, prefix_cache, host_kv_tokens (the host tier, off by default) and snapshots (of a model
    with recurrent layers).
    """
    try:
        cost, overheads = _cost(costs, model, bandwidth, tflops, step_overhead_us)
        if trace is not None:
            _only_trace(click.get_current_context())
            work = read_trace(trace)
        else:
            lengths = Lengths.parse(prompt_tokens), Lengths.parse(output_tokens)
            recipe = Recipe(
                workload, requests, *lengths, max_tokens, prefixes, prefix_tokens, turns, think, rate, concurrency, seed
            )
            work = generate(recipe)
        given = {}
        for name, values in map(parse_option, settings):
            if len(values) > 1:
                raise ConfigError(f"--set {name}: takes one value; several are for --compare")
            given[name] = values[0]
        varied = dict(map(parse_option, compare))
        window = context_len or work.longest
        moving = _token_transfer(cost, host_bandwidth, kv_bytes)
        runs = [
            (choice, configure({**given, **dict(zip(varied, choice, strict=True))}, window, cost, overheads, moving))
            for choice in itertools.product(*varied.values())
        ]
        vocabulary = Vocabulary(seed=seed)
        reports = [(choice, simulate(setup, work, vocabulary, check)) for choice, setup in runs]
    except (ConfigError, CostError, WorkloadError, Stuck) as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        rows = [{**dict(zip(varied, choice, strict=True)), **report.as_dict()} for choice, report in reports]
        click.echo(json.dumps(rows if varied else rows[0], indent=1))
    elif varied:
        click.echo(as_table(list(varied), [([str(v) for v in choice], report) for choice, report in reports]))
    else:
        click.echo(as_text(reports[0][1]))


if __name__ == "__main__":
    cli()
