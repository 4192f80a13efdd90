"""Start a cluster: `python launch.py --tp 2`. The command line; what follows it is in launcher/."""

import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

import click

from common.config import (
    ADMISSIONS,
    POLICIES,
    SPECULATIONS,
    CacheConfig,
    ClusterConfig,
    ConfigError,
    HttpConfig,
    ModelConfig,
    SchedulerConfig,
    SupervisionConfig,
)
from common.log import set_up_logging
from common.run_dir import RunDir, RunDirError
from common.sockets import Endpoints
from gateway_proc.options import http_options
from launcher import hub
from launcher.show import VERSION, panel, progress_bar
from launcher.supervisor import ClusterError, Supervisor

ROOT = Path(__file__).resolve().parent


UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


class Size(click.ParamType[int]):
    """Bytes, such as 512MiB, 2G or 1000000."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        text = str(value).strip().lower().removesuffix("b").removesuffix("i")
        number, unit = (text[:-1], text[-1]) if text and text[-1].isalpha() else (text, "")
        try:
            return int(float(number) * UNITS[unit])
        except (ValueError, KeyError, OverflowError):
            self.fail(f"{value!r} is not a size such as 512MiB or 2G", param, ctx)


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option(
    "--model",
    default=str(ROOT / "demo_model"),
    show_default="the demo model",
    help="Directory of a Hugging Face checkpoint, or an id on its hub such as Qwen/Qwen3-0.6B[@revision].",
)
@click.option("--dtype", default="auto", help="auto, float32, bfloat16 or float16.")
@click.option("--device", default="auto", help="auto, cpu or cuda.")
@click.option("--tp", type=int, default=1, help="Tensor parallel worker ranks.")
@click.option("--threads", type=int, default=None, help="CPU threads per rank.  [default: cores / tp]")
@click.option("--cpu-kernels", default="auto", help="auto, amx, avx512, generic or torch (no native code).")
@click.option("--cuda-graphs/--no-cuda-graphs", default=True, help="Replay decode steps on a GPU.")
@click.option("--quantization", "-q", default="auto", help="auto (as stored), int8 or int4: of the weights.")
@click.option(
    "--quantization-group-size", type=int, default=None, help="Inputs with one scale: 32, 64, 128.  [default: 128]"
)
@click.option("--context-len", type=int, default=None, help="Tokens of prompt and answer.  [default: the model's]")
@click.option("--page-size", type=int, default=16, help="Tokens per page of the KV cache.")
@click.option("--kv-tokens", type=int, default=None, help="Size of the KV cache in tokens.")
@click.option("--kv-memory", type=Size(), default=None, help="Size of the KV cache per rank, e.g. 2GiB.")
@click.option("--kv-cache-dtype", "--kv-dtype", "kv_dtype", default="auto", help="auto (the model's) or int8.")
@click.option("--prefix-cache/--no-prefix-cache", default=True, help="Share the KV of common prefixes.")
@click.option("--max-running", type=int, default=256, help="Requests that run at once.")
@click.option("--max-waiting", type=int, default=10_000, help="Requests that may wait.")
@click.option("--max-batch-tokens", type=int, default=2048, help="Tokens per step.")
@click.option("--chunk-tokens", type=int, default=256, help="Prefill tokens per step beside running decodes.")
@click.option("--itl-target-ms", type=float, default=0.0, help="Size chunks for this inter-token latency; 0 is off.")
@click.option("--policy", type=click.Choice(POLICIES), default="fcfs", help="Order of waiting requests.")
@click.option("--admission", type=click.Choice(ADMISSIONS), default="ratio", help="Room kept for tokens to come.")
@click.option("--ageing", type=float, default=10.0, help="Seconds for which a policy may favour others.")
@click.option("--steps-in-flight", type=int, default=2, help="Steps planned ahead of their results: 1 or 2.")
@click.option("--speculation", type=click.Choice(SPECULATIONS), default="off", help="ngram: guess repeated text.")
@click.option("--num-speculative-tokens", type=int, default=8, help="Guesses per request and step, at most.")
@click.option("--prompt-lookup-min", type=int, default=2, help="Tokens that must have come before, for a guess.")
@click.option("--prompt-lookup-max", type=int, default=4, help="Tokens by which one earlier place is preferred.")
@click.option("--record", type=click.Path(path_type=Path), help="Record the scheduler, prompts too, to this new file.")
@click.option("--run-dir", type=click.Path(path_type=Path), default=None, help="Private directory of the sockets.")
@click.option("--listen", default=None, help="Also serve clients at tcp://127.0.0.1:PORT.")
@http_options
@click.option("--log-level", default="warning", help="debug, info, warning or error.")
@click.option(
    "--parent-fd", type=int, hidden=True, help="A pipe that closes when the process that asked for this ends."
)
@click.option("--start-timeout", type=float, default=300.0, help="Seconds until all processes must be ready.")
@click.option("--freeze-timeout", type=float, default=3.0, help="Seconds of silence after which a process is dead.")
@click.option("--restarts", type=int, default=5, help="Restarts of a process within a minute; 0 ends the cluster.")
@click.option("--drain-timeout", type=float, default=30.0, help="Seconds to finish what runs, when told to end.")
@click.version_option(VERSION)
def main(
    model: str, dtype: str, device: str, tp: int, threads: int | None, cpu_kernels: str, cuda_graphs: bool,
    quantization: str, quantization_group_size: int | None, context_len: int | None, page_size: int,
    kv_tokens: int | None, kv_memory: int | None, kv_dtype: str, prefix_cache: bool, max_running: int,
    max_waiting: int, max_batch_tokens: int, chunk_tokens: int, itl_target_ms: float, policy: str, admission: str,
    ageing: float, steps_in_flight: int, speculation: str, num_speculative_tokens: int, prompt_lookup_min: int,
    prompt_lookup_max: int, record: Path | None, run_dir: Path | None, listen: str | None,
    log_level: str, parent_fd: int | None, start_timeout: float, freeze_timeout: float, restarts: int,
    drain_timeout: float, http: HttpConfig,
) -> None:  # fmt: skip
    """Start a Rhizome cluster and serve until Ctrl-C, which lets running requests finish; a second one does not.

    SIGTERM does the same. SIGHUP, without a terminal, restarts the workers without losing a request.
    """
    if parent_fd is not None:
        threading.Thread(target=_end_with_parent, args=(parent_fd,), daemon=True, name="parent").start()
    try:
        path, hub_id = _find_model(model)
        if hub_id is not None and not http.served_names:
            http = replace(http, served_names=(hub_id,))
        _check_record(record)
        directory = RunDir(run_dir)
        try:
            config = ClusterConfig(
                run_dir=str(directory.path),
                model=ModelConfig(
                    str(path.resolve()),
                    dtype,
                    device,
                    context_len,
                    tp,
                    threads,
                    cpu_kernels,
                    cuda_graphs,
                    quantization,
                    quantization_group_size,
                ),
                cache=CacheConfig(page_size, kv_tokens, kv_memory, prefix_cache, kv_dtype),
                scheduler=SchedulerConfig(
                    max_running=max_running,
                    max_batch_tokens=max_batch_tokens,
                    chunk_tokens=chunk_tokens,
                    max_waiting=max_waiting,
                    steps_in_flight=steps_in_flight,
                    policy=policy,
                    admission=admission,
                    ageing_s=ageing,
                    itl_target_ms=itl_target_ms,
                    speculation=speculation,
                    num_speculative_tokens=num_speculative_tokens,
                    prompt_lookup_min=prompt_lookup_min,
                    prompt_lookup_max=prompt_lookup_max,
                ),
                supervision=SupervisionConfig(
                    freeze_timeout_s=freeze_timeout, restarts=restarts, drain_timeout_s=drain_timeout
                ),
                http=http,
                listen=listen,
                log_level=log_level,
                start_timeout_s=start_timeout,
                record=None if record is None else str(record.resolve()),
            )
            Endpoints(directory.path)
        except (ConfigError, ValueError):
            directory.close()
            raise
    except (ConfigError, RunDirError, ClusterError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    config.save()
    set_up_logging("launcher", log_level)
    sys.exit(_run(Supervisor(config, directory)))


def _run(supervisor: Supervisor) -> int:
    try:
        with progress_bar() as show:
            info = supervisor.start(show)
        if info is not None:
            click.echo(panel(info, supervisor.go))
            sys.stdout.flush()
            supervisor.serve()
        return 0
    except ClusterError as error:
        click.echo(f"Error: {error}", err=True)
        return 1
    finally:
        supervisor.stop()


def _end_with_parent(parent_fd: int) -> None:
    """End at once when the pipe's other end is closed, by whatever end of the process that held it."""
    while os.read(parent_fd, 1):  # nothing is ever written
        pass
    for number in (signal.SIGTERM, signal.SIGINT):  # the second one says not to wait for running requests
        os.kill(os.getpid(), number)


def _find_model(model: str) -> tuple[Path, str | None]:
    """The checkpoint's directory, and its name on the hub where it has one. Raises ClusterError."""
    if named := hub.split_id(model):
        try:
            return hub.fetch(*named), named[0]
        except hub.HubError as error:
            raise ClusterError(f"--model {model}: {error}") from None
    if not (Path(model) / "config.json").is_file():
        raise ClusterError(f"--model {model}: not a directory with a Hugging Face checkpoint (no config.json)")
    return Path(model), None


def _check_record(record: Path | None) -> None:
    if record is None:
        return
    if record.exists():
        raise ClusterError(f"--record {record}: exists already and is not overwritten")
    if not os.access(record.resolve().parent, os.W_OK | os.X_OK):
        raise ClusterError(f"--record {record}: its directory does not exist or cannot be written")


if __name__ == "__main__":
    main()
