"""Ours in the place of the attention that older models compute by themselves, and the step where it is not passed on.

GPT-J and its like have a function for it; of Falcon, BLOOM and MPT the whole layer is computed here, with its own
modules. ALiBi (Press et al., 2022) adds to each score the key's position times a slope of the head. Here the position
is a part of the key, two numbers that are exact in bfloat16, and the slope is a part of the query, so that whatever
computes attention computes it.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from worker_proc.models.class_code import names_used
from worker_proc.models.paged_call import PagedStep, paged_attention

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # what classes call it that ask transformers' attention interface
_DIGIT = 256  # positions are two digits of this base

# query, key and value `[1, H, T, D]`, with scaling and perhaps a window, to `[1, T, H, D]`
_Ask = Callable[..., Tensor]


def asks_interface(module: nn.Module) -> bool:
    """Whether the module's class asks transformers for the attention that is chosen."""
    return _INTERFACE in names_used(module)


def computes_attention(module: nn.Module) -> bool:
    """Whether the module computes attention by itself, in a way that is known here."""
    return _way(module) is not None


def adds_positions(module: nn.Module) -> bool:
    """Whether it does that with ALiBi: its keys hold their positions."""
    return computes_attention(module) and _slopes(module) is not None


class OwnAttention:
    """Takes the place of attention that modules of a model compute by themselves."""

    def __init__(self, model: nn.Module) -> None:
        """`model` is changed."""
        self._step: PagedStep | None = None
        device = next(model.parameters()).device
        layers: Any = filter(computes_attention, model.modules())
        for layer, module in enumerate(layers):
            module.layer_idx = layer
            slopes, (name, make) = _slopes(module), _way(module) or _WAYS[0][:2]
            if slopes is not None:
                slopes = slopes.to(device)
            own, ours = getattr(module, name), make(module, partial(self._ask, module, slopes))
            setattr(module, name, partial(self._choose, own, ours))
        for module in filter(asks_interface, model.modules()):
            if any(each.kind is each.VAR_KEYWORD for each in inspect.signature(module.forward).parameters.values()):
                module.register_forward_pre_hook(self._hand_on, with_kwargs=True)

    @contextmanager
    def on(self, step: PagedStep) -> Iterator[None]:
        """The modules compute `step`. Else they compute one sequence, as they do by themselves."""
        self._step = step
        try:
            yield
        finally:
            self._step = None

    def _choose(self, own: Callable[..., Any], ours: Callable[..., Any], *args: Any, **named: Any) -> Any:
        return (own if self._step is None else ours)(*args, **named)

    def _hand_on(self, module: Any, args: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """Some models do not pass the step on to their attention (StableLM, Nemotron), or have one of several layers,
        and tell it which (Zamba 2)."""
        if self._step is None:
            return None
        if "layer_idx" in named:
            module.layer_idx = named["layer_idx"]
        return args, {**named, "rhizome_step": self._step}

    def _ask(
        self, module: nn.Module, slopes: Tensor | None, query: Tensor, key: Tensor, value: Tensor, scaling: float,
        window: int | None = None,
    ) -> Tensor:  # fmt: skip
        step = self._step
        assert step is not None
        if slopes is not None:
            places = step.batch.positions if step.batch is not None else query.new_zeros(query.shape[2])
            query, key = with_positions(query, key, slopes / scaling, places)
        out, _ = paged_attention(
            module, query, key, value, None, scaling=scaling, sliding_window=window, rhizome_step=step
        )
        return out


def with_positions(query: Tensor, key: Tensor, slopes: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Two numbers more in each head, whose product is `positions` `[T]` of keys times `slopes` `[H]` of queries."""
    digits = torch.stack((positions // _DIGIT, positions % _DIGIT), dim=-1).to(key.dtype)  # [T, 2]
    steep = slopes.to(query.dtype)
    steep = torch.stack((steep * _DIGIT, steep), dim=-1)[None, :, None]  # [1, H, 1, 2]
    more = steep.expand(*query.shape[:3], 2), digits.expand(*key.shape[:3], 2)
    return torch.cat((query, more[0]), dim=-1), torch.cat((key, more[1]), dim=-1)


def _slopes(module: Any) -> Tensor | None:
    """ALiBi's slope of each head, `[H]`, as the model's own code makes it; None without ALiBi."""
    file = sys.modules[type(module).__module__]
    if hasattr(file, "build_mpt_alibi_tensor"):
        biases = file.build_mpt_alibi_tensor(module.n_heads, 2)
    elif hasattr(file, "build_alibi_tensor") and getattr(getattr(module, "config", None), "alibi", True):
        biases = file.build_alibi_tensor(torch.ones(1, 2, dtype=torch.int64), module.num_heads, torch.float32)
    else:
        return None
    slopes: Tensor = (biases[..., 1] - biases[..., 0]).float().flatten()
    return slopes * getattr(module, "beta", 1.0)  # Falcon scales them, too


def _function(module: Any, ask: _Ask) -> Callable[..., Any]:
    """For `_attn` of GPT-J, CodeGen, GPT-Neo and GPT-NeoX-Japanese."""
    divisor = next((getattr(module, name) for name in ("scale_attn", "norm_factor") if hasattr(module, name)), 1.0)
    window = module.config.window_size if getattr(module, "attention_type", None) == "local" else None

    def attend(query: Tensor, key: Tensor, value: Tensor, attention_mask: object = None) -> tuple[Tensor, None]:
        query, key = query.to(value.dtype), key.to(value.dtype)
        return ask(query, key, value, scaling=1 / float(divisor), window=window).transpose(1, 2), None

    return attend


def _grouped(module: Any, ask: _Ask) -> Callable[..., Any]:
    """For a layer of Falcon or BLOOM, whose projection holds the queries of each key, it and its value together."""
    kv_heads = getattr(module, "num_kv_heads", module.num_heads)
    group = module.num_heads // kv_heads

    def forward(
        hidden: Tensor, residual: Tensor | None = None, *, alibi: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None, **others: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        parts = module.query_key_value(hidden).unflatten(-1, (kv_heads, group + 2, module.head_dim))
        query, key, value = (part.flatten(2, 3).transpose(1, 2) for part in parts.split((group, 1, 1), dim=3))
        if alibi is None and position_embeddings is not None:
            query, key = (_rotated(part, *position_embeddings) for part in (query, key))
        out = module.dense(ask(query, key, value, scaling=module.inv_norm_factor).flatten(2))
        return out if residual is None else out + residual, None

    return forward


def _stacked(module: Any, ask: _Ask) -> Callable[..., Any]:
    """For a layer of MPT, whose projection holds all queries, then all keys, then all values."""

    def forward(hidden: Tensor, *others: Any, **named: Any) -> tuple[Tensor, None]:
        parts = module.Wqkv(hidden)
        if module.clip_qkv:
            parts = parts.clamp(-module.clip_qkv, module.clip_qkv)
        query, key, value = parts.unflatten(-1, (3, module.n_heads, module.head_dim)).transpose(1, 3).unbind(2)
        return module.out_proj(ask(query, key, value, scaling=module.softmax_scale).flatten(2)), None

    return forward


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` `[1, H, T, D]`, `cos` and `sin` `[1, T, D]`."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


_WAYS: tuple[tuple[str, Callable[[Any, _Ask], Callable[..., Any]], tuple[str, ...]], ...] = (
    ("_attn", _function, ("_attn", "_merge_heads", "_split_heads")),  # of `_attn`, and for modules with these parts
    ("forward", _grouped, ("query_key_value", "dense", "inv_norm_factor", "_merge_heads")),
    ("forward", _stacked, ("Wqkv", "out_proj", "clip_qkv", "softmax_scale")),
)


def _way(module: nn.Module) -> tuple[str, Callable[[Any, _Ask], Callable[..., Any]]] | None:
    """Which of its functions is replaced, and what makes the other one."""
    return next((way[:2] for way in _WAYS if all(hasattr(module, part) for part in way[2])), None)
