"""From the configuration to a model runner that is ready to serve: ranks, weights, KV cache."""

import logging
import time
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from common.config import ClusterConfig, ModelConfig
from worker_proc.attention.interface import AttentionBackend
from worker_proc.choices import (
    Served,
    adds_rounding,
    choose_attention,
    choose_draws,
    choose_kernels,
    choose_threads,
    decide,
    how_held,
    share_of_cores,
)
from worker_proc.cpu.decoder import CpuDecoder
from worker_proc.cpu.library import NativeLibrary
from worker_proc.cpu.linear import Format
from worker_proc.cpu.prefault import Prefault
from worker_proc.errors import ModelError
from worker_proc.grammar_matcher import GrammarMatchers, load_vocabulary
from worker_proc.host_tier import HostPages
from worker_proc.kv_cache import KVCache
from worker_proc.memory import CacheSize, choose_host_pages, choose_size, describe_cache, keep_freed_memory
from worker_proc.model_runner import ModelRunner
from worker_proc.models.interface import LanguageModel, ModelInfo
from worker_proc.models.loading import Progress
from worker_proc.models.registry import has_recurrent_layers, keys_hold_positions, load_model
from worker_proc.parallel import TensorParallel

log = logging.getLogger(__name__)

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
    settled: CacheSize | None = None,
    progress: Progress | None = None,
) -> LoadedWorker:
    """Load one rank of `config.model.tp` ranks; all of them must be started, as they wait for each other, at the file
    `store`. The KV cache has the size that an earlier group has `settled`, however much memory is available now.

    `progress(done_bytes, total_bytes)` is called while weights are read. Raises ConfigError or ModelError naming the
    option, file, tensor or number that stands in the way, RuntimeError if another rank is missing.
    """
    started = time.monotonic()
    served = decide(config, rank)
    _refuse_recurrent(config)
    if served.int8_kv and keys_hold_positions(config.model.path):
        reason = "positions of tokens, which are a part of this model's keys (ALiBi), need more than 8 bits"
        raise ModelError("kv_cache_dtype", "int8", reason)
    device = served.device
    if device.type == "cpu":
        keep_freed_memory()
        torch.set_num_threads(choose_threads(config.model, served.info))
    else:
        torch.cuda.set_device(device)
    grammars = _load_grammars(config.model, served) if rank == 0 else None  # while the weights are read
    tp = TensorParallel.connect(rank, config.model.tp, store, device, timeout=config.start_timeout_s)
    library = choose_kernels(config.model, device)
    if library is not None:
        library.set_threads(torch.get_num_threads())
    attention = choose_attention(library, served.dtype, device, config.model, int8_kv=served.int8_kv)
    if rank == 0:
        _log_unrounded(served, library)
    parts = _Parts(config, served, tp, library, attention, progress)
    model = parts.load_model()
    cache = parts.make_cache(model, settled)
    host = parts.make_host(cache, settled=settled is not None)
    prefault = Prefault(cache.page_tensors, torch.get_num_threads()) if device.type == "cpu" else None
    runner = parts.make_runner(group, model, cache, host, grammars)
    if grammars is not None:
        grammars.wait_ready()
    if prefault is not None:
        prefault.wait(_PREFAULT_S)
        prefault.step_back(lambda: time.monotonic() - runner.launched_at > _REST_S)
    if rank == 0:
        _log_loaded(served, cache, host)
    log.debug("loaded in %.2f s", time.monotonic() - started)
    host_pages = host.num_pages if host is not None else 0
    sizes = (_size(cache), cache.page_size, served.context_len, cache.spec.bytes_per_token, host_pages)
    return LoadedWorker(runner, tp, ready_info(served.info, *sizes), parts.labels(cache))


def ready_info(
    info: ModelInfo, size: CacheSize, page_size: int, context_len: int, bytes_per_token: int, host_pages: int = 0
) -> dict[str, int]:
    """The worker's part of Ready.info: `num_pages`, `page_size`, `context_len`, `vocab_size` and, with a host tier,
    `host_pages`, with recurrent layers `slots` and `snapshots` of Go under the same names, its `eos_token_ids` as
    `eos_0`, `eos_1`, ..., and `kv_bytes_per_token`, which is of one rank."""
    return {
        "num_pages": size.num_pages,
        "page_size": page_size,
        "context_len": context_len,
        "vocab_size": info.vocab_size,
        "kv_bytes_per_token": bytes_per_token,
        **({"host_pages": host_pages} if host_pages else {}),
        **({"slots": size.slots, "snapshots": size.snapshots} if size.slots else {}),
        **{f"eos_{i}": token for i, token in enumerate(info.eos_token_ids)},
    }


@dataclass(frozen=True, slots=True)
class _Parts:
    """Makes what a rank consists of, each after the one before."""

    config: ClusterConfig
    served: Served
    tp: TensorParallel
    library: NativeLibrary | None
    attention: AttentionBackend
    progress: Progress | None

    def load_model(self) -> LanguageModel:
        config, served, library = self.config.model, self.served, self.library
        model: LanguageModel = load_model(
            config.path,
            dtype=served.dtype,
            device=served.device,
            tp=self.tp,
            attention=self.attention,
            native=library,
            quantization=served.scheme,
            compression=config.weight_compression,
            progress=self.progress,
        )
        if library is not None and isinstance(model, CpuDecoder) and config.threads is None:
            library.set_threads(share_of_cores(config))
            model.alone_below = _SMALL_STEP
        return model

    def make_cache(self, model: LanguageModel, settled: CacheSize | None) -> KVCache:
        """As large as was settled, or as each rank has room for."""
        config, device, context_len = self.config, self.served.device, self.served.context_len
        spec = replace(model.kv_spec, int8=self.served.int8_kv)
        activations = 0
        if device.type == "cuda":
            from worker_proc.cuda.startup import prepare_steps

            activations = prepare_steps(
                model, self.attention, spec, config, context_len, self.tp, device, self.progress
            )
        if settled is None:
            size = choose_size(
                config.cache,
                spec,
                device=device,
                ranks=self.tp.size,
                context_len=context_len,
                max_running=config.scheduler.max_running,
                activations=activations,
            )
            settled = CacheSize(*(self.tp.min(number) for number in astuple(size)))
        page_size, slots, snapshots = config.cache.page_size, settled.slots, settled.snapshots
        return KVCache(spec, settled.num_pages, page_size, device, slots=slots, snapshots=snapshots)

    def make_host(self, cache: KVCache, *, settled: bool) -> HostPages | None:
        config = self.config.cache
        if not config.host_kv_bytes:
            return None
        pages = choose_host_pages(config, cache, self.tp.size, settled=settled)
        return HostPages(cache, self.tp.min(pages), self.served.device)

    def make_runner(
        self,
        group: str,
        model: LanguageModel,
        cache: KVCache,
        host: HostPages | None,
        grammars: GrammarMatchers | None,
    ) -> ModelRunner:
        """Warmed up, and on a GPU with graphs."""
        steps, device, context_len = self.config.scheduler, self.served.device, self.served.context_len
        share_pages = loads_by_layer = False
        if device.type == "cuda":
            from worker_proc.cuda.startup import cuda_decoder, with_graphs

            if self.config.model.cuda_graphs:
                limits = (steps.max_running, steps.max_batch_tokens, context_len)
                model = with_graphs(model, self.attention, cache, *limits, self.tp, self.progress)
            decoder = cuda_decoder(model)
            loads_by_layer = decoder is not None
            share_pages = decoder is not None and decoder.attention.shares_pages
        draw_rows, best_rows, score_rows = choose_draws(device, self.library)
        runner = ModelRunner(
            model,
            cache,
            max_slots=steps.max_running if cache.states is None else cache.states.slots,
            context_len=context_len,
            group=group,
            tp=self.tp,
            device=device,
            grammars=grammars,
            draw_rows=draw_rows,
            best_rows=best_rows,
            score_rows=score_rows,
            share_pages=share_pages,
            host=host,
            loads_by_layer=loads_by_layer,
        )
        runner.warm_up((1, 2) if device.type == "cuda" else (1,))
        return runner

    def labels(self, cache: KVCache) -> dict[str, str]:
        served, kernels = self.served, "torch"
        if served.device.type == "cuda":
            kernels = type(self.attention).__name__.removesuffix("Attention").lower()
        elif self.library is not None:
            kernels = self.library.level
        return {
            "architecture": served.info.architecture,
            "dtype": str(served.dtype).removeprefix("torch."),
            "device": served.device.type,
            "kernels": kernels,
            "quantization": how_held(served.info, served.scheme),
            "kv_cache_dtype": "int8" if cache.spec.int8 else str(cache.spec.dtype).removeprefix("torch."),
        }


def _refuse_recurrent(config: ClusterConfig) -> None:
    """What a state cannot do: it is not undone token by token, and is worth nothing without that of the same place.
    Weights are not needed to know it."""
    speculates = config.scheduler.speculation != "off"
    if not (speculates or config.cache.host_kv_bytes) or not has_recurrent_layers(config.model.path):
        return
    if speculates:
        reason = "models with recurrent layers cannot take back tokens that were guessed wrongly"
        raise ModelError("speculation", config.scheduler.speculation, reason)
    if config.cache.host_kv_bytes:
        reason = "the host tier does not hold what recurrent layers keep"
        raise ModelError("host_kv_memory", config.cache.host_kv_bytes, reason)


def _size(cache: KVCache) -> CacheSize:
    states = cache.states
    return CacheSize(cache.num_pages) if states is None else CacheSize(cache.num_pages, states.slots, states.snapshots)


def _load_grammars(model: ModelConfig, served: Served) -> GrammarMatchers:
    info = served.info
    load = partial(load_vocabulary, Path(model.path), info.vocab_size, info.eos_token_ids)
    return GrammarMatchers(load, info.vocab_size, served.device)


def _log_unrounded(served: Served, library: NativeLibrary | None) -> None:
    """Say where activations stay as they are although the scheme rounds them."""
    scheme = served.scheme
    if scheme is None or library is None or not scheme.dynamic:
        return
    if scheme.by_channel and not adds_rounding(served.info, scheme):
        return  # every kernel multiplies codes by channel as bytes
    formats = {4: Format.INT4_SEGMENTS, 8: Format.INT8_SEGMENTS}
    kept = [f"{bits} bits" for bits, held in formats.items() if not library.knows(held)]
    if kept:
        log.info(
            "%s: activations stay in 16 bits where codes in groups have %s, as the kernels for this processor "
            "do not multiply them as bytes", scheme, " and ".join(kept),
        )  # fmt: skip


def _log_loaded(served: Served, cache: KVCache, host: HostPages | None) -> None:
    what = (served.info.architecture, served.dtype, served.device.type, served.context_len)
    log.info("%s, %s on %s, context window of %d tokens", *what)
    log.info("%s", describe_cache(_size(cache), cache.page_size, cache.spec))
    if host is not None:
        log.info("host tier: %d more pages, %.2f GiB per rank", host.num_pages, host.nbytes / 2**30)
