"""The recurrent layers of transformers' hybrid models, computed on the states that a worker holds.

Such a layer (a convolution, linear attention, a state space) takes all tokens of a step as one sequence and keeps its
state in a cache of transformers. Here its forward pass is called once for each chunk of a prompt, cut where states are
saved, and once for all decodes, with a view of the worker's states in the place of that cache. Where native code knows
the layer, that computes it instead, all rows together.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from worker_proc.attention.interface import ForwardBatch
from worker_proc.cpu import delta_net, short_conv, state_space
from worker_proc.cpu import selective_scan as native_scan
from worker_proc.cpu.delta_net import DeltaNet
from worker_proc.cpu.library import NativeLibrary
from worker_proc.cpu.selective_scan import NativeScan
from worker_proc.cpu.short_conv import ShortConv
from worker_proc.cpu.state_space import StateSpace
from worker_proc.errors import ModelError
from worker_proc.models import selective_scan
from worker_proc.models.class_code import names_used
from worker_proc.models.selective_scan import SelectiveScan
from worker_proc.recurrent import RecurrentStates, StateKey, StateRows, StateSpec
from worker_proc.waves import Segments, in_waves, saves_at_ends

_CACHES = ("cache_params", "past_key_values")  # what the argument is called
_UPDATES = {"update_conv_state", "update_recurrent_state"}

NativeLayer = DeltaNet | StateSpace | ShortConv | NativeScan
_Now = TypeVar("_Now", "tuple[ForwardBatch, RecurrentStates]", "Recorder")


class _LayerStates:
    """The states of one layer, by kind and number: how older transformers (5.17) find them."""

    record_past = False

    def __init__(self, view: "StateView", layer: int) -> None:
        self.conv_states = _Numbered(partial(view.get_conv_state, layer))
        self.recurrent_states = _Numbered(partial(view.get_recurrent_state, layer))


class _Numbered:
    def __init__(self, get: Callable[[int], Any]) -> None:
        self._get = get

    def __getitem__(self, number: int) -> Any:
        return self._get(number)


class StateView:
    """The states of some sequences, as a layer of transformers asks its cache for them."""

    def __init__(self, states: RecurrentStates, rows: list[int] | Tensor) -> None:
        """`rows` of several sequences, or of one; as a tensor, what the layer changes is theirs after `store` only."""
        self.layers = _Numbered(partial(_LayerStates, self))
        self._states = states
        self._rows = rows
        self._lent: dict[StateKey, Tensor] = {}  # which the layer may change in place

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        """The last inputs of a convolution, `[B, C, K]`."""
        return self._lend(StateKey(layer_idx, "conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        """`[B, ...]`."""
        return self._lend(StateKey(layer_idx, "recurrent", state_idx))

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **others: Any) -> Tensor:
        """Append new inputs `[B, C, T]`; returns all that the convolution sees, `[B, C, K + T]`."""
        held = self._lend(StateKey(layer_idx, "conv", state_idx))
        seen = torch.cat((held, conv_states), dim=-1)
        held.copy_(seen[..., -held.shape[-1] :])
        return seen

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Replace the state by `[B, ...]`."""
        held = self._lend(StateKey(layer_idx, "recurrent", state_idx))
        return held.copy_(recurrent_states)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """A sequence that begins has states of zeros."""
        return True

    def is_recording_past(self, layer_idx: int) -> bool:
        """States are never taken back."""
        return False

    def store(self) -> None:
        """What was lent becomes the sequences' states."""
        for key, held in self._lent.items():
            if isinstance(self._rows, Tensor):
                self._states.tensors[key].index_copy_(0, self._rows, held)
            elif len(self._rows) > 1:
                self._states.tensors[key][self._rows] = held

    def _lend(self, key: StateKey) -> Tensor:
        held = self._lent.get(key)
        if held is None:
            tensor, rows = self._states.tensors[key], self._rows
            if isinstance(rows, Tensor):
                held = tensor.index_select(0, rows)
            else:
                held = tensor[rows] if len(rows) > 1 else tensor[rows[0] : rows[0] + 1]
            self._lent[key] = held
        return held


class Recorder:
    """Stands in for the states while nobody knows yet what they are: notes what layers want to keep of a sequence."""

    def __init__(self) -> None:
        self.specs: dict[StateKey, StateSpec] = {}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    get_recurrent_state = get_conv_state

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> Tensor:
        columns = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        self._note(StateKey(layer_idx, "conv", state_idx), (*conv_states.shape[1:-1], columns), conv_states.dtype)
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        key = StateKey(layer_idx, "recurrent", state_idx)
        self._note(key, tuple(recurrent_states.shape[1:]), recurrent_states.dtype)
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def _note(self, key: StateKey, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.specs[key] = StateSpec(key, shape, dtype)


class Mixers:
    """Takes the place of the forward passes of a model's recurrent layers."""

    def __init__(self, model: nn.Module, native: NativeLibrary | None = None) -> None:
        """`model` is changed; with `native`, these kernels compute what they can. Raises ModelError if one of its
        layers cannot be replaced."""
        self.layers: set[int] = set()
        self._now: tuple[ForwardBatch, RecurrentStates] | Recorder | None = None
        for module in model.modules():
            if keeps_states(module):
                layer = getattr(module, "layer_idx", None)
                if not isinstance(layer, int):
                    raise ModelError("layer_idx", layer, f"{type(module).__name__} does not know its layer")
                self.layers.add(layer)
                own = _native_layer(module, native) if native is not None else None
                module.forward = self._replaced(layer, module, own)

    def on(self, batch: ForwardBatch, states: RecurrentStates) -> AbstractContextManager[object]:
        """The layers compute `batch` on `states`. Else they compute one sequence, as they do by themselves."""
        return self._with((batch, states))

    def recorded(self) -> AbstractContextManager[Recorder]:
        """Gives what the layers keep of a sequence that is computed."""
        return self._with(Recorder())

    @contextmanager
    def _with(self, now: _Now) -> Iterator[_Now]:
        self._now = now
        try:
            yield now
        finally:
            self._now = None

    def _replaced(self, layer: int, module: nn.Module, own: NativeLayer | None) -> Callable[..., Any]:
        forward = module.forward
        scan = SelectiveScan(module).forward if own is None and selective_scan.supports(module) else None
        name = next((name for name in _CACHES if name in inspect.signature(forward).parameters), None)
        if name is None:
            raise ModelError("model_type", type(module).__name__, f"its forward pass takes none of {_CACHES}")

        def replaced(hidden_states: Tensor, *others: Any, **named: Any) -> Any:
            if self._now is None:
                return forward(hidden_states, *others, **named)
            if isinstance(self._now, Recorder):
                return forward(hidden_states, **{name: self._now})
            if own is not None:
                return own.forward(hidden_states, *self._now)
            on_states = scan or (lambda x, view: forward(x, **{name: view}))
            return _compute(on_states, layer, hidden_states, *self._now)

        return replaced


def _native_layer(module: nn.Module, native: NativeLibrary) -> NativeLayer | None:
    """What computes the layer in native code, if anything does."""
    kinds: tuple[tuple[Callable[[nn.Module], bool], Callable[[Any, NativeLibrary], NativeLayer]], ...] = (
        (delta_net.supports, DeltaNet), (state_space.supports, StateSpace), (short_conv.supports, ShortConv),
        (native_scan.supports, NativeScan),
    )  # fmt: skip
    return next((make(module, native) for supports, make in kinds if supports(module)), None)


def keeps_states(module: nn.Module) -> bool:
    """Whether one of the functions of the module's class puts states into a cache."""
    return not _UPDATES.isdisjoint(names_used(module))


def _compute(
    forward: Callable[[Tensor, StateView], Tensor],
    layer: int,
    hidden: Tensor,
    batch: ForwardBatch,
    states: RecurrentStates,
) -> Tensor:
    """`hidden` `[1, T, H]`, the tokens of all rows one after another, to as much: parts of several tokens one by one,
    all single tokens together."""
    if batch.states is not None and batch.states.index is not None and saves_at_ends(batch):
        return _compute_by_index(forward, layer, hidden, batch, states, batch.states, batch.states.index)
    made: dict[int, Tensor] = {}  # by first token

    def compute(segments: Segments) -> None:
        for row, first, tokens in segments:
            if tokens > 1:
                made[first] = forward(hidden[:, first : first + tokens], StateView(states, [row]))
        rows = [row for row, _, tokens in segments if tokens == 1]
        if rows:
            firsts = [first for _, first, tokens in segments if tokens == 1]
            view = StateView(states, rows)
            parts = forward(hidden[0, firsts, None], view)
            view.store()
            made.update((first, parts[i : i + 1]) for i, first in enumerate(firsts))

    in_waves(batch, states, layer, compute)
    return torch.cat([made[first] for first in sorted(made)], dim=1)


def _compute_by_index(
    forward: Callable[[Tensor, StateView], Tensor],
    layer: int,
    hidden: Tensor,
    batch: ForwardBatch,
    states: RecurrentStates,
    where: StateRows,
    index: Tensor,
) -> Tensor:
    """The same with nothing sent to the device for it: chunks one by one, all decodes together."""
    made, first, chunks = [], 0, batch.num_prefill_rows
    for row, tokens in zip(where.rows[:chunks], batch.q_lens[:chunks], strict=True):
        made.append(forward(hidden[:, first : first + tokens], StateView(states, [row])))
        first += tokens
    if first < hidden.shape[1]:
        view = StateView(states, index[chunks:])
        made.append(forward(hidden[0, first:, None], view).transpose(0, 1))
        view.store()
    states.keep(where, layer)
    return torch.cat(made, dim=1)
