"""What the configuration leaves to the checkpoint and the machine: device, precision, kernels, attention, threads."""

from dataclasses import dataclass
from pathlib import Path

import torch

from common.config import ClusterConfig, ConfigError, ModelConfig
from common.messages.types import MAX_BATCH_TOKENS
from worker_proc.attention.cpu import CpuAttention
from worker_proc.attention.interface import AttentionBackend
from worker_proc.attention.reference import ReferenceAttention
from worker_proc.cpu.attention import DTYPES
from worker_proc.cpu.features import LEVELS, cpu_features
from worker_proc.cpu.library import NativeLibrary, best_library
from worker_proc.cpu.machine import num_cpus
from worker_proc.cpu.sampling import NativeDraws
from worker_proc.logprobs import ScoreRows
from worker_proc.models.describe import describe, read_config
from worker_proc.models.families import EXCEED_FLOAT16, is_native, parse_spec
from worker_proc.models.interface import ModelInfo
from worker_proc.quantization.scheme import Scheme, load_time_scheme
from worker_proc.sampler import BestRows, DrawRows

_SMALL_MODEL_BYTES = 2**25


@dataclass(frozen=True, slots=True)
class Served:
    """What a rank serves, and in what."""

    info: ModelInfo
    device: torch.device
    dtype: torch.dtype
    context_len: int
    scheme: Scheme | None  # into which plain weights are brought, or how codes are multiplied
    int8_kv: bool


def decide(config: ClusterConfig, rank: int) -> Served:
    """Raises ConfigError or ModelError naming the option or file that stands in the way."""
    model = config.model
    device, info = choose_device(model, rank), describe(model.path)
    return Served(
        info,
        device,
        choose_dtype(model, info),
        choose_context_len(model, info),
        choose_scheme(model, info),
        config.cache.kv_dtype == "int8",
    )


def choose_scheme(model: ModelConfig, info: ModelInfo) -> Scheme | None:
    """What is configured. Raises ConfigError for groups where all weights are in codes already."""
    scheme = load_time_scheme(model.quantization, model.quantization_group_size)
    if scheme is not None and adds_rounding(info, scheme) and model.quantization_group_size is not None:
        raise ConfigError("quantization-group-size: the checkpoint is quantized already, leave the option out")
    return scheme


def adds_rounding(info: ModelInfo, scheme: Scheme) -> bool:
    """Whether the scheme is nothing but how weights are multiplied that are stored in codes."""
    return info.quantization not in (None, "mxfp4") and scheme.dynamic


def how_held(info: ModelInfo, scheme: Scheme | None) -> str:
    """How weights are quantized: as they are stored, and what `scheme` makes of plain ones or adds to those."""
    if info.quantization is None or scheme is None:
        return str(scheme or info.quantization or "none")
    return (
        f"{info.quantization}, {scheme.name}" if adds_rounding(info, scheme) else f"{info.quantization}, else {scheme}"
    )


def choose_device(model: ModelConfig, rank: int) -> torch.device:
    """The rank's device: "auto" takes GPUs when there is one for every rank, else the CPU for all."""
    gpus = 0 if model.device == "cpu" else torch.cuda.device_count()
    if model.device == "cuda" and gpus < model.tp:
        raise ConfigError(f"device cuda: tp {model.tp} needs as many GPUs, this machine shows {gpus}")
    return torch.device("cuda", rank) if gpus >= model.tp else torch.device("cpu")


def choose_dtype(model: ModelConfig, info: ModelInfo) -> torch.dtype:
    """The configured precision; "auto" is the one in which the checkpoint is stored, but bfloat16 for codes whose
    scales are float16 (the native kernels know no float16, and scales are held in float32 anyway) and for models
    whose hidden states float16 does not hold. Raises ConfigError where it is configured for these."""
    name = info.dtype if model.dtype == "auto" else model.dtype
    too_large = info.model_type in EXCEED_FLOAT16
    if model.dtype == "auto" and name == "float16" and (info.quantization is not None or too_large):
        name = "bfloat16"
    if name == "float16" and too_large:
        raise ConfigError(f"dtype float16: hidden states of {info.model_type} exceed it, take bfloat16 or float32")
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def choose_context_len(model: ModelConfig, info: ModelInfo) -> int:
    """The configured context window, which the model must support, or the model's own; at most what messages carry
    (Llama 4 Scout has 10 million tokens)."""
    wanted = model.context_len
    if wanted is not None and wanted > MAX_BATCH_TOKENS:
        raise ConfigError(f"context-len {wanted} is more than the {MAX_BATCH_TOKENS} tokens that are served")
    if wanted is not None and wanted > info.context_length:
        raise ConfigError(f"context-len {wanted} is more than the {info.context_length} tokens that the model supports")
    return wanted or min(info.context_length, MAX_BATCH_TOKENS)


def choose_threads(model: ModelConfig, info: ModelInfo) -> int:
    """CPU threads of torch in a rank: its share of the cores, but one for a model so small that sharing a step's work
    out costs more than it saves."""
    if model.threads is not None:
        return model.threads
    if info.parameter_bytes // model.tp < _SMALL_MODEL_BYTES:
        return 1
    return share_of_cores(model)


def share_of_cores(model: ModelConfig) -> int:
    """Cores that this process may use, for each rank."""
    return max(1, num_cpus() // model.tp)


def choose_kernels(model: ModelConfig, device: torch.device) -> NativeLibrary | None:
    """The native kernels to compute with on a CPU, None where torch computes alone. Raises ConfigError if those that
    are configured do not run here."""
    if device.type != "cpu" or model.cpu_kernels == "torch":
        return None
    if model.cpu_kernels == "auto":
        return best_library()
    level = next(level for level in LEVELS if level == model.cpu_kernels)
    library = best_library(level) if level in cpu_features().levels() else None
    if library is None:
        raise ConfigError(f"cpu-kernels {level}: this machine cannot run them")
    return library


def choose_attention(
    library: NativeLibrary | None,
    dtype: torch.dtype,
    device: torch.device,
    model: ModelConfig,
    *,
    int8_kv: bool = False,
) -> AttentionBackend:
    """On a GPU what is configured; native attention where there is a library and it knows the precision; else plain
    torch. Raises ConfigError if what is configured cannot be had."""
    if device.type == "cuda":
        from worker_proc.cuda.backends import choose_attention as choose

        config = read_config(Path(model.path))
        spec = parse_spec(config) if is_native(config) else None
        head_dim, sinks = (spec.head_dim, spec.sinks) if spec is not None else (None, False)
        return choose(model.gpu_attention, dtype, head_dim, device, int8_kv=int8_kv, sinks=sinks)
    return CpuAttention(library) if library is not None and dtype in DTYPES else ReferenceAttention()


def choose_draws(
    device: torch.device, library: NativeLibrary | None
) -> tuple[DrawRows | None, BestRows | None, ScoreRows | None]:
    """How tokens are drawn, the likeliest ones found, and log probabilities made: in kernels, where there are any."""
    if device.type == "cuda":
        from worker_proc.cuda.sampling import draw_rows

        return draw_rows, None, None
    if library is None:
        return None, None, None
    draws = NativeDraws(library)
    return draws.draw, draws.best, draws.score
