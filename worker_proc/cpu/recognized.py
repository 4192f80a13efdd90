"""Which modules of a transformers model the native kernels can stand in for. Names say where weights may be; what a
module computes is found by running it, as classes of one name differ from model to model."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worker_proc.cpu.linear import Finish

_ROUNDING = 0.05  # of what a layer in bfloat16 makes of a token; an order of magnitude above what is seen
_NOTHING = 1e-6  # what is left of a gate far below 0, whose size rounding decides
_LINEAR = ("Linear", "FalconLinear")  # the latter rounds before it adds the bias
_ACTIVATIONS = ("act_fn", "activation_fn", "activation")
_GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_STACKED = (("gate_up_proj", "down_proj"), ("input_linear", "output_linear"))  # gates before ups
_EPS = ("variance_epsilon", "eps")
_UNLIKE = (RuntimeError, TypeError, ValueError, LookupError, AttributeError)  # of modules that want something else


@dataclass(frozen=True, slots=True, eq=False)
class GatedMlp:
    """down(act(gate(x)) * up(x)), without biases in the first two."""

    gate: nn.Linear
    up: nn.Linear | None  # None: `gate` has both, gates first
    down: str  # the name of the third layer
    finish: Finish

    @property
    def weights(self) -> tuple[Tensor, Tensor]:
        """Of gates and ups, `[channels, hidden]` each."""
        if self.up is None:
            gate, up = self.gate.weight.chunk(2)
            return gate, up
        return self.gate.weight, self.up.weight


@dataclass(frozen=True, slots=True, eq=False)
class RmsNorm:
    """x / sqrt(mean(x**2) + eps) * weight."""

    weight: Tensor  # float32 `[size]`
    eps: float


def is_linear(module: Any) -> bool:
    """Whether it is torch's linear layer, or one that is the same but for rounding, in bfloat16 and in main memory."""
    known = isinstance(module, nn.Linear) and type(module).__name__ in _LINEAR
    return known and module.weight.dtype == torch.bfloat16 and module.weight.device.type == "cpu"


def gated_mlp(module: Any) -> GatedMlp | None:
    """A gated MLP, or None where the kernels do not know it."""
    for names in (*_GATED, *_STACKED):
        layers: list[Any] = [getattr(module, name, None) for name in names]
        if all(is_linear(layer) for layer in layers) and sum(map(is_linear, module.children())) == len(layers):
            break
    else:
        return None
    gate, down = layers[0], layers[-1]
    up = layers[1] if len(layers) == 3 else None
    activation = next((getattr(module, name) for name in _ACTIVATIONS if hasattr(module, name)), None)
    finish = Finish.SILU_MUL if activation is None else finish_of(activation)
    if finish is None or any(layer.bias is not None for layer in layers[:-1]) or not _takes_one(module):
        return None
    found = GatedMlp(gate, up, names[-1], finish)
    sizes = {weight.shape for weight in found.weights}
    if sizes != {(down.in_features, gate.in_features)}:
        return None
    return found if _computes(module, found, down) else None


def _takes_one(module: nn.Module) -> bool:
    """Whether its forward pass takes one tensor and nothing else."""
    parameters = inspect.signature(module.forward).parameters.values()
    return [parameter.kind for parameter in parameters] == [inspect.Parameter.POSITIONAL_OR_KEYWORD]


def _computes(module: nn.Module, mlp: GatedMlp, down: nn.Linear) -> bool:
    """Whether a token comes out as the kernels would have it."""
    gate_weight, up_weight = mlp.weights
    x = _probe(gate_weight)
    try:
        found = module(x)
    except _UNLIKE:
        return False
    if not isinstance(found, Tensor) or found.shape != (len(x), down.out_features):
        return False
    gate, up = F.linear(x, gate_weight).float(), F.linear(x, up_weight).float()
    act = F.silu(gate) if mlp.finish == Finish.SILU_MUL else F.gelu(gate, approximate="tanh")
    inner = (act * up).to(x.dtype)
    bias = 0.0 if down.bias is None else down.bias.float()
    want, most = F.linear(inner, down.weight).float() + bias, F.linear(inner.abs(), down.weight.abs()).float()
    off, size = (found.float() - want).norm(dim=1), (most / inner.shape[1] ** 0.5).norm(dim=1)
    whole = want.norm(dim=1) * 2**-7  # itself rounded, and a bias may be most of it
    return bool((off <= _ROUNDING * size + whole + _NOTHING).all())


def _probe(gate: Tensor) -> Tensor:
    """Two tokens: gates of about 2, where activations differ, and of about 200, which a limit would cut."""
    x = torch.linspace(-1, 1, gate.shape[1])[None]
    size = F.linear(x.to(gate.dtype), gate).float().square().mean().sqrt()
    return (x * torch.tensor([[2.0], [200.0]]) / size.clamp(min=1e-3)).to(gate.dtype)


def rms_norm(module: Any) -> RmsNorm | None:
    """An RMSNorm over the last dimension, or None where it is something else."""
    parameters = list(module.named_parameters())
    if [name for name, _ in parameters] != ["weight"] or list(module.children()) or list(module.buffers()):
        return None
    weight = module.weight
    eps = next((value for name in _EPS if isinstance(value := getattr(module, name, None), float)), None)
    if eps is None or weight.dim() != 1 or weight.dtype != torch.bfloat16 or weight.device.type != "cpu":
        return None
    if not _takes_one(module):
        return None
    # Two rows of different size in three dimensions, in which it may not mix rows; eps counts in neither much.
    x = torch.linspace(-2, 3, len(weight)).to(torch.bfloat16) * torch.tensor([[[1.0], [4.0]]], dtype=torch.bfloat16)
    try:
        found = module(x)
    except _UNLIKE:
        return None
    if not isinstance(found, Tensor) or found.shape != x.shape or found.dtype != torch.bfloat16:
        return None
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    for stored in (weight.detach().float(), 1 + weight.detach().float()):
        if torch.allclose(found.float(), normed * stored, rtol=2**-6, atol=1e-3):
            return RmsNorm(stored.contiguous(), eps)
    return None


def finish_of(activation: Any) -> Finish | None:
    """What makes gates and ups one with this activation: a function, a module, or a partial of one. It is known by
    what it does. None where the kernels do not know it."""
    probe = torch.linspace(-6, 6, 97)
    with torch.inference_mode():
        found, gelu = activation(probe), F.gelu(probe, approximate="tanh")
        for finish, function in ((Finish.SILU_MUL, F.silu(probe)), (Finish.GELU_MUL, gelu)):
            if torch.allclose(found, function, rtol=1e-5, atol=1e-6):
                return finish
    return None


def experts_finish(module: Any) -> Finish | None:
    """What makes gates and ups of transformers' experts one, or None where the kernels do not know them."""
    weights = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    if not all(isinstance(w, nn.Parameter) and w.dim() == 3 and w.dtype == torch.bfloat16 for w in weights):
        return None
    # What transformers says about the layout, as its `use_experts_implementation` sets it.
    said = ("has_gate", "is_concatenated", "has_bias", "is_transposed")
    if [getattr(module, name, None) for name in said] != [True, True, False, False]:
        return None
    if getattr(module, "has_post_expert_norm", False):  # which older versions do not know
        return None
    if getattr(module, "_is_expert_parallel", False) or _gate_of(module) != "_default_apply_gate":
        return None
    finish = finish_of(module.act_fn)
    return finish if finish is not None and _has_gated_mlps(module) else None


def _has_gated_mlps(module: Any) -> bool:
    """Whether a token of one expert comes out as the kernels would have it: layers, too, are known by what they do."""
    gate_up, down = module.gate_up_proj[-1], module.down_proj[-1]
    x = _probe(gate_up)
    chosen, share = torch.full((len(x), 1), len(module.down_proj) - 1), torch.full((len(x), 1), 0.5)
    found = inspect.unwrap(type(module).forward)(module, x, chosen, share).float()
    gate, up = F.linear(x.float(), gate_up.float()).chunk(2, dim=-1)
    inner = 0.5 * module.act_fn(gate) * up
    size = F.linear(inner.square(), down.float().square()).sqrt()  # of sums whose terms do not cancel out
    off = (found - F.linear(inner, down.float())).norm(dim=1)
    return bool((off <= _ROUNDING * size.norm(dim=1) + _NOTHING).all())


def _gate_of(module: Any) -> str:
    return str(getattr(getattr(type(module), "_apply_gate", None), "__name__", ""))
