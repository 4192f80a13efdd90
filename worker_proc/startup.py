"""From the configuration to a model runner that is ready to serve: device, precision, ranks, weights, KV cache."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from common.config import ClusterConfig, ConfigError, ModelConfig
from worker_proc.attention.cpu import CpuAttention
from worker_proc.attention.interface import AttentionBackend
from worker_proc.attention.reference import ReferenceAttention
from worker_proc.cpu.attention import DTYPES
from worker_proc.cpu.decoder import CpuDecoder
from worker_proc.cpu.features import LEVELS, cpu_features
from worker_proc.cpu.library import NativeLibrary, best_library
from worker_proc.cpu.linear import Format
from worker_proc.cpu.machine import num_cpus
from worker_proc.cpu.prefault import Prefault
from worker_proc.cpu.sampling import NativeDraws
from worker_proc.grammar_matcher import GrammarMatchers, load_vocabulary
from worker_proc.host_tier import HostPages
from worker_proc.kv_cache import KVCache
from worker_proc.logprobs import ScoreRows
from worker_proc.memory import choose_host_pages, choose_num_pages, describe_cache, keep_freed_memory
from worker_proc.model_runner import ModelRunner
from worker_proc.models.describe import describe, read_config
from worker_proc.models.families import EXCEED_FLOAT16, is_native, parse_spec
from worker_proc.models.interface import LanguageModel, ModelInfo
from worker_proc.models.registry import load_model
from worker_proc.parallel import TensorParallel
from worker_proc.quantization.scheme import Scheme, load_time_scheme
from worker_proc.sampler import BestRows, DrawRows

if TYPE_CHECKING:
    from worker_proc.cuda.decoder import CudaDecoder
    from worker_proc.cuda.graphs import GraphedDecoder

log = logging.getLogger(__name__)

_SMALL_MODEL_BYTES = 2**25
_SMALL_STEP = 2**26  # multiplications: one or two ms of a core that has AVX2
_PREFAULT_S = 1.0  # that a start waits at most for memory of the KV cache; the rest comes while the worker rests
_REST_S = 1.5  # without a new step: longer than any step takes


@dataclass(frozen=True, slots=True)
class LoadedWorker:
    """`info` is what the launcher must know, see `ready_info`; `labels` is what it shows."""

    runner: ModelRunner
    tp: TensorParallel
    info: dict[str, int]
    labels: dict[str, str]


def load_worker(
    config: ClusterConfig,
    rank: int,
    group: str,
    store: Path,
    num_pages: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LoadedWorker:
    """Load one rank of `config.model.tp` ranks; all of them must be started, as they wait for each other, at the file
    `store`. The KV cache has `num_pages` where an earlier group has settled them, however much memory is available now.

    `progress(done_bytes, total_bytes)` is called while weights are read. Raises ConfigError or ModelError naming the
    option, file, tensor or number that stands in the way, RuntimeError if another rank is missing.
    """
    model_config, started = config.model, time.monotonic()
    device = choose_device(model_config, rank)
    info = describe(model_config.path)
    if device.type == "cpu":
        keep_freed_memory()
        torch.set_num_threads(choose_threads(model_config, info))
    else:
        torch.cuda.set_device(device)
    dtype = choose_dtype(model_config, info)
    context_len = choose_context_len(model_config, info)
    grammars = None
    if rank == 0:
        load = partial(load_vocabulary, Path(model_config.path), info.vocab_size, info.eos_token_ids)
        grammars = GrammarMatchers(load, info.vocab_size, device)  # loads while the weights are read
    tp = TensorParallel.connect(rank, model_config.tp, store, device, timeout=config.start_timeout_s)
    library = choose_kernels(model_config, device)
    if library is not None:
        library.set_threads(torch.get_num_threads())
    int8_kv = config.cache.kv_dtype == "int8"
    attention = choose_attention(library, dtype, device, model_config, int8_kv=int8_kv)
    scheme = load_time_scheme(model_config.quantization, model_config.quantization_group_size)
    if scheme is not None and adds_rounding(info, scheme) and model_config.quantization_group_size is not None:
        raise ConfigError("quantization-group-size: the checkpoint is quantized already, leave the option out")
    in_groups = scheme is not None and scheme.dynamic and (not scheme.by_channel or adds_rounding(info, scheme))
    if in_groups and library is not None and rank == 0:
        rounded = {4: Format.INT4_SEGMENTS, 8: Format.INT8_SEGMENTS}
        kept = [f"{bits} bits" for bits, held in rounded.items() if not library.knows(held)]
        if kept:
            log.info(
                "%s: activations stay in 16 bits where codes in groups have %s, as the kernels for this processor "
                "do not multiply them as bytes", scheme, " and ".join(kept),
            )  # fmt: skip
    model: LanguageModel = load_model(
        model_config.path,
        dtype=dtype,
        device=device,
        tp=tp,
        attention=attention,
        native=library,
        quantization=scheme,
        compression=model_config.weight_compression,
        progress=progress,
    )
    if library is not None and isinstance(model, CpuDecoder) and model_config.threads is None:
        library.set_threads(share_of_cores(model_config))
        model.alone_below = _SMALL_STEP
    spec, page_size = replace(model.kv_spec, int8=int8_kv), config.cache.page_size
    activations, steps = 0, config.scheduler
    if device.type == "cuda":
        from worker_proc.cuda.startup import graph_memory, measure_activations
        from worker_proc.cuda.warm_up import compile_kernels

        rows = steps.max_running
        compile_kernels(
            model,
            attention,
            spec,
            max_rows=rows,
            max_tokens=steps.max_batch_tokens + rows,  # some have logits for a draw and for a score
            context_len=context_len,
            page_size=page_size,
            device=device,
            progress=progress,
        )
        activations = measure_activations(model, spec, steps.max_batch_tokens, page_size, rows, device)
        activations += graph_memory(model, rows) if model_config.cuda_graphs else 0
    settled = num_pages is not None
    if num_pages is None:
        num_pages = tp.min(
            choose_num_pages(
                config.cache,
                spec,
                device=device,
                ranks=model_config.tp,
                context_len=context_len,
                max_running=steps.max_running,
                activations=activations,
            )
        )
    cache = KVCache(spec, num_pages, page_size, device)
    host = None
    if config.cache.host_kv_bytes:
        host_pages = choose_host_pages(config.cache, cache, model_config.tp, settled=settled)
        host = HostPages(cache, tp.min(host_pages), device)
    prefault = Prefault(cache.page_tensors, torch.get_num_threads()) if device.type == "cpu" else None
    if device.type == "cuda" and model_config.cuda_graphs:
        model = with_graphs(model, cache, steps.max_running, steps.max_batch_tokens, context_len, progress)
    draw_rows, best_rows, score_rows = choose_draws(device, library)
    decoder = cuda_decoder(model, device)
    runner = ModelRunner(
        model,
        cache,
        max_slots=config.scheduler.max_running,
        context_len=context_len,
        group=group,
        tp=tp,
        device=device,
        grammars=grammars,
        draw_rows=draw_rows,
        best_rows=best_rows,
        score_rows=score_rows,
        share_pages=decoder is not None and decoder.attention.shares_pages,
        host=host,
        loads_by_layer=decoder is not None,
    )
    runner.warm_up((1, 2) if device.type == "cuda" else (1,))
    if grammars is not None:
        grammars.wait_ready()
    if prefault is not None:
        prefault.wait(_PREFAULT_S)
        prefault.step_back(lambda: time.monotonic() - runner.launched_at > _REST_S)
    if rank == 0:
        log.info("%s, %s on %s, context window of %d tokens", info.architecture, dtype, device.type, context_len)
        log.info("%s", describe_cache(num_pages, page_size, spec))
        if host is not None:
            log.info("host tier: %d more pages, %.2f GiB per rank", host.num_pages, host.nbytes / 2**30)
    log.debug("loaded in %.2f s", time.monotonic() - started)
    kernels: str = library.level if library is not None else "torch"
    if device.type == "cuda":
        kernels = type(attention).__name__.removesuffix("Attention").lower()
    labels = {
        "architecture": info.architecture,
        "dtype": str(dtype).removeprefix("torch."),
        "device": device.type,
        "kernels": kernels,
        "quantization": how_held(info, scheme),
        "kv_cache_dtype": "int8" if spec.int8 else str(spec.dtype).removeprefix("torch."),
    }
    host_pages = host.num_pages if host is not None else 0
    said = ready_info(info, num_pages, page_size, context_len, spec.bytes_per_token, host_pages)
    return LoadedWorker(runner, tp, said, labels)


def ready_info(
    info: ModelInfo, num_pages: int, page_size: int, context_len: int, bytes_per_token: int, host_pages: int = 0
) -> dict[str, int]:
    """The worker's part of Ready.info: `num_pages`, `page_size`, `context_len`, `vocab_size` and, with a host tier,
    `host_pages` of Go under the same names, its `eos_token_ids` as `eos_0`, `eos_1`, ..., and `kv_bytes_per_token`,
    which is of one rank."""
    return {
        "num_pages": num_pages,
        "page_size": page_size,
        "context_len": context_len,
        "vocab_size": info.vocab_size,
        "kv_bytes_per_token": bytes_per_token,
        **({"host_pages": host_pages} if host_pages else {}),
        **{f"eos_{i}": token for i, token in enumerate(info.eos_token_ids)},
    }


def how_held(info: ModelInfo, scheme: Scheme | None) -> str:
    """How weights are quantized: as they are stored, and what `scheme` makes of plain ones or adds to those."""
    if info.quantization is None or scheme is None:
        return str(scheme or info.quantization or "none")
    return (
        f"{info.quantization}, {scheme.name}" if adds_rounding(info, scheme) else f"{info.quantization}, else {scheme}"
    )


def adds_rounding(info: ModelInfo, scheme: Scheme) -> bool:
    """Whether the scheme is nothing but how weights are multiplied that are stored in codes."""
    return info.quantization not in (None, "mxfp4") and scheme.dynamic


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


def with_graphs(
    model: LanguageModel,
    cache: KVCache,
    max_rows: int,
    max_tokens: int,
    context_len: int,
    progress: Callable[[int, int], None] | None,
) -> LanguageModel:
    """The same model with its steps captured as CUDA graphs, where it can be."""
    from worker_proc.cuda.decoder import CudaDecoder
    from worker_proc.cuda.graphs import GraphedDecoder

    if not isinstance(model, CudaDecoder):
        return model
    graphed = GraphedDecoder(model, max_rows, context_len, max_tokens=max_tokens)
    graphed.capture(cache, progress)
    return graphed


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


def cuda_decoder(model: LanguageModel, device: torch.device) -> "CudaDecoder | GraphedDecoder | None":
    """A model that runs through the GPU's own decoder, with or without graphs: it reads pages that several decodes have
    in common once, where its attention can, and says which layer it has reached."""
    if device.type != "cuda":
        return None
    from worker_proc.cuda.decoder import CudaDecoder
    from worker_proc.cuda.graphs import GraphedDecoder

    return model if isinstance(model, (CudaDecoder, GraphedDecoder)) else None


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


def choose_context_len(model: ModelConfig, info: ModelInfo) -> int:
    """The configured context window, which the model must support, or the model's own."""
    wanted = model.context_len
    if wanted is not None and wanted > info.context_length:
        raise ConfigError(f"context-len {wanted} is more than the {info.context_length} tokens that the model supports")
    return wanted or info.context_length


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
