"""Gated MLPs and RMSNorms of transformers' models by the native kernels, and those that stay with torch."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.worker.test_cpu_build import needs_compiler
from worker_proc.cpu.features import Level, cpu_features
from worker_proc.cpu.library import load_library
from worker_proc.cpu.modules import NativeLinear, NativeMlp, NativeNorm, pack_modules
from worker_proc.cpu.recognized import gated_mlp, rms_norm

pytestmark = needs_compiler
LEVELS = cpu_features().levels()


class Mlp(nn.Module):
    """A gated MLP whose layers have these names: two of them where gates and ups are stacked."""

    def __init__(
        self, names: tuple[str, ...], hidden: int, channels: int, gelu: bool = False, bias: bool = False
    ) -> None:
        super().__init__()
        first = [(name, channels) for name in names[:-1]] if len(names) == 3 else [(names[0], 2 * channels)]
        for name, outputs in first:
            setattr(self, name, nn.Linear(hidden, outputs, bias=False))
        setattr(self, names[-1], nn.Linear(channels, hidden, bias=bias))
        self.names = names
        self.act_fn = partial(F.gelu, approximate="tanh") if gelu else nn.SiLU()
        self.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        made = [getattr(self, name)(x) for name in self.names[:-1]]
        gate, up = made if len(made) == 2 else made[0].chunk(2, dim=-1)
        out: Tensor = getattr(self, self.names[-1])(self.act_fn(gate) * up)
        return out


MLP_NAMES = [
    ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("gate_up_proj", "down_proj"),
    ("input_linear", "output_linear"),
]  # fmt: skip


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=40, deadline=None)
@given(
    names=st.sampled_from(MLP_NAMES), shape=st.lists(st.integers(0, 4), max_size=3), hidden=st.integers(2, 70),
    channels=st.integers(2, 70), gelu=st.booleans(), bias=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
@example(names=MLP_NAMES[0], shape=[], hidden=5, channels=4, gelu=True, bias=True, seed=41)  # all but a bias is small
def test_a_gated_mlp_of_any_shape(
    level: Level,
    names: tuple[str, ...],
    shape: list[int],
    hidden: int,
    channels: int,
    gelu: bool,
    bias: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(Mlp(names, hidden, channels, gelu, bias))
    x = torch.randn(*shape, hidden).to(torch.bfloat16)
    with torch.inference_mode():
        want = model.double()(x.double())
        assert pack_modules(model.to(torch.bfloat16), load_library(level)) == 2
        native = model[0]
        assert isinstance(native, NativeMlp) and isinstance(native.down, NativeLinear)
        got = native(x)
        torch.testing.assert_close(got.double(), want, rtol=2**-6, atol=2e-2)
        for row, alone in zip(got.view(-1, hidden), x.view(-1, hidden), strict=True):
            assert torch.equal(native(alone), row)
        with pytest.raises(RuntimeError, match="float32"):
            native(x.float())


class ScaledMlp(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return 1.1 * super().forward(x)


class SparseMlp(Mlp):
    """As in some layers of Gemma 3n."""

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        gate = F.relu(gate - gate.mean(dim=-1, keepdim=True))
        out: Tensor = self.down_proj(self.act_fn(gate) * self.up_proj(x))
        return out


class LimitedMlp(Mlp):
    """As the shared experts of Step 3.7's last layers."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.act_fn(self.gate_proj(x)).clamp(max=16), self.up_proj(x).clamp(-16, 16)
        out: Tensor = self.down_proj(gate * up)
        return out


class ResidualMlp(Mlp):
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        out = super().forward(x)
        return out if residual is None else out + residual


class SwappedMlp(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))
        return out


@pytest.mark.parametrize("kind", [ScaledMlp, SparseMlp, LimitedMlp, ResidualMlp, SwappedMlp])
def test_mlps_that_compute_something_else_stay_with_torch(kind: type[Mlp]) -> None:
    torch.manual_seed(0)
    with torch.inference_mode():
        assert gated_mlp(Mlp(MLP_NAMES[0], 64, 96)) is not None
        assert gated_mlp(kind(MLP_NAMES[0], 64, 96)) is None


def test_mlps_of_other_kinds_stay_with_torch() -> None:
    def changed(name: str, value: Any) -> Mlp:
        mlp = Mlp(MLP_NAMES[0], 64, 96)
        setattr(mlp, name, value)
        return mlp

    bfloat16 = {"dtype": torch.bfloat16}
    with torch.inference_mode():
        assert gated_mlp(changed("act_fn", nn.ReLU())) is None
        assert gated_mlp(changed("gate_proj", nn.Linear(64, 96, **bfloat16))) is None
        assert gated_mlp(changed("other", nn.Linear(64, 96, **bfloat16))) is None
        assert gated_mlp(changed("up_proj", nn.Linear(64, 96, bias=False))) is None
        assert gated_mlp(changed("down_proj", nn.Linear(48, 64, **bfloat16))) is None


class Norm(nn.Module):
    """RMSNorm; `offset` is added to what is stored."""

    def __init__(self, size: int, eps: float = 1e-6, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.randn(size) * 0.3 + 1 - offset).to(torch.bfloat16))
        self.variance_epsilon, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return (normed * (self.offset + self.weight.to(wide.dtype))).to(x.dtype)


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(0, 5), max_size=3), size=st.integers(1, 300), offset=st.sampled_from([0.0, 1.0]),
    eps=st.sampled_from([1e-6, 1e-5, 1e-3]), turned=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_a_norm_of_any_shape(
    level: Level, shape: list[int], size: int, offset: float, eps: float, turned: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    plain = Norm(size, eps, offset)
    model = nn.Sequential(plain)
    x = torch.randn(*shape, size).to(torch.bfloat16)
    if turned and len(shape) > 1:
        x = x.transpose(0, 1)
    with torch.inference_mode():
        want = model(x.double())
        assert pack_modules(model, load_library(level)) == 1
        native = model[0]
        assert isinstance(native, NativeNorm)
        assert native.weight is plain.weight
        torch.testing.assert_close(native(x).double(), want, rtol=2**-8, atol=1e-6)
        assert torch.equal(native(x.float()), plain(x.float()))


class ScaledNorm(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return 1.1 * super().forward(x)


class GatedNorm(Norm):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(x) if gate is None else super().forward(x) * gate


class WideNorm(Norm):
    """Over all dimensions."""

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().square().mean() + self.variance_epsilon)
        return (x.float() * scale * self.weight.float()).to(x.dtype)


class Centered(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


class Float32Norm(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float()


@pytest.mark.parametrize("kind", [ScaledNorm, GatedNorm, WideNorm, Centered, Float32Norm])
def test_norms_that_compute_something_else_stay_with_torch(kind: type[Norm]) -> None:
    torch.manual_seed(0)
    with torch.inference_mode():
        assert rms_norm(Norm(48)) is not None
        assert rms_norm(kind(48)) is None
        assert rms_norm(nn.LayerNorm(48, bias=False, dtype=torch.bfloat16)) is None
        assert rms_norm(Norm(48).float()) is None
