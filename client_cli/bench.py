"""`bench`: latency and throughput of a server under load, the same for a local cluster and for any peer over HTTP."""

import importlib.util
import json
import os
import random
import secrets
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from client_cli.errors import ClientError
from client_cli.options import check_output
from client_cli.runs import connected, deferred_interrupt
from client_cli.target import Target, target_options

if TYPE_CHECKING:
    from client_cli.bench_load import Conversation, Length
    from client_cli.bench_metrics import Record
    from client_cli.link import Link

DATASETS = ("random", "shared-prefix", "multi-turn", "trace")
MAX_TEMPERATURE = 100
REMOTE_VOCABULARY = 1000  # ids that every vocabulary has


@dataclass(frozen=True, slots=True)
class Plan:
    """What the flags ask for."""

    dataset: str
    trace: TextIO | None
    requests: int
    input_len: str
    output_len: str
    prefixes: int
    prefix_len: int
    turns: int
    request_rate: float
    burstiness: float
    concurrency: int | None
    warm_up: int
    prompts: str
    vocab_size: int | None
    temperature: float
    ignore_eos: bool
    seed: int

    def lengths(self) -> "tuple[Length, Length]":
        """Of prompts and answers. Raises LoadError with the flag."""
        from client_cli.bench_load import Length

        return Length.parse(self.input_len, "--input-len"), Length.parse(self.output_len, "--output-len")


@click.command("bench", context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--dataset", type=click.Choice(DATASETS), default="random", help="Prompts that share nothing, begin "
              "alike, are turns of conversations, or come from --trace.")  # fmt: skip
@click.option("--trace", type=click.File(encoding="utf-8-sig"), help="JSON lines, of the simulator or Mooncake's.")
@click.option("--requests", type=click.IntRange(1), default=100, help="How many; a trace says so itself.")
@click.option("--input-len", default="256", metavar="N|LOW:HIGH", help="Tokens of a prompt beside its prefix.")
@click.option("--output-len", default="64", metavar="N|LOW:HIGH", help="Tokens of an answer.")
@click.option("--prefixes", type=click.IntRange(1), default=4, help="Different prefixes of shared-prefix.")
@click.option("--prefix-len", type=click.IntRange(0), default=0, help="Tokens of a shared prefix.  [default: the input "
              "length for shared-prefix, else 0]", show_default=False)  # fmt: skip
@click.option("--turns", type=click.IntRange(1), default=4, help="Turns of a conversation of multi-turn.")
@click.option("--request-rate", type=float, default=float("inf"), help="Conversations that begin per second.")
@click.option("--burstiness", type=click.FloatRange(0, min_open=True), default=1.0, help="Of the gaps between "
              "arrivals: 1 is a Poisson process, less is burstier, more is more even.")  # fmt: skip
@click.option("--concurrency", type=click.IntRange(1, 10_000), help="Conversations at once.  [default: no limit]")
@click.option("--warm-up", type=click.IntRange(0), default=2, help="Requests before, which do not count.")
@click.option("--slo", "slos", multiple=True, metavar="METRIC:MS", help="An objective for goodput, such as ttft:200 or "
              "tpot:50 (repeatable).")  # fmt: skip
@click.option("--prompts", type=click.Choice(("auto", "ids", "text")), default="auto", help="Send token ids, of exact "
              "lengths, or about as many words. auto: ids, but text for several turns over HTTP.")  # fmt: skip
@click.option("--vocab-size", type=click.IntRange(2), help="Prompts are of ids below.  [default: the model's; 1000 "
              "over HTTP]")  # fmt: skip
@click.option("--temperature", type=click.FloatRange(0), default=0.0, help="0 is greedy.")
@click.option("--ignore-eos/--no-ignore-eos", default=True, help="Generate exactly the output length.")
@click.option("--seed", type=int, help="Equal seeds give equal workloads.  [default: drawn, so that no cache knows "
              "the prompts]")  # fmt: skip
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write the summary and the "
              "numbers of each request to this file.")  # fmt: skip
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw the distributions (matplotlib).")
@target_options
def command(slos: tuple[str, ...], json_path: Path | None, plot: Path | None, target: Target, **flags: Any) -> None:
    """Measure TTFT, ITL, TPOT, E2E, throughput and goodput of a cluster, or of any OpenAI-compatible server (--url).

    Exit codes: 0 done, 1 a request failed, 2 no cluster or wrong usage, 130 interrupted.
    """
    from client_cli.bench_load import LoadError
    from client_cli.bench_metrics import SloError, parse_slos
    from client_cli.bench_report import as_json, draw, show

    plan = _plan(flags)
    if plot is not None:
        _need_matplotlib(plot)
        check_output(plot, "--plot")
    if json_path is not None:
        check_output(json_path, "--json")
    try:
        objectives = parse_slos(slos)
        vocabulary = plan.vocab_size or _vocabulary(target)
        conversations = build(plan, vocabulary)
    except SloError as error:
        raise click.UsageError(f"--slo: {error}") from None
    except LoadError as error:
        raise click.UsageError(str(error)) from None
    as_text = text_prompts(plan, target, conversations)
    config = {name: flags[name] for name in flags if name != "trace"} | {
        "seed": plan.seed, "server": target.url or "ipc", "vocab_size": vocabulary,
        "request_rate": plan.request_rate if plan.request_rate != float("inf") else None,
    }  # fmt: skip
    with connected(target) as link:
        summary, records = measure(link, plan, conversations, objectives, vocabulary, as_text)
    show(config, summary)
    if json_path is not None:
        json_path.write_text(json.dumps(as_json(config, summary, records)) + "\n")
    if plot is not None:
        draw(config, summary, records, plot)
    if summary["failed"] or summary["not_sent"]:
        raise ClientError(f"{summary['failed']} requests failed, {summary['not_sent']} were not sent")


def _plan(flags: dict[str, Any]) -> Plan:
    """The flags, checked against each other."""
    seed = secrets.randbits(32) if flags["seed"] is None else flags["seed"]
    plan = Plan(**{**flags, "seed": seed})
    if (plan.dataset == "trace") != (plan.trace is not None):
        raise click.UsageError("--dataset trace and --trace go together.")
    if not plan.request_rate > 0:
        raise click.UsageError("--request-rate must be more than 0")
    if not plan.burstiness < float("inf"):
        raise click.UsageError("--burstiness must be a number")
    if not plan.temperature <= MAX_TEMPERATURE:
        raise click.UsageError(f"--temperature must be at most {MAX_TEMPERATURE}")
    if plan.dataset == "trace" and plan.request_rate != float("inf"):
        raise click.UsageError("--request-rate: a trace has times of its own")
    return plan


def text_prompts(plan: Plan, target: Target, conversations: "list[Conversation]") -> bool:
    """Whether prompts go as text: over HTTP answers come without ids, which a later turn needs."""
    needed = target.url is not None and any(len(c.turns) > 1 for c in conversations)
    if needed and plan.prompts == "ids":
        raise click.UsageError("--prompts ids: later turns need the ids of answers, which --url does not give")
    return needed if plan.prompts == "auto" else plan.prompts == "text"


def build(plan: Plan, vocabulary: int) -> "list[Conversation]":
    """The conversations of a plan. Raises LoadError."""
    from client_cli import bench_load as load

    rng = random.Random(plan.seed)
    tokens = load.Tokens(vocabulary, rng)
    inputs, outputs = plan.lengths()
    match plan.dataset:
        case "random":
            found = load.single(plan.requests, inputs, outputs, tokens)
        case "shared-prefix":
            length = plan.prefix_len or inputs.high
            found = load.shared_prefix(plan.requests, inputs, outputs, tokens, plan.prefixes, length)
        case "multi-turn":
            found = load.multi_turn(plan.requests, inputs, outputs, tokens, plan.turns, plan.prefix_len)
        case _:
            from client_cli.bench_trace import read_trace

            assert plan.trace is not None
            try:
                return read_trace(plan.trace, tokens)
            except UnicodeDecodeError as error:
                raise load.LoadError(f"--trace: not UTF-8: {error}") from None
    if plan.request_rate == float("inf"):
        return found
    return load.at_times(found, load.arrivals(len(found), plan.request_rate, plan.burstiness, rng))


def measure(
    link: "Link", plan: Plan, conversations: "list[Conversation]", slos: dict[str, float], vocabulary: int, text: bool
) -> "tuple[dict[str, Any], list[Record]]":
    """Warm up, run, and sum up. Raises ConnectionLost."""
    from client_cli import bench_load as load
    from client_cli.bench_metrics import summarize
    from client_cli.bench_run import Bench
    from client_cli.snapshot import GAUGES
    from common.connection import Connection
    from common.sampling_params import SamplingParams

    def params(length: int) -> SamplingParams:
        return SamplingParams(temperature=plan.temperature, max_tokens=length, ignore_eos=plan.ignore_eos)

    bench = Bench(link, as_text=text, params=params)
    planned = sum(len(c.turns) for c in conversations)
    with ExitStack() as stack:
        check = stack.enter_context(deferred_interrupt())
        if plan.warm_up:
            tokens = load.Tokens(vocabulary, random.Random(f"{plan.seed} warm-up"))
            inputs, outputs = plan.lengths()
            bench.run(load.single(plan.warm_up, inputs, outputs, tokens), plan.concurrency or 1, check)
        before = link.stats() if isinstance(link, Connection) else {}
        advance = stack.enter_context(_progress(planned))
        cpu = time.process_time()
        records, duration_s = bench.run(conversations, plan.concurrency, check, lambda _: advance())
        cpu = time.process_time() - cpu
        after = link.stats() if isinstance(link, Connection) else {}
    summary = summarize(records, planned, slos, duration_s)
    summary["client_cpu_share"] = cpu / duration_s
    if after:
        summary["cluster"] = {name: after[name] - before.get(name, 0) for name in after if name not in GAUGES}
    return summary, records


def _progress(total: int) -> Any:
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        def __enter__(self) -> Any:
            super().__enter__()
            return self.update

    return Bar(total=total, unit="req", file=sys.stderr, leave=False, disable=not sys.stderr.isatty())


def _vocabulary(target: Target) -> int:
    """The vocabulary of the model of a local cluster; over HTTP or tcp nobody tells."""
    if target.url is not None or target.address is not None:
        return REMOTE_VOCABULARY
    try:
        config = json.loads((Path(target.cluster()["model"]["path"]) / "config.json").read_text())
        return int(config.get("vocab_size") or config["text_config"]["vocab_size"])
    except (OSError, ValueError, LookupError, TypeError):
        return REMOTE_VOCABULARY


def _need_matplotlib(plot: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError("--plot needs matplotlib: pip install 'rhizome[bench]'")
    os.environ.setdefault("MPLBACKEND", "Agg")
    from matplotlib.backend_bases import FigureCanvasBase

    if plot.suffix.removeprefix(".").lower() not in FigureCanvasBase.filetypes:
        known = ", ".join(f".{kind}" for kind in sorted(FigureCanvasBase.filetypes))
        raise click.UsageError(f"--plot: must end in one of {known}, got {str(plot)!r}")
