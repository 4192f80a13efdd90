"""Picks the backend for a checkpoint and loads it."""

from functools import partial
from pathlib import Path

import torch

from worker_proc.attention.interface import AttentionBackend
from worker_proc.checkpoint import open_checkpoint
from worker_proc.cpu.decoder import CpuDecoder, supports
from worker_proc.cpu.library import NativeLibrary
from worker_proc.cpu.linear import Format
from worker_proc.cpu.quantized import NativeQuantizer, keeps_scales
from worker_proc.cpu.weights import PackedWeightPlan
from worker_proc.errors import ModelError
from worker_proc.gguf.names import gguf_files
from worker_proc.models.config_fields import Config
from worker_proc.models.decoder import Decoder
from worker_proc.models.decoder_weights import DecoderWeightPlan
from worker_proc.models.describe import read_config
from worker_proc.models.families import is_native, parse_spec
from worker_proc.models.hybrid_families import hybrid_spec
from worker_proc.models.interface import LanguageModel
from worker_proc.models.loading import Progress, WeightLoader
from worker_proc.models.shard import Shard
from worker_proc.models.spec import DecoderSpec
from worker_proc.parallel import TensorParallel
from worker_proc.quantization.rows import QuantizedWeight, quantize_rows
from worker_proc.quantization.scheme import Scheme
from worker_proc.quantization.source import WeightSource
from worker_proc.quantization.stored_config import parse_stored


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    tp: TensorParallel,
    attention: AttentionBackend,
    native: NativeLibrary | None = None,
    quantization: Scheme | None = None,
    compression: str = "auto",
    progress: Progress | None = None,
) -> LanguageModel:
    """Load this rank's share of a Hugging Face checkpoint directory.

    Models that `worker_proc.cpu.decoder` (with the kernels of `native`) or, on a GPU, `worker_proc.cuda.decoder`
    supports are computed by them; others use `attention`, and what runs through transformers in bfloat16 uses the
    products of `native`. `quantization` is the scheme into which plain weights are brought while they are read;
    checkpoints that hold codes are read as they are. `compression` is that of `ModelConfig.weight_compression`.

    `progress(done_bytes, total_bytes)` counts the bytes that this rank reads. Raises ModelError naming the config
    key, tensor, file or argument that stands in the way.
    """
    directory, device = Path(path), torch.device(device)
    config = read_config(directory)
    compresses = native is not None and native.compresses and dtype == torch.bfloat16
    spec = _native_spec(config, native, dtype, tp.size)
    if compression == "on" and not (compresses and (spec is None or supports(spec, dtype))):
        reason = "needs a processor with AVX2 or AVX512 and kernels for it, bfloat16, and a model that they compute"
        raise ModelError("weight_compression", compression, reason)
    stored = parse_stored(config)
    if spec is None:
        only = f"of {config['model_type']} are read for the native CPU kernels in bfloat16 only"
        only += ", on one rank" if (other := hybrid_spec(config)) is not None and other.space is not None else ""
        if gguf_files(directory):
            raise ModelError("model", str(directory), f"GGUF files {only}")
        if stored is not None:
            reason = f"codes {only}"
            raise ModelError("quantization_config", stored.method, reason)
        if quantization is not None and (native is None or dtype != torch.bfloat16):
            reason = f"{config['model_type']} runs through transformers, which is served with plain weights only, but "
            reason += "for bfloat16 with the native CPU kernels"
            raise ModelError("quantization", quantization.name, reason)
        # Importing transformers takes longer than loading a small model, and the native decoder needs none of it.
        from worker_proc.models.transformers_backend import load_transformers_model

        return load_transformers_model(
            directory, config, dtype=dtype, device=device, tp=tp, attention=attention, native=native,
            quantization=quantization, compression=compression, progress=progress,
        )  # fmt: skip
    shard = Shard.of(spec, tp.rank, tp.size)
    with torch.inference_mode():
        loader = WeightLoader(open_checkpoint(directory), dtype, device)
        quantize = NativeQuantizer(native) if native is not None else quantize_rows
        kernels = native if supports(spec, dtype) else None
        in_groups = kernels is not None and kernels.knows(Format.INT8_SEGMENTS)
        source = WeightSource(
            loader, quantization, stored, quantize, dynamic=kernels is not None, in_groups=in_groups,
            keeps_scales=partial(keeps_scales, kernels) if kernels is not None else None,
        )  # fmt: skip
        if kernels is not None:
            packed = PackedWeightPlan(spec, shard, loader, kernels, source, compression=compression)
            loader.run(progress)
            return CpuDecoder(spec, shard, packed.finish(), tp, kernels)
        if device.type == "cuda":
            return load_gpu_model(spec, shard, loader, source, tp, attention, progress)
        plan = DecoderWeightPlan(spec, shard, loader, source)
        loader.run(progress)
        return Decoder(spec, shard, plan.finish(), tp, attention)


def _native_spec(config: Config, native: NativeLibrary | None, dtype: torch.dtype, ranks: int) -> DecoderSpec | None:
    """Of a model that the native decoder computes. Of Mamba-2 layers, whose norm goes over all heads, on one rank."""
    if is_native(config):
        return parse_spec(config)
    spec = hybrid_spec(config) if native is not None else None
    if spec is None or not supports(spec, dtype) or (spec.space is not None and ranks > 1):
        return None
    return spec


def has_recurrent_layers(path: str | Path) -> bool:
    """Whether the model of a checkpoint directory keeps states, by its configuration alone."""
    directory = Path(path)
    config = read_config(directory)
    if is_native(config):
        return False
    if (spec := hybrid_spec(config)) is not None:  # which takes no import of transformers
        return spec.recurrent
    from worker_proc.models import mixers, transformers_backend

    return transformers_backend.has_modules(directory, config, mixers.keeps_states)


def keys_hold_positions(path: str | Path) -> bool:
    """Whether keys of a checkpoint directory's model have a position in them (ALiBi), by its configuration alone."""
    directory = Path(path)
    config = read_config(directory)
    if is_native(config) or hybrid_spec(config) is not None:
        return False
    from worker_proc.models import own_attention, transformers_backend

    return transformers_backend.has_modules(directory, config, own_attention.adds_positions)


def load_gpu_model(
    spec: DecoderSpec,
    shard: Shard,
    loader: WeightLoader,
    source: WeightSource,
    tp: TensorParallel,
    attention: AttentionBackend,
    progress: Progress | None = None,
) -> LanguageModel:
    """A native model on a GPU: `worker_proc.cuda.decoder` where it computes this one, else layers by torch. Codes are
    multiplied by Triton's kernels, or by torch too where attention is plain torch (gpu-attention sdpa)."""
    from worker_proc.cuda import decoder as cuda  # needs Triton, which torch brings where there is a GPU
    from worker_proc.cuda.interface import CudaAttention
    from worker_proc.cuda.quantized import PackedWeight

    make_matrix = PackedWeight.empty if isinstance(attention, CudaAttention) else QuantizedWeight.empty
    plan = DecoderWeightPlan(spec, shard, loader, source, make_matrix)
    loader.run(progress)
    if isinstance(attention, CudaAttention) and cuda.supports(spec):
        return cuda.CudaDecoder(spec, shard, plan.finish(), tp, attention)
    return Decoder(spec, shard, plan.finish(), tp, attention)
