"""Any torch model by the native kernels: in place of its linear layers, gated MLPs, experts and RMSNorms.

Models that run through transformers spend most of a step in products, and torch's of bfloat16 are slow where the
processor has no instructions for them, and where rows are few. The rest are many small operations, each of which costs
torch some microseconds and a way over all numbers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from worker_proc.cpu.compressed import CompressedMatrix
from worker_proc.cpu.library import NativeLibrary
from worker_proc.cpu.linear import Finish, PackedMatrix, Pairing, side_by_side
from worker_proc.cpu.matrices import MatrixForm
from worker_proc.cpu.memory import HugePages
from worker_proc.cpu.quantized import NativeQuantizer, QuantizedMatrix
from worker_proc.cpu.recognized import GatedMlp, RmsNorm, experts_finish, gated_mlp, is_linear, rms_norm
from worker_proc.cpu.screen import HeadScreen, screen_scheme
from worker_proc.quantization.scheme import HEAD_SCHEME, Scheme

_AT_ONCE = 8192  # outputs of a head that are rounded together


def _rows(x: Tensor, inputs: int) -> Tensor:
    """bfloat16 `[..., inputs]` as `[rows, inputs]`. Raises RuntimeError for other numbers, as torch does."""
    if x.dtype != torch.bfloat16:
        raise RuntimeError(f"expected bfloat16, got {x.dtype}")
    return x.reshape(-1, inputs)


class UnpackedLate(Tensor):
    """The bfloat16 weight of a packed matrix, which is unpacked, and anew, where something is computed with it."""

    matrix: PackedMatrix

    @staticmethod
    def __new__(cls, matrix: PackedMatrix, shape: tuple[int, int]) -> "UnpackedLate":
        made: UnpackedLate = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bfloat16)
        made.matrix = matrix
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore
        def unpacked(value: Any) -> Any:
            return value.matrix.unpack(torch.arange(value.shape[0])) if isinstance(value, cls) else value

        return func(*tree_map(unpacked, args), **tree_map(unpacked, kwargs or {}))


class NativeLinear(nn.Module):
    """`nn.Linear` in bfloat16, with sums in float32."""

    def __init__(self, matrix: PackedMatrix) -> None:
        super().__init__()
        self.matrix = matrix
        self.in_features, self.out_features = matrix.inputs, matrix.outputs

    @property
    def weight(self) -> Tensor:
        """`[out, in]`, for models that look at it, most of them at its dtype alone."""
        return UnpackedLate(self.matrix, (self.out_features, self.in_features))

    @property
    def bias(self) -> Tensor | None:
        """bfloat16 `[out]`."""
        held = self.matrix.bias
        return None if held is None else held[: self.out_features].bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        """`x` bfloat16 `[..., in]` to `[..., out]`."""
        rows = _rows(x, self.in_features)
        out = torch.empty(len(rows), self.out_features, dtype=torch.bfloat16)
        if len(rows):
            self.matrix.linear(rows, Finish.STORE, out)
        return out.view(*x.shape[:-1], self.out_features)


class NativeHead(NativeLinear):
    """The output head: its logits are float32, and greedy tokens are found without them."""

    def __init__(self, matrix: PackedMatrix, screen: HeadScreen | None) -> None:
        super().__init__(matrix)
        self.screen = screen
        self.filters: Tensor | None = None  # of `forward`'s rows, see `ForwardBatch.filters`
        self._finding = False
        self._tokens = torch.empty(0, dtype=torch.int64)

    def forward(self, x: Tensor) -> Tensor:
        """`x` bfloat16 `[..., hidden]` to `[..., vocabulary]`; within `find` to as many rows without meaning."""
        rows = _rows(x, self.in_features)
        if self._finding:
            self._tokens, _ = self.matrix.argmax(rows, self.screen.struct if self.screen is not None else None)
            return torch.zeros(*x.shape[:-1], 1)
        out = torch.empty(len(rows), self.out_features)
        if len(rows) and self.screen is not None and self.filters is not None:
            self.matrix.filtered(rows, self.screen.struct, self.filters, out)
        elif len(rows):
            self.matrix.linear(rows, Finish.STORE_FLOAT, out)
        return out.view(*x.shape[:-1], self.out_features)

    def find(self, run: Callable[[], object]) -> Tensor:
        """The smallest index of the largest logit of each row that the head is given in `run`, int64."""
        self._finding = True
        try:
            run()
        finally:
            self._finding = False
        return self._tokens


class NativeMlp(nn.Module):
    """A gated MLP in bfloat16, whose gates and ups are one product."""

    def __init__(self, gate_up: PackedMatrix, finish: Finish, down: nn.Module) -> None:
        """`gate_up` is paired."""
        super().__init__()
        self.matrix = gate_up
        self.down = down
        self._finish = finish

    def forward(self, x: Tensor) -> Tensor:
        """`x` bfloat16 `[..., hidden]` to as much."""
        rows = _rows(x, self.matrix.inputs)
        inner = torch.empty(len(rows), self.matrix.outputs // 2, dtype=torch.bfloat16)
        if len(rows):
            self.matrix.linear(rows, self._finish, inner)
        out: Tensor = self.down(inner.view(*x.shape[:-1], inner.shape[1]))
        return out


class NativeNorm(nn.Module):
    """An RMSNorm over the last dimension. Of other numbers than bfloat16 (some models' hidden states) it is torch's."""

    def __init__(self, native: NativeLibrary, norm: RmsNorm, plain: Any) -> None:
        super().__init__()
        self.plain: Any = plain
        self._norm = native.functions.rhizome_rms_norm
        self._scale, self._eps = norm.weight, norm.eps

    @property
    def weight(self) -> Tensor:
        """`[size]`, as stored: for models that look at it."""
        weight: Tensor = self.plain.weight
        return weight

    def forward(self, x: Tensor) -> Tensor:
        """`x` `[..., size]` to as much."""
        if x.dtype != torch.bfloat16:
            made: Tensor = self.plain(x)
            return made
        rows, size = x.contiguous(), len(self._scale)
        out = torch.empty_like(rows)
        self._norm(rows.data_ptr(), rows.numel() // size, size, self._scale.data_ptr(), self._eps, out.data_ptr())
        return out


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
    """Replace the layers of `model` that the kernels know, in place, and free what they held; gives how many. The layer
    `head` becomes a `NativeHead`. With `compress`, weights of linear layers take 12 bits
    (`worker_proc.cpu.compressed`); with `scheme`, those of linear layers and experts become codes, those of the head by
    `HEAD_SCHEME`.

    A weight that is shared with an embedding is held twice then: as it was for the embedding, and packed.
    """
    packing = _Packing(native, compress, scheme, head)
    # entries are taken out from the end, so that each is freed when it is packed, and an MLP after its layers
    plans = list(packing.plans(model))
    count, memory = len(plans), HugePages(sum(form.room() for plan in plans for form in plan.forms))
    while plans:
        plan = plans.pop()
        setattr(plan.parent, plan.name, packing.pack(plan, memory))
    return count


def plain_bytes(model: nn.Module) -> int:
    """Of the weights of linear layers that `pack_modules` would take."""
    return sum(module.weight.nbytes for _, _, module in _children(model) if is_linear(module))


def _children(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Every module with its parent and its name there, parents first."""
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            yield parent, name, module


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """What takes the place of `module`, the child `name` of `parent`."""

    parent: nn.Module
    name: str
    module: Any
    known: GatedMlp | RmsNorm | Finish | None  # as what it was recognized: a finish is that of experts, None a layer's
    forms: list[MatrixForm]  # of the matrices that it needs


@dataclass(frozen=True, slots=True)
class _Packing:
    """How layers are held; see `pack_modules`."""

    native: NativeLibrary
    compress: bool
    scheme: Scheme | None
    head: nn.Module | None

    def plans(self, model: nn.Module) -> Iterator[_Plan]:
        """Of every module that the kernels know, those of an MLP after it."""
        inside: set[nn.Module] = set()  # what is packed with what it is in
        for parent, name, module in _children(model):
            if module in inside:
                continue
            if is_linear(module):
                head = module is self.head and self.scheme is not None
                forms = [self._form(module.weight, HEAD_SCHEME if head else self.scheme)]
                yield _Plan(parent, name, module, None, forms)
            elif (mlp := gated_mlp(module)) is not None:
                inside.update(layer for layer in (mlp.gate, mlp.up) if layer is not None)
                gate, _ = mlp.weights
                yield _Plan(parent, name, module, mlp, [self._form(gate, self.scheme, paired=True)])
            elif (norm := rms_norm(module)) is not None:
                yield _Plan(parent, name, module, norm, [])
            elif (finish := experts_finish(module)) is not None:
                count, double, hidden = (int(size) for size in module.gate_up_proj.shape)
                of_one = [
                    MatrixForm(double, hidden, self.scheme, paired=True), MatrixForm(hidden, double // 2, self.scheme),
                ]  # fmt: skip
                yield _Plan(parent, name, module, finish, of_one * count)

    def _form(self, weight: Tensor, scheme: Scheme | None, *, paired: bool = False) -> MatrixForm:
        """Of a matrix with this weight, or with these gates and as many ups."""
        outputs, inputs = weight.shape
        return MatrixForm(2 * outputs if paired else outputs, inputs, scheme, self.compress, paired=paired)

    def pack(self, plan: _Plan, memory: HugePages) -> nn.Module:
        """What takes the module's place."""
        matrices = [form.make(self.native, memory) for form in plan.forms]
        match plan.known:
            case RmsNorm():
                return NativeNorm(self.native, plan.known, plan.module)
            case GatedMlp():
                return self._mlp(plan.module, plan.known, matrices[0])
            case Finish():
                return self._experts(plan.module, plan.known, matrices)
        layer: nn.Linear = plan.module
        matrix, is_head = self._linear(layer, matrices[0]), layer is self.head
        return NativeHead(matrix, self._screen(layer)) if is_head else NativeLinear(matrix)

    def _screen(self, head: nn.Linear) -> HeadScreen | None:
        """In memory of its own: some models turn out to have no use for it."""
        outputs, inputs = head.weight.shape
        scheme = screen_scheme(self.native, outputs, inputs)
        if scheme is None or self.scheme is not None or head.bias is not None:
            return None
        screen = HeadScreen(self.native, HugePages(HeadScreen.room(outputs, inputs, scheme)), outputs, inputs, scheme)
        for first in range(0, outputs, _AT_ONCE):
            screen.pack(head.weight[first : first + _AT_ONCE], first)
        screen.seal()
        return screen

    def _mlp(self, module: nn.Module, mlp: GatedMlp, gate_up: PackedMatrix) -> NativeMlp:
        for weight, pairing in zip(mlp.weights, (Pairing.GATE, Pairing.UP), strict=True):
            self._fill(gate_up, weight, pairing)
        self._seal(gate_up)
        return NativeMlp(gate_up, mlp.finish, getattr(module, mlp.down))

    def _experts(self, module: Any, finish: Finish, matrices: list[PackedMatrix]) -> NativeExperts:
        gate_ups, downs = matrices[::2], matrices[1::2]
        for both, gate_up in zip(module.gate_up_proj, gate_ups, strict=True):
            for part, pairing in zip(both.chunk(2), (Pairing.GATE, Pairing.UP), strict=True):
                self._fill(gate_up, part, pairing)
        for weight, down in zip(module.down_proj, downs, strict=True):
            self._fill(down, weight)
        return NativeExperts(self.native, gate_ups, downs, finish)

    def _linear(self, layer: nn.Linear, matrix: PackedMatrix) -> PackedMatrix:
        self._fill(matrix, layer.weight)
        if layer.bias is not None:
            matrix.set_bias(layer.bias)
        self._seal(matrix)
        return matrix

    def _fill(self, matrix: PackedMatrix, rows: Tensor, pairing: Pairing = Pairing.NONE) -> None:
        if isinstance(matrix, QuantizedMatrix):
            matrix.pack_rows(NativeQuantizer(self.native)(rows, matrix.scheme), 0, pairing)
        else:
            matrix.pack(rows, 0, pairing)

    @staticmethod
    def _seal(matrix: PackedMatrix) -> None:
        if isinstance(matrix, CompressedMatrix):
            matrix.seal()
