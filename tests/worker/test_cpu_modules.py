"""Linear layers and experts of transformers' models by the native kernels."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

from tests.helpers_models import VOCAB_SIZE, make_checkpoint, make_config
from tests.helpers_native import COMPRESSING
from tests.helpers_paged import Row, make_batch, make_prompts
from tests.worker.test_cpu_build import needs_compiler
from worker_proc.attention.reference import ReferenceAttention
from worker_proc.cpu.compressed import CompressedMatrix
from worker_proc.cpu.features import Level, cpu_features
from worker_proc.cpu.library import load_library
from worker_proc.cpu.linear import Finish
from worker_proc.cpu.modules import NativeExperts, NativeLinear, NativeMlp, NativeNorm, pack_modules
from worker_proc.cpu.quantized import QuantizedMatrix
from worker_proc.cpu.recognized import experts_finish
from worker_proc.errors import ModelError
from worker_proc.kv_cache import KVCache
from worker_proc.models.registry import load_model
from worker_proc.models.transformers_backend import TransformersModel
from worker_proc.parallel import TensorParallel
from worker_proc.quantization.rows import quantize_rows
from worker_proc.quantization.scheme import FP8, HEAD_SCHEME, W8A8, Scheme

pytestmark = needs_compiler
LEVELS = cpu_features().levels()
# soft caps; a window, biases and LayerNorm; partial rotary; clipped q, k, v; experts
KINDS = ["vaultgemma", "starcoder2", "gptneox", "olmo", "olmoe"]
PROMPTS = make_prompts(VOCAB_SIZE)


def load(path: Path, level: Level | None, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> Any:
    native = load_library(level) if level is not None else None
    if native is not None:
        native.set_threads(2)
    model = load_model(
        path, dtype=dtype, device="cpu", tp=TensorParallel(), attention=ReferenceAttention(), native=native,
        **settings,
    )  # fmt: skip
    assert isinstance(model, TransformersModel)
    return model


def modules(model: TransformersModel, kind: type[nn.Module]) -> list[Any]:
    return [module for module in model.model.modules() if type(module) is kind]


def logits(model: TransformersModel, tokens: list[int]) -> Tensor:
    pages = list(range(-(-len(tokens) // 8)))
    cache = KVCache(model.kv_spec, len(pages), 8)
    return model.forward(make_batch([Row(tokens, pages)], [len(tokens)], 8), cache)


def every_expert(kind: str) -> dict[str, Any]:
    """Tokens go through all of them: else a rounding may choose another one."""
    return {"num_experts_per_tok": 4} if kind == "olmoe" else {}


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_stay_near_those_of_float32(kind: str, level: Level, tmp_path: Path) -> None:
    path = make_checkpoint(kind, tmp_path, **every_expert(kind))
    native, plain, exact = load(path, level), load(path, None), load(path, None, torch.float32)
    assert not modules(native, nn.Linear) and modules(native, NativeLinear)
    assert len(modules(native, NativeExperts)) == (2 if kind == "olmoe" else 0)
    assert len(modules(native, NativeMlp)) == (2 if kind in ("vaultgemma", "olmo") else 0)
    assert len(modules(native, NativeNorm)) == {"vaultgemma": 5, "olmoe": 9}.get(kind, 0)
    assert not modules(plain, NativeLinear)
    for prompt in PROMPTS:
        want = logits(exact, prompt)
        assert error(logits(native, prompt), want) < max(0.02, 1.3 * error(logits(plain, prompt), want))


@pytest.mark.parametrize("level", COMPRESSING)
@pytest.mark.parametrize("kind", ["gptneox", "olmoe"])
def test_compressed_weights_have_the_bits_of_plain_ones(kind: str, level: Level, tmp_path: Path) -> None:
    path = make_checkpoint(kind, tmp_path)
    plain, compressed = load(path, level, compression="off"), load(path, level, compression="on")
    matrices = [module.matrix for module in modules(compressed, NativeLinear)]
    assert matrices and all(isinstance(matrix, CompressedMatrix) for matrix in matrices)
    assert torch.equal(logits(compressed, PROMPTS[0]), logits(plain, PROMPTS[0]))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["gptneox", "olmoe"])
@pytest.mark.parametrize("scheme", [Scheme(8), Scheme(4, 32), FP8, W8A8], ids=str)
def test_weights_become_codes(scheme: Scheme, kind: str, level: Level, tmp_path: Path) -> None:
    """The logits are those of torch with the weights that the codes stand for."""
    path = make_checkpoint(kind, tmp_path, **every_expert(kind))
    plain, codes = load(path, None), load(path, level, quantization=scheme)
    before = [logits(plain, prompt) for prompt in PROMPTS]
    head = plain.model.get_output_embeddings()
    with torch.inference_mode():
        for layer in modules(plain, nn.Linear):
            of_layer = HEAD_SCHEME if layer is head else scheme
            layer.weight = nn.Parameter(quantize_rows(layer.weight, of_layer).dequantize(torch.bfloat16))
        for experts in modules(plain, OlmoeExperts):
            for weight in (*experts.gate_up_proj, *experts.down_proj):
                weight.copy_(quantize_rows(weight, scheme).dequantize(torch.bfloat16))
    assert all(isinstance(layer.matrix, QuantizedMatrix) for layer in modules(codes, NativeLinear))
    for experts in modules(codes, NativeExperts):
        assert all(matrix.scheme == scheme for matrices in experts.matrices for matrix in matrices)
    for prompt, other in zip(PROMPTS, before, strict=True):
        want = logits(plain, prompt)
        assert error(logits(codes, prompt), want) < (0.06 if scheme.dynamic else 0.03)
        assert error(want, other) > 1e-3, "nothing was quantized"


def test_codes_need_the_kernels(tmp_path: Path) -> None:
    path = make_checkpoint("olmo", tmp_path)
    for level, dtype in ((None, torch.bfloat16), (LEVELS[0], torch.float32)):
        with pytest.raises(ModelError, match="olmo runs through transformers, which is served with plain weights"):
            load(path, level, dtype, quantization=Scheme(8))


def test_other_precisions_stay_with_torch(tmp_path: Path) -> None:
    path = make_checkpoint("olmo", tmp_path)
    assert not modules(load(path, LEVELS[0], torch.float32), NativeLinear)
    with pytest.raises(ModelError, match="weight_compression"):
        load(path, LEVELS[0], torch.float32, compression="on")


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(0, 5), max_size=3), inputs=st.integers(1, 70), outputs=st.integers(1, 70),
    biased=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_a_linear_layer_of_any_shape(
    level: Level, shape: list[int], inputs: int, outputs: int, biased: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(inputs, outputs, bias=biased, dtype=torch.bfloat16))
    layer, x = model[0], torch.randn(*shape, inputs).to(torch.bfloat16)
    with torch.inference_mode():
        want = F.linear(x.double(), layer.weight.double(), layer.bias.double() if biased else None)
        assert pack_modules(model, load_library(level), compress=False) == 1
        assert isinstance(model[0], NativeLinear) and torch.equal(model[0].weight, layer.weight)
        torch.testing.assert_close(model(x).double(), want, rtol=2**-8, atol=1e-4)
        with pytest.raises(RuntimeError, match="float32"):
            model(x.float())


def test_a_packed_weight_is_unpacked_where_something_is_computed_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mamba looks at the dtype of its head in every step."""
    layer = nn.Linear(64, 48, bias=False).bfloat16()
    model = nn.Sequential(layer)
    pack_modules(model, load_library(LEVELS[0]), compress=False)
    packed, x = model[0], torch.randn(64, 3).bfloat16()
    assert isinstance(packed, NativeLinear) and torch.equal(packed.weight @ x, layer.weight @ x)
    monkeypatch.setattr(packed.matrix, "unpack", lambda rows: pytest.fail("it is unpacked"))
    weight = packed.weight
    assert (weight.dtype, weight.shape, weight.device) == (torch.bfloat16, (48, 64), torch.device("cpu"))


def make_experts(count: int, hidden: int, channels: int, **fields: Any) -> Any:
    config = make_config(
        "mixtral", num_local_experts=count, hidden_size=hidden, intermediate_size=channels, num_attention_heads=1,
        num_key_value_heads=1, **fields,
    )  # fmt: skip
    config._experts_implementation = "eager"
    experts = MixtralExperts(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5)
    return experts


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 9), hidden=st.integers(1, 70), channels=st.integers(1, 70), tokens=st.integers(0, 40),
    each=st.integers(1, 4), gelu=st.booleans(), threads=st.integers(1, 3), seed=st.integers(0, 99),
)  # fmt: skip
def test_experts_are_those_of_transformers(
    level: Level, count: int, hidden: int, channels: int, tokens: int, each: int, gelu: bool, threads: int, seed: int
) -> None:
    """Some places have no expert, whose number is that of the first one that is not there."""
    torch.manual_seed(seed)
    model = nn.Sequential(make_experts(count, hidden, channels, hidden_act="gelu_pytorch_tanh" if gelu else "silu"))
    experts, library = model[0], load_library(level)
    assert experts_finish(experts) is (Finish.GELU_MUL if gelu else Finish.SILU_MUL)
    x = torch.randn(tokens, hidden).to(torch.bfloat16)
    chosen = torch.rand(tokens, count + 1).argsort(dim=1)[:, :each]
    shares = torch.rand(chosen.shape)
    library.set_threads(threads)
    with torch.inference_mode():
        there = chosen < count  # the others count for nothing: transformers' older versions do not know them
        want = experts.double()(x.double(), chosen * there, (shares * there).double())
        experts.to(torch.bfloat16)
        assert pack_modules(model, library, compress=False) == 1
        native = model[0]
        assert isinstance(native, NativeExperts)
        got = native(x, chosen, shares)
        torch.testing.assert_close(got.double(), want, rtol=2**-6, atol=2e-2)
        for row in range(tokens):  # alone, it has the same bits
            assert torch.equal(native(x[row, None], chosen[row, None], shares[row, None])[0], got[row])
        with pytest.raises(RuntimeError, match="float32"):
            native(x.float(), chosen, shares)
    library.set_threads(1)


@pytest.mark.parametrize(
    "change",
    [
        {"act_fn": nn.ReLU()}, {"has_bias": True}, {"has_gate": False}, {"is_transposed": True},
        {"is_concatenated": False}, {"has_post_expert_norm": True}, {"_is_expert_parallel": True},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_experts_of_other_kinds_stay_with_torch(change: dict[str, Any]) -> None:
    experts = make_experts(2, 32, 32)
    assert experts_finish(experts) is Finish.SILU_MUL
    for name, value in change.items():
        setattr(experts, name, value)
    assert experts_finish(experts) is None
    assert experts_finish(nn.Linear(3, 3)) is None


def test_experts_with_a_gate_of_their_own_stay_with_torch(tmp_path: Path) -> None:
    class Gated(MixtralExperts):
        def _apply_gate(self, both: Tensor) -> Tensor:
            gate, up = both.chunk(2, dim=-1)
            return self.act_fn(gate) * (up + 1)

    experts = make_experts(2, 32, 32)
    experts.__class__ = Gated
    assert experts_finish(experts) is None


def test_experts_that_compute_something_else_stay_with_torch() -> None:
    """Though all that they say of themselves fits: at load, native experts are compared with themselves alone."""

    class Scaled(MixtralExperts):
        def forward(self, *arguments: Tensor) -> Tensor:
            return 2 * super().forward(*arguments)

    class Limited(MixtralExperts):
        """As in Step 3.7's last layers."""

        def forward(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
            out = torch.zeros_like(x)
            for token, experts in enumerate(chosen.tolist()):
                for place, expert in enumerate(experts):
                    gate, up = F.linear(x[token], self.gate_up_proj[expert]).chunk(2)
                    inner = self.act_fn(gate).clamp(max=7) * up.clamp(-7, 7)
                    out[token] += F.linear(inner, self.down_proj[expert]) * shares[token, place]
            return out

    for kind in (Scaled, Limited):
        experts = make_experts(2, 32, 32)
        experts.__class__ = kind
        assert experts_finish(experts) is None


def test_logits_are_those_of_transformers_own_model(tmp_path: Path) -> None:
    path = make_checkpoint("olmoe", tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        want = reference(torch.tensor([PROMPTS[0]])).logits[0, -1:]
    assert error(logits(load(path, LEVELS[0]), PROMPTS[0]), want) < 0.05
