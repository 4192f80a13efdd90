"""Gemma 4 in the native decoder: what configurations say, and what is computed of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from bench.cpu_steps import filled_cache, floors, make_step, measure
from bench.limits import Limits
from tests.helpers_divided import check_native, reports_of
from tests.helpers_gemma4 import SHAPES, gemma4_config, make_gemma4
from tests.helpers_models import VOCAB_SIZE
from tests.helpers_multimodal import make_multimodal
from tests.helpers_paged import NEW_TOKENS, Row, generate, make_batch, make_prompts
from tests.helpers_quantized import quantize_checkpoint, store_bytes
from tests.worker.test_cpu_build import needs_compiler
from tests.worker.test_hybrid_decoder import (
    COMPRESSING,
    FP8_BLOCKS,
    LEVELS,
    all_logits,
    check_against_transformers,
    dense,
    error,
    load,
    load_native,
    matrices,
    new_cache,
    round_weights,
    rounds,
)
from worker_proc.cpu.decoder_structs import OPERATIONS
from worker_proc.cpu.features import Level
from worker_proc.cpu.linear import Format
from worker_proc.errors import ModelError
from worker_proc.models.describe import describe, read_config
from worker_proc.models.hybrid_families import hybrid_spec
from worker_proc.models.registry import has_recurrent_layers, keys_hold_positions
from worker_proc.models.transformers_backend import TransformersModel
from worker_proc.quantization.scheme import Scheme
from worker_proc.quantization.stored_config import parse_stored
from worker_proc.weights import SINGLE_FILE

pytestmark = needs_compiler
PROMPTS = make_prompts(VOCAB_SIZE)  # of up to 70 tokens
NEAR, FULL = "sliding_attention", "full_attention"
WIDE = {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 128}  # for codes in groups of 32


def config_of(shape: str = "plain", **changes: Any) -> dict[str, Any]:
    """As published files say it."""
    config = gemma4_config(shape).to_dict()
    by_layer = config.pop("per_layer_config")
    config["global_head_dim"] = next(iter(by_layer.values()))["head_dim"]
    return config | changes


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_transformers(shape: str, level: Level, tmp_path: Path) -> None:
    check_against_transformers(round_weights(make_gemma4(shape, tmp_path)), level, 0.02)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", ["all", "odd", "keys-as-values"])
def test_tokens_do_not_depend_on_chunks_and_pages(shape: str, level: Level, tmp_path: Path) -> None:
    model = load_native(make_gemma4(shape, tmp_path, tie_word_embeddings=False), level)
    want = generate(model, PROMPTS, NEW_TOKENS, page_size=16)
    assert len({token for tokens in want for token in tokens}) > 20
    for page_size, chunk in ((1, 9), (16, 1), (8, 30)):
        assert generate(model, PROMPTS, NEW_TOKENS, page_size=page_size, chunk=chunk) == want
    codes = generate(model, PROMPTS, NEW_TOKENS, page_size=16, int8=True)
    assert generate(model, PROMPTS, NEW_TOKENS, page_size=8, chunk=9, int8=True) == codes


@pytest.fixture(scope="module", params=["all", "odd"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gemma4(request.param, tmp_path_factory.mktemp("model"))


@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_bits_do_not_depend_on_batches_cuts_and_wanted_logits(checkpoint: Path, data: st.DataObject) -> None:
    """Where the last layers write no keys and values, tokens whose logits are not wanted end before them."""
    model = load_native(checkpoint)
    lengths = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=3))
    generator = torch.Generator().manual_seed(len(lengths))
    prompts = [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]
    want = [all_logits(model, prompt) for prompt in prompts]
    cache = new_cache(model, len(prompts))
    rows = [Row(prompt, list(range(20 * i, 20 * i + 20))) for i, prompt in enumerate(prompts)]
    while left := [i for i, row in enumerate(rows) if row.cached < len(row.tokens)]:
        chosen = data.draw(st.lists(st.sampled_from(left), min_size=1, unique=True))
        parts = [(i, data.draw(st.integers(1, len(rows[i].tokens) - rows[i].cached))) for i in chosen]
        parts.sort(key=lambda part: part[1] == 1)
        counts = [count for _, count in parts]
        batch = make_batch([rows[i] for i, _ in parts], counts, 8)
        places = [(i, rows[i].cached + token) for i, count in parts for token in range(count)]
        wanted = data.draw(st.lists(st.integers(0, len(places) - 1), max_size=6, unique=True))
        logits = model.forward(replace(batch, logit_rows=torch.tensor(wanted, dtype=torch.int64)), cache)
        for place, got in zip(wanted, logits, strict=True):
            i, token = places[place]
            assert torch.equal(got, want[i][token])
        for i, count in parts:
            rows[i].cached += count


@pytest.mark.parametrize("level", COMPRESSING)
def test_compressed_weights_have_the_bits_of_plain_ones(level: Level, checkpoint: Path) -> None:
    plain, compressed = (load_native(checkpoint, level, compression=compression) for compression in ("off", "on"))
    assert torch.equal(all_logits(compressed, PROMPTS[4]), all_logits(plain, PROMPTS[4]))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("scheme", [Scheme(8), Scheme(4, 32)], ids=str)
def test_codes_are_made_of_all_projections_but_routers(scheme: Scheme, level: Level, tmp_path: Path) -> None:
    path = make_gemma4("all", tmp_path, **WIDE)
    plain, coded = load_native(path, level), load_native(path, level, quantization=scheme)
    for layer in coded.weights.layers:
        assert layer.inputs is not None and layer.router is not None
        assert all(matrix.struct.format != Format.BFLOAT16 for matrix in (layer.inputs.gate, layer.inputs.output))
        assert layer.router.struct.format == Format.BFLOAT16
    off = error(all_logits(coded, PROMPTS[4]), all_logits(plain, PROMPTS[4]))
    assert 0.005 < off < (0.1 if scheme.bits == 8 else 0.5)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors", "fp8"])
@pytest.mark.parametrize("shape", ["all", "keys-as-values"])
def test_stored_codes_are_what_they_stand_for(shape: str, method: str, level: Level, tmp_path: Path) -> None:
    source = make_gemma4(shape, tmp_path / "source", **WIDE)
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


def test_ranks_compute_what_one_computes(tmp_path: Path) -> None:
    """In its shares, too: of keys and values that layers share, of twice the channels, of inputs."""
    shapes = [*SHAPES.keys() - {"odd", "mixture-odd"}]
    paths = {shape: make_gemma4(shape, tmp_path / shape) for shape in shapes}
    for shape, (path, reports) in reports_of(2, tmp_path, paths).items():
        one = check_native(path, reports)
        heads = [heads.num for heads in one.kv_spec.layers]
        assert [report["kv_heads"] for report in reports] == [max(max(1, count // 2) for count in heads)] * 2, shape


def test_inputs_of_tokens_are_read_when_they_are_wanted(tmp_path: Path) -> None:
    """The table takes no memory, and may be moved while it is served."""
    path = make_gemma4("inputs", tmp_path / "model")
    read: list[tuple[int, int]] = []
    model = load_native(path, progress=lambda done, total: read.append((done, total)))
    table = load_file(path / SINGLE_FILE)["model.embed_tokens_per_layer.weight"]
    stored = sum(tensor.nbytes for tensor in load_file(path / SINGLE_FILE).values())
    assert read[-1][0] == read[-1][1] == stored - table.nbytes
    want = all_logits(model, PROMPTS[4])
    path.rename(tmp_path / "moved")
    assert torch.equal(all_logits(model, PROMPTS[4]), want)
    assert model.weights.token_inputs is not None
    rows = torch.tensor([5, 5, 0, VOCAB_SIZE - 1])
    assert torch.equal(model.weights.token_inputs.table.rows(rows), table[rows].bfloat16())
    assert not model.weights.token_inputs.table.rows(torch.tensor([VOCAB_SIZE, -1])).any()


def test_projections_that_nobody_reads_may_be_stored(tmp_path: Path) -> None:
    """As published checkpoints have them, of layers that read the keys and values of others."""
    path = make_gemma4("inputs", tmp_path)
    want, tensors = all_logits(load_native(path), PROMPTS[3]), load_file(path / SINGLE_FILE)
    more = {f"model.layers.5.self_attn.{name}.weight": torch.zeros(2, 2) for name in ("k_proj", "v_proj", "k_norm")}
    save_file(tensors | more, path / SINGLE_FILE, {"format": "pt"})
    assert torch.equal(all_logits(load_native(path), PROMPTS[3]), want)
    other = {"model.layers.5.self_attn.v_norm.weight": torch.zeros(2)}
    save_file(tensors | other, path / SINGLE_FILE, {"format": "pt"})
    with pytest.raises(ModelError, match=r"v_norm\.weight.*unexpected tensor"):
        load_native(path)


@pytest.mark.parametrize("kind", ["gemma4", "gemma4_unified"])
def test_the_language_model_of_a_multimodal_one(kind: str, tmp_path: Path) -> None:
    """Which it is where it is published."""
    path = make_multimodal(kind, tmp_path)
    native, whole = load_native(path), load(path, None, dtype=torch.float32)
    assert native.kv_spec.layers == whole.kv_spec.layers
    assert error(all_logits(native, PROMPTS[4]), all_logits(whole, PROMPTS[4])) < 0.1


def test_it_keeps_no_states(checkpoint: Path) -> None:
    assert not has_recurrent_layers(checkpoint) and not keys_hold_positions(checkpoint)


@pytest.mark.parametrize("shape", ["inputs", "keys-as-values", "mixture"])
def test_heads_are_said_in_either_way(shape: str) -> None:
    """In fields of their own, or layer by layer, whose numbers may be padded."""
    written = gemma4_config(shape).to_dict()
    spec = hybrid_spec(written)
    assert spec is not None and spec.gemma4 is not None
    kv_heads = SHAPES[shape].get("num_global_key_value_heads")
    assert spec == hybrid_spec(config_of(shape, num_global_key_value_heads=kv_heads))
    padded = {f"{int(layer):02d}": said for layer, said in written["per_layer_config"].items()}
    assert spec == hybrid_spec(written | {"per_layer_config": padded})
    assert (spec.head_dim_of(0), spec.head_dim_of(1)) == (16, 32)
    assert (spec.kv_heads_of(0), spec.kv_heads_of(1)) == (spec.num_kv_heads, kv_heads or spec.num_kv_heads)


def test_a_config_says_whose_keys_a_layer_reads() -> None:
    spec = hybrid_spec(config_of("all", num_kv_shared_layers=3, layer_types=[NEAR, NEAR, FULL, NEAR, NEAR, FULL]))
    assert spec is not None and [spec.keys_of(layer) for layer in range(6)] == [0, 1, 2, 1, 1, 2]
    assert [spec.widening_of(layer) for layer in range(6)] == [1, 1, 1, 2, 2, 2]


def test_the_last_layer_has_no_window() -> None:
    """Whatever a configuration says."""
    spec = hybrid_spec(config_of(layer_types=[NEAR] * 6))
    assert spec is not None and spec.windows == (12,) * 5 + (None,)


@pytest.mark.parametrize(
    "change",
    [
        {"use_bidirectional_attention": "all"},
        {"global_head_dim": None},
        {"per_layer_config": {"1": {"head_dim": 32}}},
        {"per_layer_config": {str(layer): {"head_dim": 32, "sliding_window": 3} for layer in (1, 3, 5)}},
        {"per_layer_config": {"1": {"head_dim": 32}, "3": {"head_dim": 32}, "5": {"head_dim": 48}}},
        {"num_kv_shared_layers": 6},
        {"num_kv_shared_layers": 5},
        {"num_kv_shared_layers": -1},
        {"rope_parameters": {FULL: {"rope_type": "default"}}},
        {"rope_parameters": {FULL: {"rope_type": "default"}, NEAR: {"rope_type": "unheard of"}}},
        {"attention_k_eq_v": True, "num_global_key_value_heads": 3},
        {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE - 1},
        {"enable_moe_block": True, "num_experts": 2, "top_k_experts": 3, "moe_intermediate_size": 48},
        {"architectures": ["Gemma4Changed"]},
    ],
    ids=str,
)
def test_others_are_left_to_transformers(change: dict[str, Any]) -> None:
    assert hybrid_spec(config_of()) is not None
    assert hybrid_spec(config_of(**change)) is None


def test_inputs_with_another_activation_are_left_to_transformers(tmp_path: Path) -> None:
    model = load(make_gemma4("inputs", tmp_path / "inputs", hidden_activation="silu"))
    assert isinstance(model, TransformersModel)
    load_native(make_gemma4("plain", tmp_path / "plain", hidden_activation="silu"))


@pytest.mark.parametrize("shape", ["inputs", "all"])
def test_its_steps_are_measured_beside_floors(shape: str, tmp_path: Path) -> None:
    """Of layers behind the last one that writes keys and values, those of a row's last token alone."""
    model, case, most = load_native(make_gemma4(shape, tmp_path)), (3, 20, 40, 0), Limits(1e12, 1e12, 1e9, 1e-7)
    batch, pages = make_step(*case)
    parts, whole = measure(model, batch, filled_cache(model, pages, 3), 1)
    least = floors(model, *case, most)
    assert set(least) <= set(OPERATIONS) and min(parts[OPERATIONS.index(name)] for name in least if least[name]) > 0
    assert sum(parts) <= whole
    behind = [layer.o for layer in model.weights.layers[model.last_whole :]]
    before = [layer.o for layer in model.weights.layers[: model.last_whole]]
    want = sum(most.product(o, 3) for o in behind) + sum(most.product(o, 60) for o in before)
    assert least["o"] == pytest.approx(want) and len(behind) > 1
