"""Hybrid models by the native decoder, against transformers, for every instruction set of this CPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from bench.cpu_steps import filled_cache, floors, make_step, measure
from bench.limits import Limits
from tests.helpers_codes import rounds
from tests.helpers_hybrid import hybrid_config, make_hybrid
from tests.helpers_models import VOCAB_SIZE
from tests.helpers_multimodal import make_multimodal
from tests.helpers_native import COMPRESSING
from tests.helpers_paged import NEW_TOKENS, Row, generate, make_batch, make_prompts, poison
from tests.helpers_quantized import quantize_checkpoint, store_bytes
from tests.helpers_recurrent import same_states
from tests.worker.test_cpu_build import needs_compiler
from tests.worker.test_hybrid_serving import COUNT, WAVES, check_serving
from worker_proc.attention.cpu import CpuAttention
from worker_proc.attention.reference import ReferenceAttention
from worker_proc.cpu.decoder import CpuDecoder
from worker_proc.cpu.decoder_structs import OPERATIONS
from worker_proc.cpu.features import Level, cpu_features
from worker_proc.cpu.library import load_library
from worker_proc.cpu.linear import Format, PackedMatrix
from worker_proc.cpu.weights import PackedLayer
from worker_proc.errors import ModelError
from worker_proc.kv_cache import KVCache
from worker_proc.models.describe import describe, read_config
from worker_proc.models.hybrid_families import HYBRID_FAMILIES, hybrid_spec
from worker_proc.models.interface import LanguageModel
from worker_proc.models.loading import Part
from worker_proc.models.registry import has_recurrent_layers, keys_hold_positions, load_model
from worker_proc.models.transformers_backend import TransformersModel
from worker_proc.parallel import TensorParallel
from worker_proc.quantization import stored_words
from worker_proc.quantization.rows import QuantizedRows
from worker_proc.quantization.scheme import Scheme
from worker_proc.quantization.stored_config import StoredQuantization, parse_stored
from worker_proc.recurrent import StateRows, StateSave
from worker_proc.weights import SINGLE_FILE

pytestmark = needs_compiler

KIND = "qwen3_5_text"
LEVELS = cpu_features().levels()
PROMPTS = make_prompts(VOCAB_SIZE)
_LINEAR, _FULL = "linear_attention", "full_attention"
# no multiple of 32 that goes into a product, and heads that are no multiple of anything
ODD = {
    "hidden_size": 72, "intermediate_size": 50, "head_dim": 20, "linear_num_key_heads": 1, "linear_num_value_heads": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 3000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
FP8_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 32]}
CALM = {"initializer_range": 0.08}  # what is rounded grows less from layer to layer
ALL = {"num_experts_per_tok": 4}  # experts: else a rounding may choose another one
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {"linear_value_head_dim": 32},
    "odd": ODD,
    "mixture": ALL | {"kind": "qwen3_5_moe_text", "shared_expert_intermediate_size": 80},
    "mixture-odd": ALL | ODD | {"kind": "qwen3_5_moe_text"},
    "next": ALL | {"kind": "qwen3_next", "linear_num_key_heads": 2, "linear_num_value_heads": 6},
    "next-odd": ALL | ODD | {"kind": "qwen3_next", "norm_topk_prob": False},
    "convolutions": {"kind": "lfm2"},
    "convolutions-odd": {
        "kind": "lfm2", "hidden_size": 80, "block_ff_dim": 50, "block_auto_adjust_ff_dim": False, "conv_bias": True,
        "num_attention_heads": 5, "num_key_value_heads": 1, "conv_L_cache": 4, "tie_word_embeddings": True,
        "layer_types": ["conv", _FULL, "conv", _FULL],
    },
    "convolutions-mixture": ALL | {"kind": "lfm2_moe"},
    "convolutions-mixture-odd": {
        "kind": "lfm2_moe", "hidden_size": 80, "intermediate_size": 50, "moe_intermediate_size": 40, "head_dim": 20,
        "num_dense_layers": 2, "num_experts_per_tok": 4, "norm_topk_prob": False, "routed_scaling_factor": 2.5,
        "use_expert_bias": False, "layer_types": ["conv", _FULL, "conv", _FULL],
    },
    "state-spaces": ALL | {
        "kind": "granitemoehybrid", "embedding_multiplier": 3.0, "residual_multiplier": 0.6, "logits_scaling": 2.0,
        "attention_multiplier": 0.3,
    },
    "state-spaces-odd": {
        "kind": "granitemoehybrid", "num_local_experts": 0, "hidden_size": 72, "mamba_n_heads": 6, "mamba_d_head": 48,
        "mamba_expand": 4, "mamba_n_groups": 2, "mamba_d_state": 32, "mamba_d_conv": 3, "mamba_conv_bias": False,
        "mamba_proj_bias": True, "shared_intermediate_size": 50, "head_dim": 20, "position_embedding_type": "rope",
        "time_step_limit": [0.05, 0.4], "layer_types": [_LINEAR, _FULL, _LINEAR, _FULL], "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "state-spaces-dense": {
        "kind": "granitemoehybrid", "num_local_experts": 0, "shared_intermediate_size": 96,
        "position_embedding_type": "rope",
    },
    "attention-at-both-ends": {
        "layer_types": [_FULL, _LINEAR, _FULL], "num_hidden_layers": 3, "head_dim": 64, "attention_bias": True,
        "tie_word_embeddings": True, "linear_num_key_heads": 4, "linear_conv_kernel_dim": 3,
    },
}  # fmt: skip


def make(shape: str, path: Path, **changes: Any) -> Path:
    """A checkpoint of one of `SHAPES`."""
    return make_hybrid(**{"kind": KIND, "path": path} | SHAPES[shape] | changes)


def load(path: Path, level: Level | None = LEVELS[0], **settings: Any) -> Any:
    """With the kernels of a level, or with torch alone."""
    native = load_library(level) if level is not None else None
    given: dict[str, Any] = {
        "dtype": torch.bfloat16, "tp": TensorParallel(), "native": native,
        "attention": CpuAttention(native) if native is not None else ReferenceAttention(),
    }  # fmt: skip
    return load_model(path, device="cpu", **given | settings)


def load_native(path: Path, level: Level = LEVELS[0], **settings: Any) -> CpuDecoder:
    model = load(path, level, **settings)
    assert isinstance(model, CpuDecoder)
    return model


def new_cache(model: LanguageModel, slots: int, pages: int = 60, page_size: int = 8, *, snapshots: int = 0) -> KVCache:
    """Of sequences that begin; everything else is not a number."""
    cache = KVCache(model.kv_spec, pages, page_size, slots=slots, snapshots=snapshots)
    poison(cache)
    if cache.states is not None:
        cache.states.clear(range(slots))
    return cache


def all_logits(model: LanguageModel, prompt: list[int]) -> Tensor:
    batch = make_batch([Row(prompt, list(range(20)))], [len(prompt)], 8)
    batch = replace(batch, logit_rows=torch.arange(len(prompt)), states=StateRows([0]))
    return model.forward(batch, new_cache(model, 1))


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def round_weights(path: Path) -> Path:
    """To bfloat16, but stored in float32: what is computed with them is exact then."""
    tensors = {name: tensor.bfloat16().float() for name, tensor in load_file(path / SINGLE_FILE).items()}
    save_file(tensors, path / SINGLE_FILE, {"format": "pt"})
    return path


def check_against_transformers(path: Path, level: Level, most: float) -> None:
    """The logits of a checkpoint whose weights are rounded are those of transformers in float32, but for `most`, and no
    farther from them than those of transformers in bfloat16."""
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    native, half = load_native(path, level), load(path, None)
    assert isinstance(half, TransformersModel) and native.kv_spec == half.kv_spec
    errors = []
    for prompt in PROMPTS:
        with torch.inference_mode():
            want = reference(torch.tensor([prompt])).logits[0]
        got = all_logits(native, prompt)
        assert got.dtype == torch.float32 and got.shape == want.shape
        errors.append((error(got, want), error(all_logits(half, prompt), want)))
    assert all(own < most for own, _ in errors), errors
    assert sum(own for own, _ in errors) < sum(torch_s for _, torch_s in errors), "no worse than torch in bfloat16"


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_transformers(shape: str, level: Level, tmp_path: Path) -> None:
    check_against_transformers(round_weights(make(shape, tmp_path, **CALM)), level, 0.04)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_do_not_depend_on_chunks_and_pages(shape: str, level: Level, tmp_path: Path) -> None:
    model = load_native(make(shape, tmp_path), level)
    want = generate(model, PROMPTS, NEW_TOKENS, page_size=16)
    assert len({token for tokens in want for token in tokens}) > 20
    for page_size, chunk in ((1, 9), (16, 1), (8, 30)):
        assert generate(model, PROMPTS, NEW_TOKENS, page_size=page_size, chunk=chunk) == want


@pytest.fixture(scope="module", params=[(KIND, _LINEAR), ("lfm2", "conv"), ("granitemoehybrid", _LINEAR)], ids=str)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, mixer = request.param
    return make_hybrid(kind, tmp_path_factory.mktemp("model"), layer_types=[mixer, _FULL, mixer, _FULL])


@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_bits_do_not_depend_on_batches_cuts_and_saves(checkpoint: Path, data: st.DataObject) -> None:
    model = load_native(checkpoint)
    lengths = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=3))
    generator = torch.Generator().manual_seed(len(lengths))
    prompts = [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]
    want = [all_logits(model, prompt) for prompt in prompts]
    cache = new_cache(model, len(prompts), snapshots=2)
    assert cache.states is not None
    rows = [Row(prompt, list(range(20 * i, 20 * i + 20))) for i, prompt in enumerate(prompts)]
    found: list[list[Tensor]] = [[] for _ in rows]
    saved: dict[int, tuple[int, int]] = {}
    while left := [i for i, row in enumerate(rows) if row.cached < len(row.tokens)]:
        chosen = data.draw(st.lists(st.sampled_from(left), min_size=1, unique=True))
        parts = [(i, data.draw(st.integers(1, len(rows[i].tokens) - rows[i].cached))) for i in chosen]
        parts.sort(key=lambda part: part[1] == 1)
        saves = []
        for place, (i, count) in enumerate(parts[:2]):
            if data.draw(st.booleans()):
                saves.append(StateSave(place, data.draw(st.integers(1, count)), cache.states.slots + place))
                saved[saves[-1].target] = i, rows[i].cached + saves[-1].tokens
        counts = [count for _, count in parts]
        batch = make_batch([rows[i] for i, _ in parts], counts, 8)
        batch = replace(
            batch, logit_rows=torch.arange(sum(counts)), states=StateRows([i for i, _ in parts], tuple(saves))
        )
        logits = model.forward(batch, cache)
        for (i, count), part in zip(parts, logits.split(counts), strict=True):
            found[i].append(part)
            rows[i].cached += count
    for one, whole in zip(found, want, strict=True):
        assert torch.equal(torch.cat(one), whole)
    for target, (i, length) in saved.items():
        again = new_cache(model, 1)
        batch = make_batch([Row(prompts[i], list(range(20)))], [length], 8)
        model.forward(replace(batch, states=StateRows([0])), again)
        assert again.states is not None and same_states(cache.states, target, again.states, 0)


@pytest.mark.parametrize(
    ("kind", "mixer", "ends_with"),
    [
        (KIND, _LINEAR, _FULL), (KIND, _LINEAR, _LINEAR), ("lfm2", "conv", "conv"),
        ("granitemoehybrid", _LINEAR, _LINEAR),
    ],
)  # fmt: skip
def test_wanted_logits_have_the_bits_of_all(kind: str, mixer: str, ends_with: str, tmp_path: Path) -> None:
    """The last layer leaves out tokens whose logits are not wanted, but none that its state would miss."""
    path = make_hybrid(kind, tmp_path, layer_types=[mixer, _FULL, mixer, ends_with])
    model = load_native(path)
    rows = [Row(prompt, list(range(20 * i, 20 * i + 20))) for i, prompt in enumerate(PROMPTS[2:])]
    batch = make_batch(rows, [len(row.tokens) for row in rows], 8)
    batch = replace(batch, states=StateRows([0, 1, 2]))
    everything = replace(batch, logit_rows=torch.arange(len(batch.token_ids)))
    caches = [new_cache(model, 3) for _ in range(4)]
    whole = model.forward(everything, caches[0])
    some = torch.tensor([90, 3, 16, 20, 3, 119])
    assert torch.equal(model.forward(replace(batch, logit_rows=some), caches[1]), whole[some])
    assert torch.equal(model.greedy(replace(batch, logit_rows=some), caches[2]), whole[some].argmax(1))
    model.forward(replace(batch, logit_rows=some[:0]), caches[3])  # a chunk in the middle of prompts
    states = [cache.states for cache in caches]
    for other in states[1:]:
        assert states[0] is not None and other is not None
        assert all(same_states(states[0], row, other, row) for row in range(3))


@pytest.mark.parametrize("level", COMPRESSING)
def test_compressed_weights_have_the_bits_of_plain_ones(level: Level, checkpoint: Path) -> None:
    plain, compressed = (load_native(checkpoint, level, compression=compression) for compression in ("off", "on"))
    assert torch.equal(all_logits(compressed, PROMPTS[4]), all_logits(plain, PROMPTS[4]))


def test_a_scheduler_gets_the_tokens_of_each_request_alone(checkpoint: Path) -> None:
    """With snapshots, evictions and preemptions; to the last bit, as a token's bits are those of its own context."""
    model = load_native(checkpoint)
    check_serving(model, [[generate(model, [prompt], COUNT)[0] for prompt in wave] for wave in WAVES])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("scheme", [Scheme(8), Scheme(4, 32)], ids=str)
@pytest.mark.parametrize("shape", ["plain", "mixture", "convolutions", "convolutions-mixture", "state-spaces"])
def test_codes_are_made_of_projections_but_not_of_gates(
    shape: str, scheme: Scheme, level: Level, tmp_path: Path
) -> None:
    path = make(shape, tmp_path, initializer_range=0.05)
    plain, coded = load_native(path, level), load_native(path, level, quantization=scheme)
    for layer in coded.weights.layers:
        assert layer.qkv.struct.format != Format.BFLOAT16 and layer.o.struct.format != Format.BFLOAT16
        gates = [layer.router, layer.delta.gates if layer.delta is not None else None]
        assert all(matrix is None or matrix.struct.format == Format.BFLOAT16 for matrix in gates)
    off = error(all_logits(coded, PROMPTS[4]), all_logits(plain, PROMPTS[4]))
    assert off > 0.01 and (off < 0.1 or scheme.bits == 4), "what four bits mean is compared below"


def matrices(layer: PackedLayer) -> list[PackedMatrix]:
    mlps = [layer, *layer.experts, *([layer.shared] if layer.shared is not None else [])]
    gates = [layer.router, layer.delta.gates if layer.delta is not None else None]
    found = [layer.qkv, layer.o, *gates, *(matrix for mlp in mlps for matrix in (mlp.up, mlp.down))]
    return [matrix for matrix in found if matrix is not None]


def dense(matrix: PackedMatrix) -> list[list[float]]:
    """What it stands for."""
    numbers: list[list[float]] = matrix.unpack(torch.arange(matrix.outputs)).tolist()
    return numbers


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors", "fp8"])
@pytest.mark.parametrize("shape", ["plain", "next", "convolutions", "convolutions-mixture", "state-spaces-dense"])
def test_stored_codes_are_what_they_stand_for(shape: str, method: str, level: Level, tmp_path: Path) -> None:
    inner = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64} if shape == "next" else {}
    inner |= {"moe_intermediate_size": 64} if shape == "convolutions-mixture" else {}
    source = make(shape, tmp_path / "source", **CALM | inner)
    if method == "fp8":
        codes, plain = store_bytes(source, tmp_path, FP8_BLOCKS, (16, 32), "weight_scale_inv")
    else:
        scheme = Scheme(4, 32, symmetric=method == "compressed-tensors")
        codes, plain = quantize_checkpoint(source, tmp_path, method, scheme)
    stored = parse_stored(read_config(codes))
    assert stored is not None and describe(codes).quantization == method
    of_codes, of_plain = (load_native(path, level) for path in (codes, plain))
    for one, other in zip(of_codes.weights.layers, of_plain.weights.layers, strict=True):
        assert [*map(dense, matrices(one))] == [*map(dense, matrices(other))]
    want, got = (all_logits(model, PROMPTS[4]) for model in (of_plain, of_codes))
    assert torch.equal(got, want) if rounds(level, stored.scheme) else error(got, want) < 0.1


def test_stored_projections_are_unpacked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many parts of them are read: of queries and their gates two for each head."""
    source = make("next", tmp_path / "source", **{"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64})
    codes, _ = quantize_checkpoint(source, tmp_path, "gptq", Scheme(4, 32, symmetric=False))
    seen: list[str] = []
    unpack = stored_words.unpack

    def noted(stored: StoredQuantization, part: Part, tensors: dict[str, Tensor]) -> QuantizedRows:
        seen.append(part.name)
        return unpack(stored, part, tensors)

    monkeypatch.setattr(stored_words, "unpack", noted)
    read: list[tuple[int, int]] = []
    load_native(codes, progress=lambda done, total: read.append((done, total)))
    stored = [name for name in load_file(codes / SINGLE_FILE) if name.endswith(".qweight")]
    assert sorted(seen) == sorted(name.replace(".qweight", ".weight") for name in stored)
    assert read[-1][0] == read[-1][1]


def test_stored_codes_are_refused_where_transformers_computes(tmp_path: Path) -> None:
    source = make("plain", tmp_path / "source")
    codes, _ = quantize_checkpoint(source, tmp_path, "gptq", Scheme(4, 32))
    for given_settings in ({"dtype": torch.float32}, {"level": None}):
        with pytest.raises(
            ModelError, match="codes of qwen3_5_text are read for the native CPU kernels in bfloat16 only"
        ):
            load(codes, **given_settings)


def test_the_language_model_of_a_multimodal_one(tmp_path: Path) -> None:
    path = make_multimodal("qwen3_5", tmp_path)
    tensors = load_file(path / SINGLE_FILE)
    save_file(tensors | {"mtp.fc.weight": torch.zeros(2, 2)}, path / SINGLE_FILE, {"format": "pt"})
    native, half = load_native(path), load(path, None, dtype=torch.float32)
    assert error(all_logits(native, PROMPTS[4]), all_logits(half, PROMPTS[4])) < 0.1


def test_layers_that_guess_further_tokens_are_not_read(tmp_path: Path) -> None:
    path = make_hybrid(KIND, tmp_path)
    tensors = load_file(path / SINGLE_FILE)
    want = all_logits(load_native(path), PROMPTS[2])
    save_file(tensors | {"mtp.fc.weight": torch.zeros(2, 2)}, path / SINGLE_FILE, {"format": "pt"})
    assert torch.equal(all_logits(load_native(path), PROMPTS[2]), want)
    save_file(tensors | {"mtq.fc.weight": torch.zeros(2, 2)}, path / SINGLE_FILE, {"format": "pt"})
    with pytest.raises(ModelError, match=r"mtq\.fc\.weight.*unexpected tensor"):
        load_native(path)


def test_what_it_keeps_is_known_by_its_config(checkpoint: Path) -> None:
    assert has_recurrent_layers(checkpoint) and not keys_hold_positions(checkpoint)


@pytest.mark.parametrize("model_type", HYBRID_FAMILIES)
def test_what_a_config_leaves_out_is_what_transformers_takes(model_type: str) -> None:
    sizes = {"vocab_size": 320, "hidden_size": 512, "intermediate_size": 96, "num_hidden_layers": 8,
             "num_attention_heads": 32, "model_type": model_type}  # fmt: skip
    if model_type == "granitemoehybrid":  # whose layers are all state spaces otherwise
        sizes["layer_types"] = [_LINEAR, _FULL] * 4
    whole = AutoConfig.for_model(**sizes).to_dict() | {"model_type": model_type}
    assert hybrid_spec(sizes) is not None and hybrid_spec(sizes) == hybrid_spec(whole)


@pytest.mark.parametrize(("kind", "renormalizes"), [("qwen3_next", False), ("qwen3_5_moe_text", True)])
def test_shares_add_up_to_one_where_transformers_makes_them(kind: str, renormalizes: bool) -> None:
    """Whose class for Qwen 3.5 has no such field."""
    spec = hybrid_spec(hybrid_config(kind).to_dict() | {"model_type": kind, "norm_topk_prob": False})
    assert spec is not None and spec.mixture is not None and spec.mixture.renormalizes is renormalizes


@pytest.mark.parametrize(
    "change",
    [
        {"attn_output_gate": False},
        {"model_type": "qwen3_next", "mlp_only_layers": [1]},
        {"model_type": "qwen3_next", "decoder_sparse_step": 2},
        {"layer_types": [_LINEAR] * 4},
        {"layer_types": ["sliding_attention"] + [_FULL] * 3},
        {"layer_types": None, "full_attention_interval": 0},
        {"linear_num_value_heads": 3},
        {"rope_parameters": {"rope_type": "unheard of"}},
        {"architectures": ["Qwen3_5Changed"]},
    ],
    ids=str,
)
def test_others_are_left_to_transformers(change: dict[str, Any]) -> None:
    kind = change.get("model_type", KIND)
    config = hybrid_config(kind).to_dict() | {"model_type": kind}
    assert hybrid_spec(config) is not None
    assert hybrid_spec(config | change) is None


def test_heads_that_the_kernels_do_not_know_are_left_to_transformers(tmp_path: Path) -> None:
    assert isinstance(load(make_hybrid(KIND, tmp_path, linear_key_head_dim=24)), TransformersModel)


@pytest.mark.parametrize("shape", ["next", "convolutions", "convolutions-mixture", "state-spaces"])
def test_its_steps_are_measured_beside_floors(shape: str, tmp_path: Path) -> None:
    model, case = load_native(make(shape, tmp_path)), (3, 1, 40, 0)
    batch, pages = make_step(*case)
    parts, whole = measure(model, batch, filled_cache(model, pages, 3), 1)
    least = floors(model, *case, Limits(1e9, 1e9, 1e9, 1e-7))
    assert set(least) <= set(OPERATIONS) and min(least.values()) > 0
    took = dict(zip(OPERATIONS, parts, strict=True))
    assert took["recurrent"] > 0 and took["attention"] > 0 and sum(parts) <= whole
