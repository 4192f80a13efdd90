"""Quantized models: native kernels against torch, shards against the whole, stored formats against what they mean."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers_codes import rounds
from tests.helpers_cpu_rank import PAGE_SIZE, PAGES, probe_batch
from tests.helpers_models import VOCAB_SIZE, make_checkpoint
from tests.helpers_paged import generate, make_prompts, poison, sent
from tests.helpers_quantized import (
    bytes_config,
    quantize_checkpoint,
    store_bytes,
)
from tests.worker.test_cpu_build import needs_compiler
from worker_proc.attention.reference import ReferenceAttention
from worker_proc.checkpoint import open_checkpoint
from worker_proc.cpu.decoder import CpuDecoder
from worker_proc.cpu.features import Level, cpu_features
from worker_proc.cpu.library import load_library
from worker_proc.cpu.linear import PackedMatrix
from worker_proc.cpu.weights import PackedWeightPlan
from worker_proc.errors import ModelError
from worker_proc.kv_cache import KVCache
from worker_proc.models.decoder import Decoder
from worker_proc.models.decoder_layout import Shard
from worker_proc.models.describe import describe, read_config
from worker_proc.models.families import parse_spec
from worker_proc.models.interface import LanguageModel
from worker_proc.models.loading import WeightLoader
from worker_proc.models.registry import load_model
from worker_proc.parallel import TensorParallel
from worker_proc.quantization.scheme import FP8, W8A8, Scheme
from worker_proc.quantization.source import WeightSource
from worker_proc.quantization.stored_config import parse_stored
from worker_proc.weights import SINGLE_FILE

pytestmark = needs_compiler
LEVELS = cpu_features().levels()
INT8, INT4, W4A8 = Scheme(8), Scheme(4, 32), Scheme(4, 32, dynamic=True)
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama-gqa-untied", {}),
    ("llama-bias", {}),
    ("mistral-sliding", {}),
    ("qwen3", {}),
    ("qwen3", {"hidden_size": 72, "intermediate_size": 50, "head_dim": 20, "vocab_size": 41}),
    ("gemma3", {}),
    ("phi3", {}),
    ("mixtral", {"num_experts_per_tok": 4}),  # all of them: else a rounding may choose another one
]
IDS = [f"{kind}{'-odd' if overrides else ''}" for kind, overrides in KINDS]
PROMPTS = make_prompts(VOCAB_SIZE)


def load_native(path: Path, scheme: Scheme | None, level: Level = LEVELS[0], threads: int = 2) -> CpuDecoder:
    native = load_library(level)
    native.set_threads(threads)
    model = load_model(
        path, dtype=torch.bfloat16, device="cpu", tp=TensorParallel(), attention=ReferenceAttention(), native=native,
        quantization=scheme,
    )  # fmt: skip
    assert isinstance(model, CpuDecoder)
    return model


def load_torch(path: Path, scheme: Scheme | None, dtype: torch.dtype = torch.float32) -> Decoder:
    tp, attention = TensorParallel(), ReferenceAttention()
    model = load_model(path, dtype=dtype, device="cpu", tp=tp, attention=attention, quantization=scheme)
    assert isinstance(model, Decoder)
    return model


def logits(model: LanguageModel, vocab_size: int = VOCAB_SIZE, int8: bool = False) -> Tensor:
    cache = KVCache(replace(model.kv_spec, int8=int8), PAGES, PAGE_SIZE)
    poison(cache)
    return model.forward(probe_batch(vocab_size), cache)


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def shard_weights(path: Path, rank: int, size: int, scheme: Scheme | None) -> list[tuple[Tensor, ...]]:
    """What the projections of a shard stand for, in the order in which they are packed."""
    config = read_config(path)
    spec = parse_spec(config)
    loader = WeightLoader(open_checkpoint(path), torch.bfloat16, torch.device("cpu"))
    source = WeightSource(loader, scheme, parse_stored(config))
    plan = PackedWeightPlan(spec, Shard.of(spec, rank, size), loader, load_library(LEVELS[0]), source)
    loader.run()

    def dense(matrix: PackedMatrix) -> Tensor:
        return matrix.unpack(torch.arange(matrix.outputs))

    return [
        (
            *(dense(matrix) for matrix in (layer.qkv, layer.o, layer.down, layer.up)),
            *(dense(matrix) for expert in layer.experts for matrix in (expert.up, expert.down)),
        )
        for layer in plan.finish().layers
    ]


def check_same_model(codes: Path, plain: Path) -> None:
    """Two checkpoints stand for the same weights, and are computed alike: bit by bit where the kernels promise it."""
    for of_codes, of_plain in zip(shard_weights(codes, 0, 1, None), shard_weights(plain, 0, 1, None), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(of_codes, of_plain, strict=True))
    got, want = logits(load_native(codes, None)), logits(load_native(plain, None))
    stored = parse_stored(read_config(codes))
    assert stored is not None
    if rounds(LEVELS[0], stored.scheme):
        assert torch.equal(got, want)
    else:
        assert error(got, want) < (0.05 if stored.scheme.dynamic else 0.02)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("scheme", [INT8, INT4, Scheme(4, 128), FP8, W8A8, W4A8], ids=str)
@pytest.mark.parametrize(("kind", "overrides"), KINDS, ids=IDS)
def test_logits_are_those_of_dequantized_weights_in_torch(
    kind: str, overrides: dict[str, Any], scheme: Scheme, level: Level, tmp_path: Path
) -> None:
    path = make_checkpoint(kind, tmp_path, **overrides)
    exact, native = load_torch(path, replace(scheme, dynamic=False)), load_native(path, scheme, level)
    vocab_size = exact.vocab_size
    want, got = logits(exact, vocab_size), logits(native, vocab_size)
    assert error(got, want) < (0.05 if scheme.dynamic else 0.03)
    assert error(want, logits(load_torch(path, None), vocab_size)) > 1e-3, "nothing was quantized"
    want, got = logits(exact, vocab_size, int8=True), logits(native, vocab_size, int8=True)
    # Keys and values that differ in bfloat16 and float32 may be rounded to neighbouring codes.
    assert error(got, want) < 0.05


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("scheme", [INT8, INT4, FP8, W8A8, W4A8], ids=str)
def test_tokens_do_not_depend_on_pages_chunks_or_company(scheme: Scheme, level: Level, tmp_path: Path) -> None:
    native = load_native(make_checkpoint("qwen3", tmp_path), scheme, level)
    together = generate(native, PROMPTS, 16, page_size=16, int8=True)
    assert len({token for output in together for token in output}) > 20, "a degenerate model proves nothing"
    assert generate(native, PROMPTS, 16, page_size=8, chunk=9, int8=True) == together
    alone = [generate(native, [prompt], 16, page_size=16, chunk=16, int8=True)[0] for prompt in PROMPTS]
    assert alone == together


@pytest.mark.parametrize("kind", ["gpt2", "llama-rope-yarn", "vaultgemma"])
def test_torch_attends_to_an_int8_cache(kind: str, tmp_path: Path) -> None:
    """Chunks and pages do not matter: what is in a cache was rounded when it was stored."""
    tp, attention = TensorParallel(), ReferenceAttention()
    path = make_checkpoint(kind, tmp_path)
    model = load_model(path, dtype=torch.float32, device="cpu", tp=tp, attention=attention)
    whole = generate(model, PROMPTS, 12, page_size=16, int8=True)
    assert generate(model, PROMPTS, 12, page_size=5, chunk=11, int8=True) == whole


def test_gpt2_is_quantized_by_torch(tmp_path: Path) -> None:
    path = make_checkpoint("gpt2", tmp_path)
    plain, quantized = logits(load_torch(path, None)), logits(load_torch(path, INT8))
    assert 1e-4 < error(quantized, plain) < 0.05


def test_copies_of_pages_bring_their_scales(tmp_path: Path) -> None:
    cache = KVCache(replace(load_torch(make_checkpoint("llama", tmp_path), None).kv_spec, int8=True), 4, 8)
    slots = torch.arange(8)
    k = torch.randn(8, cache.spec.num_kv_heads, cache.spec.k_head_dim)
    cache.write(1, k, -k, slots)
    with sent() as staging:
        cache.stage_copies([0], [3], staging)
    before, after = cache.read(1, slots), cache.read(1, slots + 24)
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])
    assert error(after[0], k) < 0.01


@pytest.mark.parametrize("scheme", [INT8, INT4, FP8], ids=str)
def test_shards_have_the_codes_of_the_whole(scheme: Scheme, tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path, intermediate_size=128)
    whole = shard_weights(path, 0, 1, scheme)
    halves = [shard_weights(path, rank, 2, scheme) for rank in range(2)]
    for layer, (qkv, o, down, _) in enumerate(whole):
        thirds = [torch.chunk(half[layer][0], 3) for half in halves]
        assert torch.equal(qkv, torch.cat([third[i] for i in range(3) for third in thirds]))
        assert torch.equal(o, torch.cat([half[layer][1] for half in halves], dim=1))
        assert torch.equal(down, torch.cat([half[layer][2] for half in halves], dim=1))


def test_groups_that_a_rank_would_cut_are_refused(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path)  # 96 channels of the MLP
    with pytest.raises(ModelError, match=r"down_proj.weight = \[0, 48\]: .* group of 32"):
        shard_weights(path, 0, 2, INT4)


FORMATS = [
    ("gptq", Scheme(4, 32), {}),
    ("gptq", Scheme(4, 128), {"checkpoint_format": "gptq_v2"}),
    ("gptq", Scheme(4, 32, symmetric=False), {}),
    ("gptq", Scheme(4, 32, symmetric=False), {"checkpoint_format": "gptq_v2"}),
    ("gptq", Scheme(8, 32), {}),
    ("gptq", Scheme(4, 32, ordered=True), {}),
    ("gptq", Scheme(4, 32, symmetric=False, ordered=True), {"static_groups": True}),
    ("gptq", Scheme(4), {"desc_act": True}),
    ("gptq", Scheme(4), {}),
    ("awq", Scheme(4, 32, symmetric=False), {}),
    ("awq", Scheme(4, 64, symmetric=False), {}),
    ("compressed-tensors", Scheme(4, 32), {}),
    ("compressed-tensors", Scheme(4, 128, symmetric=False), {}),
    ("compressed-tensors", Scheme(4), {}),
    ("compressed-tensors", Scheme(8, 32), {}),
    ("compressed-tensors", Scheme(4, 32, ordered=True), {}),
    ("compressed-tensors", Scheme(4, 64, symmetric=False, ordered=True), {}),
    ("compressed-tensors", Scheme(8), {}),
    ("compressed-tensors", Scheme(8, None, symmetric=False), {}),
]


@pytest.mark.parametrize(
    ("method", "scheme", "changes"), FORMATS, ids=[f"{m}-{s}-{s.symmetric}-{s.ordered}-{c}" for m, s, c in FORMATS]
)
def test_stored_codes_are_what_they_stand_for(
    method: str, scheme: Scheme, changes: dict[str, Any], tmp_path: Path
) -> None:
    source = make_checkpoint("llama-gqa-untied", tmp_path / "source", intermediate_size=128)
    codes, plain = quantize_checkpoint(source, tmp_path, method, scheme, **changes)
    assert describe(codes).quantization == method and describe(codes).dtype == "bfloat16"
    check_same_model(codes, plain)
    # in float32, where only the plain weights are rounded to bfloat16
    assert error(logits(load_torch(codes, None)), logits(load_torch(plain, None))) < 0.012


FP8_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [48, 32]}
FP8_TENSORS = {"quant_method": "fp8", "activation_scheme": "static"}
BYTES: list[tuple[str, dict[str, Any], tuple[int | None, int | None], str]] = [
    ("blocks", FP8_BLOCKS, (48, 32), "weight_scale_inv"),
    ("tensors", FP8_TENSORS, (None, None), "weight_scale"),
    ("float-channel", bytes_config("float"), (1, None), "weight_scale"),
    ("float-tensor", bytes_config("float", strategy="tensor"), (None, None), "weight_scale"),
    ("float-block", bytes_config("float", strategy="block", block_structure=[16, 64]), (16, 64), "weight_scale"),
    ("int-channel", bytes_config("int"), (1, None), "weight_scale"),
    ("int-group", bytes_config("int", strategy="group", group_size=32), (1, 32), "weight_scale"),
    ("naive", bytes_config("float") | {"format": "naive-quantized"}, (1, None), "weight_scale"),
]


@pytest.mark.parametrize(("kind", "overrides"), [("llama-gqa-untied", {}), ("mixtral", {"num_experts_per_tok": 4})])
@pytest.mark.parametrize(("name", "config", "block", "scale"), BYTES, ids=[case[0] for case in BYTES])
def test_stored_bytes_are_what_they_stand_for(
    name: str,
    config: dict[str, Any],
    block: tuple[int | None, int | None],
    scale: str,
    kind: str,
    overrides: dict[str, Any],
    tmp_path: Path,
) -> None:
    source = make_checkpoint(kind, tmp_path / "source", intermediate_size=128, **overrides)
    codes, plain = store_bytes(source, tmp_path, config, block, scale)
    assert describe(codes).quantization == config["quant_method"] and describe(codes).dtype == "bfloat16"
    check_same_model(codes, plain)
    assert error(logits(load_torch(codes, None)), logits(load_torch(plain, None))) < 0.012


def test_activations_are_rounded_where_a_checkpoint_says_so(tmp_path: Path) -> None:
    """By the native kernels alone; who asks for it elsewhere is told."""
    source = make_checkpoint("llama-gqa-untied", tmp_path / "source", intermediate_size=128)
    stored = {}
    for name, activations in (("dynamic", {}), ("static", {"dynamic": False, "strategy": "tensor"})):
        config = bytes_config("int")
        config["config_groups"]["group_0"]["input_activations"] |= activations
        (tmp_path / name).mkdir()
        codes, _ = store_bytes(source, tmp_path / name, config, (1, None), "weight_scale")
        stored[name] = codes
    schemes = {name: parse_stored(read_config(codes)) for name, codes in stored.items()}
    assert [one.scheme if one else None for one in schemes.values()] == [W8A8, INT8]
    rounded, exact = logits(load_native(stored["dynamic"], None)), logits(load_native(stored["static"], None))
    assert 1e-3 < error(rounded, exact) < 0.05
    in_torch = [logits(load_torch(codes, None)) for codes in stored.values()]
    assert torch.equal(*in_torch)
    for refuse in (lambda: load_torch(source, W8A8), lambda: load_torch(source, W8A8, torch.bfloat16)):
        with pytest.raises(ModelError, match=r"quantization = 'w8a8': activations are rounded by .*: take int8"):
            refuse()


def check_refused(codes: Path, weights: dict[str, Tensor], message: str) -> None:
    save_file(weights, codes / SINGLE_FILE)
    with pytest.raises(ModelError, match=message):
        load_native(codes, None)


def test_stored_bytes_are_checked(tmp_path: Path) -> None:
    source = make_checkpoint("llama", tmp_path / "source")
    codes, _ = store_bytes(source, tmp_path, FP8_BLOCKS, (48, 32), "weight_scale_inv")
    with pytest.raises(ModelError, match="quantization = 'fp8': the checkpoint is quantized already"):
        load_native(codes, FP8)
    weights, base = load_file(codes / SINGLE_FILE), "model.layers.0.mlp.up_proj."
    broken = weights[base + "weight"].view(torch.uint8).clone()
    broken[3, 5] = 0xFF
    scales = weights[base + "weight_scale_inv"]
    for change, message in (
        ({base + "weight": broken.view(torch.float8_e4m3fn)}, "up_proj.weight = 'NaN': a weight is not a number"),
        ({base + "weight_scale_inv": scales[:, :-1].contiguous()}, r"up_proj.weight_scale_inv = \[2, 1\]: .*\[2, 2\]"),
        ({base + "weight_scale_inv": scales.double()}, r"up_proj.weight_scale_inv = 'F64': .*F32"),
        (
            {base + "weight_scale_inv": scales * torch.nan},
            "up_proj.weight = 'infinity or NaN': a scale is not a finite number",
        ),
        ({base + "weight": weights[base + "weight"].to(torch.float8_e5m2)}, "up_proj.weight = .*not quantized"),
        ({base + "extra": torch.zeros(3)}, r"up_proj.extra = \[3\]: unexpected tensor"),
    ):
        check_refused(codes, weights | change, message)
    del weights[base + "weight_scale_inv"]
    check_refused(codes, weights, r"up_proj.weight_scale = None: the checkpoint lacks")


def test_modules_that_are_stored_plain_stay_so(tmp_path: Path) -> None:
    source = make_checkpoint("llama", tmp_path / "source")
    codes, plain = quantize_checkpoint(source, tmp_path, "gptq", INT4)
    weights, originals = load_file(codes / SINGLE_FILE), load_file(plain / SINGLE_FILE)
    base = "model.layers.1.mlp.down_proj."
    weights = {name: tensor for name, tensor in weights.items() if not name.startswith(base)}
    save_file(weights | {base + "weight": originals[base + "weight"]}, codes / SINGLE_FILE)
    check_same_model(codes, plain)
    base = "model.layers.1.self_attn.k_proj."
    weights = {name: tensor for name, tensor in weights.items() if not name.startswith(base)}
    save_file(weights | {base + "weight": originals[base + "weight"]}, codes / SINGLE_FILE)
    with pytest.raises(ModelError, match=r"k_proj.weight = 'not quantized'"):
        load_native(codes, None)


def test_biases_of_zeros_beside_codes_are_left_out(tmp_path: Path) -> None:
    """As AutoGPTQ stores them for layers that have none; the others are those of the model."""
    source = make_checkpoint("qwen2", tmp_path / "source")
    codes, plain = quantize_checkpoint(source, tmp_path, "gptq", INT4)
    weights = load_file(codes / SINGLE_FILE)
    modules = [name.removesuffix("qweight") for name in weights if name.endswith("qweight")]
    zeros = {module + "bias": torch.zeros(weights[module + "scales"].shape[1]).half() for module in modules}
    assert len(zeros) == 14 and len(zeros.keys() & weights.keys()) == 6
    save_file(zeros | weights, codes / SINGLE_FILE)
    check_same_model(codes, plain)
    assert error(logits(load_torch(codes, None)), logits(load_torch(plain, None))) < 0.012
    ones = {"model.layers.1.mlp.up_proj.bias": torch.ones(96)}
    check_refused(codes, zeros | weights | ones, r"up_proj.bias = \[96\]: unexpected tensor")


def test_a_stored_checkpoint_is_checked(tmp_path: Path) -> None:
    source = make_checkpoint("llama", tmp_path / "source")
    codes, _ = quantize_checkpoint(source, tmp_path, "gptq", INT4)
    with pytest.raises(ModelError, match="quantization = 'gptq': the checkpoint is quantized already"):
        load_native(codes, INT8)
    weights, base = load_file(codes / SINGLE_FILE), "model.layers.0.mlp.up_proj."
    for change, message in (
        ({base + "g_idx": weights[base + "g_idx"].flip(0)}, r"up_proj.g_idx = .*order of activations"),
        ({base + "scales": weights[base + "scales"][:, :-1].contiguous()}, r"up_proj.scales = \[2, 95\]: .*\[2, 96\]"),
        ({base + "qzeros": weights[base + "qzeros"].double()}, r"up_proj.qzeros = 'F64': .*I32"),
        (
            {base + "scales": weights[base + "scales"] * torch.inf},
            "up_proj.weight = 'infinity or NaN': a scale is not a finite number",
        ),
        ({base + "extra": torch.zeros(3)}, r"up_proj.extra = \[3\]: unexpected tensor"),
    ):
        check_refused(codes, weights | change, message)
    del weights[base + "qzeros"]
    check_refused(codes, weights, r"up_proj.qzeros = None: the checkpoint lacks")


def test_an_order_of_activations_is_checked(tmp_path: Path) -> None:
    source = make_checkpoint("llama", tmp_path / "source")
    codes, _ = quantize_checkpoint(source, tmp_path, "gptq", Scheme(4, 32, ordered=True))
    weights, base = load_file(codes / SINGLE_FILE), "model.layers.0.self_attn.k_proj."
    groups = weights[base + "g_idx"]
    assert groups.tolist() != sorted(groups.tolist())
    for change, message in (
        ({base + "g_idx": groups.flip(0)}, "g_idx = .*computed together must have their inputs in one order"),
        ({base + "g_idx": torch.zeros_like(groups)}, "k_proj.g_idx = .*groups must be of 32 inputs each"),
        ({base + "g_idx": groups[:-1].contiguous()}, r"k_proj.g_idx = \[63\]: .*\[64\]"),
    ):
        check_refused(codes, weights | change, message)
    del weights[base + "g_idx"]
    check_refused(codes, weights, "k_proj.g_idx = None: the checkpoint lacks")
    with pytest.raises(ModelError, match="order of activations cannot be shared out over ranks: take tp = 1"):
        shard_weights(codes, 0, 2, None)


def test_the_transformers_backend_takes_plain_weights_only(tmp_path: Path) -> None:
    path = make_checkpoint("vaultgemma", tmp_path)
    with pytest.raises(ModelError, match="quantization = 'int4': vaultgemma runs through transformers"):
        load_model(
            path,
            dtype=torch.float32,
            device="cpu",
            tp=TensorParallel(),
            attention=ReferenceAttention(),
            quantization=INT4,
        )
