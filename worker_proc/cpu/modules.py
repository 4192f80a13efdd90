"""Products of any torch model by the native kernels: in place of its linear layers and its experts.

Models that run through transformers spend most of a step in them, and torch's products of bfloat16 are slow where the
processor has no instructions for them, and where rows are few.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worker_proc.cpu.compressed import CompressedMatrix
from worker_proc.cpu.library import NativeLibrary
from worker_proc.cpu.linear import Finish, PackedMatrix, Pairing, side_by_side
from worker_proc.cpu.matrices import MatrixForm
from worker_proc.cpu.memory import HugePages
from worker_proc.cpu.quantized import NativeQuantizer, QuantizedMatrix
from worker_proc.quantization.scheme import HEAD_SCHEME, Scheme

_ROUNDING = 0.05  # of what a layer in bfloat16 makes of a token; an order of magnitude above what is seen


class NativeLinear(nn.Module):
    """`nn.Linear` in bfloat16, with sums in float32."""

    def __init__(self, matrix: PackedMatrix) -> None:
        super().__init__()
        self.matrix = matrix
        self.in_features, self.out_features = matrix.inputs, matrix.outputs

    @property
    def weight(self) -> Tensor:
        """`[out, in]`, unpacked anew: for models that look at it."""
        return self.matrix.unpack(torch.arange(self.out_features))

    def forward(self, x: Tensor) -> Tensor:
        """`x` bfloat16 `[..., in]` to `[..., out]`."""
        if x.dtype != torch.bfloat16:
            raise RuntimeError(f"expected bfloat16, got {x.dtype}")
        rows = x.reshape(-1, self.in_features)
        out = torch.empty(len(rows), self.out_features, dtype=torch.bfloat16)
        if len(rows):
            self.matrix.linear(rows, Finish.STORE, out)
        return out.view(*x.shape[:-1], self.out_features)


class NativeExperts(nn.Module):
    """The experts of a mixture as transformers calls them, for gated MLPs without biases. Sums are float32."""

    def __init__(
        self, native: NativeLibrary, gate_ups: list[PackedMatrix], downs: list[PackedMatrix], finish: Finish
    ) -> None:
        """`gate_ups` are paired."""
        super().__init__()
        self.num_experts = len(downs)
        self._native = native
        self.matrices = gate_ups, downs  # keeps alive what the structs point to
        self._gate_ups, self._downs = side_by_side(gate_ups), side_by_side(downs)
        self._inputs, self._outputs = gate_ups[0].inputs, downs[0].outputs
        self._finish = finish

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """`hidden_states` bfloat16 `[T, hidden]`, `top_k_index` and `top_k_weights` `[T, K]`; gives `[T, hidden]`."""
        if hidden_states.dtype != torch.bfloat16:
            raise RuntimeError(f"expected bfloat16, got {hidden_states.dtype}")
        x = hidden_states.reshape(-1, self._inputs).contiguous()
        chosen, shares = top_k_index.long().contiguous(), top_k_weights.float().contiguous()
        out = torch.empty(len(x), self._outputs)
        if len(x):
            self._native.functions.rhizome_experts(
                self._gate_ups, self._downs, self.num_experts, x.data_ptr(), x.stride(0), len(x), chosen.data_ptr(),
                shares.data_ptr(), chosen.shape[1], self._finish, out.data_ptr(),
            )  # fmt: skip
        return out.to(torch.bfloat16).view(hidden_states.shape)


def pack_modules(
    model: nn.Module,
    native: NativeLibrary,
    *,
    compress: bool = False,
    scheme: Scheme | None = None,
    head: nn.Module | None = None,
) -> int:
    """Replace the layers of `model` that the kernels know, in place, and free what they held; gives how many. With
    `compress`, weights of linear layers take 12 bits (`worker_proc.cpu.compressed`); with `scheme`, those of linear
    layers and experts become codes, the layer `head` by `HEAD_SCHEME`.

    A weight that is shared with an embedding is held twice then: as it was for the embedding, and packed.
    """
    packing = _Packing(native, compress, scheme, head)
    layers = [(*child, forms) for child in _children(model) if (forms := packing.forms(child[2]))]
    count, memory = len(layers), HugePages(sum(form.room() for *_, forms in layers for form in forms))
    while layers:  # whose entries are taken out, so that each is freed when it is packed
        parent, name, layer, forms = layers.pop()
        setattr(parent, name, packing.pack(layer, forms, memory))
    return count


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
    # An activation is known by what it does: it may be a function, a module, or a partial of one.
    probe = torch.linspace(-6, 6, 97)
    with torch.inference_mode():
        found, gelu = module.act_fn(probe), F.gelu(probe, approximate="tanh")
        for finish, function in ((Finish.SILU_MUL, F.silu(probe)), (Finish.GELU_MUL, gelu)):
            if torch.allclose(found, function, rtol=1e-5, atol=1e-6):
                return finish if _has_gated_mlps(module) else None
    return None


def _has_gated_mlps(module: Any) -> bool:
    """Whether a token of one expert comes out as the kernels would have it: layers, too, are known by what they do."""
    gate_up, down = module.gate_up_proj[-1], module.down_proj[-1]
    x = torch.linspace(-1, 1, gate_up.shape[1])[None].to(gate_up.dtype)
    chosen, share = torch.tensor([[len(module.down_proj) - 1]]), torch.tensor([[0.5]])
    found = inspect.unwrap(type(module).forward)(module, x, chosen, share).float()
    gate, up = F.linear(x.float(), gate_up.float()).chunk(2, dim=-1)
    inner = 0.5 * module.act_fn(gate) * up
    size = F.linear(inner.square(), down.float().square()).sqrt()  # of sums whose terms do not cancel out
    return bool((found - F.linear(inner, down.float())).norm() <= _ROUNDING * size.norm())


def _gate_of(module: Any) -> str:
    return str(getattr(getattr(type(module), "_apply_gate", None), "__name__", ""))


def plain_bytes(model: nn.Module) -> int:
    """Of the weights of linear layers that `pack_modules` would take."""
    return sum(module.weight.nbytes for _, _, module in _children(model) if _is_linear(module))


def _children(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Every module with its parent and its name there."""
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            yield parent, name, module


def _is_linear(module: Any) -> bool:
    return type(module) is nn.Linear and module.weight.dtype == torch.bfloat16 and module.weight.device.type == "cpu"


@dataclass(frozen=True, slots=True)
class _Packing:
    """How layers are held; see `pack_modules`."""

    native: NativeLibrary
    compress: bool
    scheme: Scheme | None
    head: nn.Module | None

    def forms(self, layer: Any) -> list[MatrixForm]:
        """Those of the matrices that `pack` makes; none where the kernels do not know the layer."""
        if _is_linear(layer):
            scheme = HEAD_SCHEME if self.scheme is not None and layer is self.head else self.scheme
            return [MatrixForm(layer.out_features, layer.in_features, scheme, self.compress)]
        if experts_finish(layer) is None:
            return []
        count, double, hidden = (int(size) for size in layer.gate_up_proj.shape)
        of_one = [MatrixForm(double, hidden, self.scheme, paired=True), MatrixForm(hidden, double // 2, self.scheme)]
        return of_one * count

    def pack(self, layer: Any, forms: list[MatrixForm], memory: HugePages) -> NativeLinear | NativeExperts:
        """What takes the place of a layer that has these forms."""
        matrices = [form.make(self.native, memory) for form in forms]
        finish = experts_finish(layer)
        if finish is None:
            return self._linear(layer, matrices[0])
        gate_ups, downs = matrices[::2], matrices[1::2]
        for both, gate_up in zip(layer.gate_up_proj, gate_ups, strict=True):
            for part, pairing in zip(both.chunk(2), (Pairing.GATE, Pairing.UP), strict=True):
                self._fill(gate_up, part, pairing)
        for weight, down in zip(layer.down_proj, downs, strict=True):
            self._fill(down, weight)
        return NativeExperts(self.native, gate_ups, downs, finish)

    def _linear(self, layer: nn.Linear, matrix: PackedMatrix) -> NativeLinear:
        self._fill(matrix, layer.weight)
        if layer.bias is not None:
            matrix.set_bias(layer.bias)
        if isinstance(matrix, CompressedMatrix):
            matrix.seal()
        return NativeLinear(matrix)

    def _fill(self, matrix: PackedMatrix, rows: Tensor, pairing: Pairing = Pairing.NONE) -> None:
        if isinstance(matrix, QuantizedMatrix):
            matrix.pack_rows(NativeQuantizer(self.native)(rows, matrix.scheme), 0, pairing)
        else:
            matrix.pack(rows, 0, pairing)
