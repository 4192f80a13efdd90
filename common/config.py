"""The configuration of a cluster: built once by launch.py, written to `config.json` in the run directory, read by
every process, never changed."""

import dataclasses
import json
import re
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEYS_VARIABLE = "RHIZOME_API_KEYS"  # API keys in the environment: of the gateway alone, of no other child
CONFIG_FILE = "config.json"
_LOOPBACK = re.compile(r"tcp://(localhost|\[::1\]|127(?:\.[0-9]{1,3}){3}):([0-9]{1,5})")
POLICIES = ("fcfs", "lpm", "round-robin", "priority")
ADMISSIONS = ("ratio", "peak", "reserve")
SPECULATIONS = ("off", "ngram", "ngram-always")
GENERATION_CONFIGS = ("auto", "none")
DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("auto", "int8", "int4", "fp8", "w8a8", "w4a8")
QUANTIZATION_GROUP_SIZES = (32, 64, 128)
KV_DTYPES = ("auto", "int8")
CPU_KERNELS = ("auto", "amx", "avx512bf16", "armbf16", "avx512", "generic", "torch")
WEIGHT_COMPRESSIONS = ("auto", "on", "off")
GPU_ATTENTIONS = ("auto", "flashinfer", "triton", "sdpa")
# Rows that get logits in a step beside those of running requests, which bound the worker's memory:
SCORED_TOKENS = 256  # prompt tokens whose log probabilities are asked for
DRAWN_TOKENS = 256  # with guesses, all that are drawn, if not more requests run


class ConfigError(ValueError):
    """An option is wrong; the text names it and its limit."""


def _check(ok: bool, field: str, rule: str) -> None:
    if not ok:
        raise ConfigError(f"{field.replace('_', '-')} must be {rule}")


def _is_text(value: str) -> bool:
    """Whether it can be sent and shown: names of files, and arguments, may be other bytes than UTF-8."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What is served. `context_len` None takes the model's own; `threads` are CPU threads per worker rank.

    `cpu_kernels` "auto" takes the best native kernels that the CPU runs, "torch" none, other names just those. With
    `weight_compression` "on" they hold bfloat16 weights in 12 bits without loss, "auto" does so with AVX2 and
    what comes after it, where they are far more than fits in caches.
    `cuda_graphs` replays steps on GPUs; `gpu_attention` "auto" is Triton.
    `quantization` "auto" takes weights as they are stored, other names bring plain weights into fewer bits while they
    are read; `quantization_group_size` inputs have a scale in common with int4 and w4a8.
    w8a8 and w4a8 also say that what is stored in 8 or 4 bits is to be multiplied with activations of 8 bits.
    """

    path: str
    dtype: str = "auto"
    device: str = "auto"
    context_len: int | None = None
    tp: int = 1
    threads: int | None = None
    cpu_kernels: str = "auto"
    weight_compression: str = "auto"
    cuda_graphs: bool = True
    gpu_attention: str = "auto"
    quantization: str = "auto"
    quantization_group_size: int | None = None

    def __post_init__(self) -> None:
        _check(_is_text(self.path), "model", f"a path in UTF-8, got {self.path!r}")
        _check(self.dtype in DTYPES, "dtype", f"one of {', '.join(DTYPES)}")
        _check(self.device in ("auto", "cpu", "cuda"), "device", "one of auto, cpu, cuda")
        _check(self.cpu_kernels in CPU_KERNELS, "cpu_kernels", f"one of {', '.join(CPU_KERNELS)}")
        _check(self.weight_compression in WEIGHT_COMPRESSIONS, "weight_compression", "one of auto, on, off")
        _check(self.gpu_attention in GPU_ATTENTIONS, "gpu_attention", f"one of {', '.join(GPU_ATTENTIONS)}")
        _check(self.quantization in QUANTIZATIONS, "quantization", f"one of {', '.join(QUANTIZATIONS)}")
        size, sizes = self.quantization_group_size, ", ".join(map(str, QUANTIZATION_GROUP_SIZES))
        _check(size is None or size in QUANTIZATION_GROUP_SIZES, "quantization_group_size", f"one of {sizes}")
        _check(
            size is None or self.quantization in ("int4", "w4a8"),
            "quantization_group_size",
            "left out unless quantization is int4 or w4a8",
        )
        _check(1 <= self.tp <= 64, "tp", "between 1 and 64")
        _check(self.context_len is None or self.context_len >= 2, "context_len", "at least 2")
        _check(self.threads is None or 1 <= self.threads <= 1024, "threads", "between 1 and 1024")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV cache: of `kv_tokens`, or of as many as fit in `kv_bytes` per rank. `kv_dtype` "auto" is the
    model's precision, "int8" one byte a number and a scale per token and head. Pages that are evicted go to
    `host_kv_bytes` of host memory per rank, 0 is none."""

    page_size: int = 16
    kv_tokens: int | None = None
    kv_bytes: int | None = None
    prefix_cache: bool = True
    kv_dtype: str = "auto"
    host_kv_bytes: int = 0

    def __post_init__(self) -> None:
        _check(1 <= self.page_size <= 4096, "page_size", "between 1 and 4096 tokens")
        _check(self.kv_tokens is None or self.kv_tokens >= self.page_size, "kv_tokens", "at least one page")
        _check(self.kv_bytes is None or self.kv_bytes > 0, "kv_memory", "more than 0 bytes")
        _check(self.kv_tokens is None or self.kv_bytes is None, "kv_memory", "left out where kv-tokens gives the size")
        _check(0 <= self.host_kv_bytes <= 2**50, "host_kv_memory", "between 0 (none) and 1024TiB")
        _check(
            self.prefix_cache or not self.host_kv_bytes,
            "host_kv_memory",
            "0 without the prefix cache, whose pages it is for",
        )
        _check(self.kv_dtype in KV_DTYPES, "kv_cache_dtype", f"one of {', '.join(KV_DTYPES)}")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """`max_running` requests at once, `max_waiting` in the queue, `max_batch_tokens` per step, `steps_in_flight` plans
    sent before the first one's tokens are back. Beside running decodes at most `chunk_tokens` of prefill, fewer where a
    step would take more than `chunk_slowdown` times as long (0 is off), little waits and prompts still keep up with
    answers.

    `policy` orders waiting requests and `admission` keeps room for tokens to come; both are names. `ageing_s` bounds
    how long a policy may favour others. `itl_target_ms` sizes prefill chunks so that running decodes keep it, 0 is off.
    `in_batch_gain` tokens are the least for which a request waits for another one to compute a common prefix, and for
    which a snapshot of recurrent states is taken.

    `speculation` "ngram" guesses tokens where the last `prompt_lookup_min` to `prompt_lookup_max` ones have come before
    in the same request, up to `num_speculative_tokens` per request and step, if that is expected to pay; "ngram-always"
    in any case (docs/speculation.md).
    """

    max_running: int = 256
    max_batch_tokens: int = 2048
    chunk_tokens: int = 512
    chunk_slowdown: float = 1.5
    max_waiting: int = 10_000
    steps_in_flight: int = 2
    policy: str = "fcfs"
    admission: str = "ratio"
    ageing_s: float = 10.0
    itl_target_ms: float = 0.0
    in_batch_gain: int = 32
    speculation: str = "off"
    num_speculative_tokens: int = 8
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4

    def __post_init__(self) -> None:
        _check(1 <= self.max_running <= 4096, "max_running", "between 1 and 4096")
        _check(
            self.max_running <= self.max_batch_tokens <= 2**20,
            "max_batch_tokens",
            f"between max-running ({self.max_running}) and {2**20}",
        )
        _check(
            1 <= self.chunk_tokens <= self.max_batch_tokens,
            "chunk_tokens",
            f"between 1 and max-batch-tokens ({self.max_batch_tokens})",
        )
        slowdown = self.chunk_slowdown
        _check(slowdown == 0 or 1 <= slowdown <= 1000, "chunk_slowdown", "0 (off) or between 1 and 1000")
        _check(1 <= self.max_waiting <= 10**6, "max_waiting", "between 1 and 1000000")
        _check(1 <= self.steps_in_flight <= 2, "steps_in_flight", "1 or 2")
        _check(self.policy in POLICIES, "policy", f"one of {', '.join(POLICIES)}")
        _check(self.admission in ADMISSIONS, "admission", f"one of {', '.join(ADMISSIONS)}")
        _check(0 < self.ageing_s <= 86400, "ageing", "more than 0 and at most 86400 seconds")
        _check(self.in_batch_gain >= 1, "in_batch_gain", "at least 1 token")
        _check(0 <= self.itl_target_ms <= 60000, "itl_target_ms", "between 0 (off) and 60000")
        _check(self.speculation in SPECULATIONS, "speculation", f"one of {', '.join(SPECULATIONS)}")
        _check(1 <= self.num_speculative_tokens <= 64, "num_speculative_tokens", "between 1 and 64")
        _check(1 <= self.prompt_lookup_min <= 32, "prompt_lookup_min", "between 1 and 32 tokens")
        _check(
            self.prompt_lookup_min <= self.prompt_lookup_max <= 32,
            "prompt_lookup_max",
            f"between prompt-lookup-min ({self.prompt_lookup_min}) and 32 tokens",
        )


@dataclass(frozen=True, slots=True)
class SupervisionConfig:
    """A process that gives no sign of life for `freeze_timeout_s` counts as dead. One that dies is started again, at
    most `restarts` times within `restart_window_s`. When the cluster is told to end, it first finishes what it has, for
    at most `drain_timeout_s`."""

    freeze_timeout_s: float = 3.0
    restarts: int = 5
    restart_window_s: float = 60.0
    drain_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        _check(1 <= self.freeze_timeout_s <= 3600, "freeze_timeout", "between 1 and 3600 seconds")
        _check(0 <= self.restarts <= 1000, "restarts", "between 0 and 1000")
        _check(0 < self.restart_window_s <= 86400, "restart_window", "more than 0 and at most 86400 seconds")
        _check(0 <= self.drain_timeout_s <= 86400, "drain_timeout", "between 0 and 86400 seconds")


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """The HTTP gateway: where it listens (`port` 0 is any free one), what the model is called, who may use it.

    `served_names` are what requests may call the model, the first being its name in answers; empty is the name of its
    directory. `api_key_file` is the path of the keys, which are never here themselves. `cors_origins` are the origins
    whose pages may ask. `strict_fields` refuses unknown fields instead of naming them. `key_concurrency` bounds the
    live requests of each API key (0 is no limit), `max_body_bytes` a request's body. `generation_config` says where
    sampling defaults come from: auto is the model's own file, none is no file. `otlp_endpoint` is the URL of an
    OpenTelemetry collector that gets a span for each request.
    """

    enabled: bool = True
    host: str = "127.0.0.1"
    port: int = 8000
    served_names: tuple[str, ...] = ()
    api_key_file: str | None = None
    cors_origins: tuple[str, ...] = ()
    strict_fields: bool = False
    key_concurrency: int = 0
    max_body_bytes: int = 16 * 2**20
    generation_config: str = "auto"
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        _check(0 <= self.port <= 65535, "port", "between 0 and 65535")
        _check(0 < len(self.host) <= 255, "host", "a name or address")
        ok = len(self.served_names) <= 16 and all(0 < len(name) <= 256 and _is_text(name) for name in self.served_names)
        _check(ok, "served_model_name", "given at most 16 times, with 1 to 256 characters in UTF-8")
        _check(0 <= self.key_concurrency <= 10**6, "key_concurrency", "between 0 (no limit) and 1000000")
        _check(1024 <= self.max_body_bytes <= 2**30, "max_body", "between 1KiB and 1GiB")
        ok = self.generation_config in GENERATION_CONFIGS
        _check(ok, "generation_config", f"one of {', '.join(GENERATION_CONFIGS)}")
        ok = self.otlp_endpoint is None or re.fullmatch(r"https?://[^/\s]+(/\S*)?", self.otlp_endpoint) is not None
        _check(ok, "otlp_endpoint", f"a URL such as http://127.0.0.1:4318, got {self.otlp_endpoint!r}")
        for origin in self.cors_origins:
            _check(
                re.fullmatch(r"\*|https?://[^/\s]+", origin) is not None, "cors_origin", f"an origin, got {origin!r}"
            )

    def names(self, model_path: str) -> tuple[str, ...]:
        """What the model is called, never empty."""
        return self.served_names or (Path(model_path).name or "model",)


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """All of it. `listen` is an extra tcp address for clients, loopback only, beside the ipc socket.

    `record` is a new file for everything that the scheduler is told and plans (see docs/tracing.md); None is off.
    """

    run_dir: str
    model: ModelConfig
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    http: HttpConfig = HttpConfig()
    supervision: SupervisionConfig = SupervisionConfig()
    listen: str | None = None
    log_level: str = "info"
    start_timeout_s: float = 300.0
    record: str | None = None

    def __post_init__(self) -> None:
        _check(self.log_level in ("debug", "info", "warning", "error"), "log_level", "debug, info, warning or error")
        if self.listen is not None:  # beyond loopback, clients would have to be authenticated
            match = _LOOPBACK.fullmatch(self.listen)
            ok = match is not None and 1 <= int(match[2]) <= 65535
            _check(ok, "listen", f"a loopback address such as tcp://127.0.0.1:5555, got {self.listen!r}")
        _check(0 < self.start_timeout_s <= 86400, "start_timeout", "more than 0 and at most 86400 seconds")
        _check(self.record is None or Path(self.record).is_absolute(), "record", "an absolute path")

    def save(self) -> None:
        path = Path(self.run_dir) / CONFIG_FILE
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1))

    @classmethod
    def load(cls, run_dir: Path) -> "ClusterConfig":
        """Raises ConfigError when the file does not describe a cluster."""
        try:
            values = json.loads((run_dir / CONFIG_FILE).read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{run_dir / CONFIG_FILE} cannot be read: {error}") from None
        config = _build(cls, values, "config")
        assert isinstance(config, ClusterConfig)
        return config


def _build(cls: type, values: Any, where: str) -> Any:
    hints = typing.get_type_hints(cls)
    if not isinstance(values, dict) or set(values) != set(hints):
        raise ConfigError(f"{where}: fields must be exactly {sorted(hints)}")
    built = {}
    for name, hint in hints.items():
        if dataclasses.is_dataclass(hint):
            built[name] = _build(typing.cast(type, hint), values[name], name)
            continue
        if typing.get_origin(hint) is tuple:
            if type(values[name]) is not list or any(type(v) is not str for v in values[name]):
                raise ConfigError(f"{where}.{name}: must be a list of texts")
            built[name] = tuple(values[name])
            continue
        allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        if type(values[name]) not in allowed and not (float in allowed and type(values[name]) is int):
            raise ConfigError(f"{where}.{name}: must be {getattr(hint, '__name__', hint)}, got {values[name]!r}")
        built[name] = values[name]
    return cls(**built)
