"""The options of launch.py that make up one configuration each. `http_options` is the gateway's own."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

from common.config import (
    ADMISSIONS,
    POLICIES,
    SPECULATIONS,
    CacheConfig,
    ConfigError,
    ModelConfig,
    SchedulerConfig,
    SupervisionConfig,
)

DEMO_MODEL = Path(__file__).resolve().parents[1] / "demo_model"  # in a checkout; an installed package has none
UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}

Command = Callable[..., Any]
Decorator = Callable[[Command], Command]


def size(value: object) -> int:
    """Bytes, such as 512MiB, 2G or 1000000: the type of an option, which calls it with a default as well."""
    if isinstance(value, int):
        return value
    text = str(value).strip().lower().removesuffix("b").removesuffix("i")
    number, unit = (text[:-1], text[-1]) if text and text[-1].isalpha() else (text, "")
    try:
        return int(float(number) * UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise click.BadParameter(f"{value!r} is not a size such as 512MiB or 2G") from None


def _made_into(argument: str, config: Callable[..., object], *options: Decorator) -> Decorator:
    """Adds `options`, whose values, named like the fields of `config`, reach the command as one `argument`. A wrong one
    ends the command with its name."""

    def read(**values: object) -> None: ...

    names = [parameter.name for parameter in click.command(_all(options)(read)).params]

    def decorate(command: Command) -> Command:
        @wraps(command)
        def with_config(**values: Any) -> Any:
            fields = {name: values.pop(name) for name in names}
            try:
                values[argument] = config(**fields)
            except ConfigError as error:
                raise click.ClickException(str(error)) from None
            return command(**values)

        return _all(options)(with_config)

    return decorate


def _all(options: tuple[Decorator, ...]) -> Decorator:
    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


model_options = _made_into(
    "model",
    ModelConfig,
    click.option(
        "--model", "path", default=str(DEMO_MODEL), show_default="the demo model",
        help="Directory of a Hugging Face checkpoint, a GGUF file, or a hub id such as Qwen/Qwen3-0.6B[@revision] or "
        "Qwen/Qwen3-0.6B-GGUF:Q8_0.",
    ),
    click.option("--dtype", default="auto", help="auto, float32, bfloat16 or float16."),
    click.option("--device", default="auto", help="auto, cpu or cuda."),
    click.option("--tp", type=int, default=1, help="Tensor parallel worker ranks."),
    click.option("--threads", type=int, default=None, help="CPU threads per rank.  [default: cores / tp]"),
    click.option(
        "--cpu-kernels", default="auto", help="auto, amx, avx512bf16, armbf16, avx512, generic or torch (no kernels)."
    ),
    click.option("--weight-compression", default="auto", help="auto, on or off: 12 bits for bfloat16, lossless."),
    click.option("--cuda-graphs/--no-cuda-graphs", default=True, help="Replay decode steps on a GPU."),
    click.option("--gpu-attention", default="auto", help="auto, flashinfer, triton or sdpa (plain torch)."),
    click.option(
        "--quantization", "-q", default="auto", help="auto (as stored), int8, int4, fp8, w8a8, w4a8 (activations, too)."
    ),
    click.option(
        "--quantization-group-size", type=int, default=None, help="Inputs with one scale: 32, 64, 128.  [default: 128]"
    ),
    click.option("--context-len", type=int, default=None, help="Tokens of prompt and answer.  [default: the model's]"),
)  # fmt: skip

cache_options = _made_into(
    "cache",
    CacheConfig,
    click.option("--page-size", type=int, default=16, help="Tokens per page of the KV cache."),
    click.option("--kv-tokens", type=int, default=None, help="Size of the KV cache in tokens."),
    click.option("--kv-memory", "kv_bytes", type=size, default=None, help="Size of the KV cache per rank, e.g. 2GiB."),
    click.option("--kv-cache-dtype", "--kv-dtype", "kv_dtype", default="auto", help="auto (the model's) or int8."),
    click.option(
        "--host-kv-memory",
        "host_kv_bytes",
        type=size,
        default=0,
        help="Host memory per rank for evicted pages of the KV cache, e.g. 16GiB; 0 is none.",
    ),
    click.option("--prefix-cache/--no-prefix-cache", default=True, help="Share the KV of common prefixes."),
)

scheduler_options = _made_into(
    "scheduler",
    SchedulerConfig,
    click.option("--max-running", type=int, default=256, help="Requests that run at once."),
    click.option("--max-waiting", type=int, default=10_000, help="Requests that may wait."),
    click.option("--max-batch-tokens", type=int, default=2048, help="Tokens per step."),
    click.option("--chunk-tokens", type=int, default=512, help="Most prefill tokens per step beside running decodes."),
    click.option(
        "--chunk-slowdown",
        type=float,
        default=1.5,
        help="Fewer, where a step would take so many times as long, but enough to keep up with what comes; 0 is off.",
    ),
    click.option(
        "--itl-target-ms", type=float, default=0.0, help="Size chunks for this inter-token latency; 0 is off."
    ),
    click.option("--policy", type=click.Choice(POLICIES), default="fcfs", help="Order of waiting requests."),
    click.option("--admission", type=click.Choice(ADMISSIONS), default="ratio", help="Room kept for tokens to come."),
    click.option(
        "--ageing", "ageing_s", type=float, default=10.0, help="Seconds for which a policy may favour others."
    ),
    click.option("--steps-in-flight", type=int, default=2, help="Steps planned ahead of their results: 1 or 2."),
    click.option("--speculation", type=click.Choice(SPECULATIONS), default="off", help="ngram: guess repeated text."),
    click.option("--num-speculative-tokens", type=int, default=8, help="Guesses per request and step, at most."),
    click.option("--prompt-lookup-min", type=int, default=2, help="Tokens that must have come before, for a guess."),
    click.option("--prompt-lookup-max", type=int, default=4, help="Tokens by which one earlier place is preferred."),
)

supervision_options = _made_into(
    "supervision",
    SupervisionConfig,
    click.option(
        "--freeze-timeout", "freeze_timeout_s", type=float, default=3.0,
        help="Seconds of silence after which a process is dead.",
    ),
    click.option("--restarts", type=int, default=5, help="Restarts of a process within a minute; 0 ends the cluster."),
    click.option(
        "--drain-timeout", "drain_timeout_s", type=float, default=30.0,
        help="Seconds to finish what runs, when told to end.",
    ),
)  # fmt: skip
