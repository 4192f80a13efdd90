"""How the modules of transformers' models are divided over tensor-parallel ranks: which rows or columns of each weight
a rank keeps, and of which layers the outputs are parts of a sum.

Attention and MLPs as in Megatron-LM (Shoeybi et al., 2019), experts like MLPs, each over all ranks. Recurrent layers by
heads (Gated DeltaNet by key heads with their value heads, Mamba-2 with the groups that its heads go with) or by
channels (short convolutions), as what they keep of a sequence is then divided, too. Projections that make several
things at once are cut by what the rows mean. All that is not named here is whole on every rank.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from worker_proc.errors import ModelError

Span = tuple[int, int]


class Cut(NamedTuple):
    """What a rank keeps of a tensor: these spans of a dimension, one after another, and zeros up to `length`."""

    dim: int
    spans: tuple[Span, ...]
    length: int = 0

    def of(self, tensor: Tensor) -> Tensor:
        """A copy that holds nothing else."""
        parts = [tensor.narrow(self.dim, first, last - first) for first, last in self.spans]
        lacking = self.length - sum(part.shape[self.dim] for part in parts)
        if lacking > 0:
            shape = (*tensor.shape[: self.dim], lacking, *tensor.shape[self.dim + 1 :])
            parts.append(tensor.new_zeros(shape))
        return torch.cat(parts, dim=self.dim)


@dataclass(frozen=True, slots=True)
class Division:
    """A rank's part of a module. `cuts` are by name of a parameter or buffer below it; those that it does not have (a
    bias) are passed over. The outputs of its last layer `out` are to be added up over ranks, or those of the module,
    where nothing comes after it (`ends`), as kernels may know it as a whole. `sizes` replace attributes of the module.
    `norm`: it has a gated RMSNorm over the heads of several ranks; `norms` are RMSNorms over those of all."""

    cuts: dict[str, Cut]
    out: str = ""
    sizes: dict[str, int] = field(default_factory=dict)
    ends: bool = False
    norm: bool = False
    norms: tuple[str, ...] = ()


class Share(NamedTuple):
    """Of a model, for `rank` of `size`."""

    rank: int
    size: int

    def of(self, count: int, what: str) -> Span:
        """This rank's of so many. Raises ModelError naming `what` cannot be divided evenly."""
        if count % self.size:
            raise ModelError(what, count, f"cannot be split over tp = {self.size} ranks")
        each = count // self.size
        return self.rank * each, (self.rank + 1) * each

    def of_vocabulary(self, tokens: int) -> Cut:
        """Rows of an embedding or a head; the last ranks may have fewer tokens, and zeros in their place."""
        each = -(-tokens // self.size)
        first = min(self.rank * each, tokens)
        return Cut(0, ((first, min(first + each, tokens)),), each)

    def or_one(self, count: int, what: str) -> Span:
        """Likewise, or one that several ranks hold where there are fewer than ranks."""
        if count >= self.size or self.size % count:
            return self.of(count, what)
        first = self.rank * count // self.size
        return first, first + 1


def divide(module: nn.Module, share: Share) -> Division | None:
    """This rank's part of a module, or None where it stays whole. Modules below one that is divided are not asked.
    Raises ModelError naming what cannot be divided."""
    found = next((how for knows, how in _KINDS if knows(module)), None)
    return found(module, share) if found is not None else None


def _delta_net(layer: Any, share: Share) -> Division:
    """Qwen 3.5 and Qwen3-Next, which projects everything for one key head after another."""
    keys = share.of(layer.num_k_heads, "linear_num_key_heads")
    values = share.of(layer.num_v_heads, "linear_num_value_heads")
    k, v = _times(keys, layer.head_k_dim), _times(values, layer.head_v_dim)
    channels = Cut(0, _stacked((layer.key_dim, k), (layer.key_dim, k), (layer.value_dim, v)))
    of_values = Cut(0, (values,))
    cuts = {
        "in_proj_qkv.weight": channels,
        "in_proj_z.weight": Cut(0, (v,)),
        "in_proj_b.weight": of_values,
        "in_proj_a.weight": of_values,
        "in_proj_qkvz.weight": Cut(0, (_times(keys, 2 * (layer.key_dim + layer.value_dim) // layer.num_k_heads),)),
        "in_proj_ba.weight": Cut(0, (_times(keys, 2 * layer.num_v_heads // layer.num_k_heads),)),
        "conv1d.weight": channels,
        "A_log": of_values,
        "dt_bias": of_values,
        "out_proj.weight": Cut(1, (v,)),
    }
    sizes = {"num_k_heads": _count(keys), "num_v_heads": _count(values), "key_dim": _count(k), "value_dim": _count(v)}
    return Division(cuts, "out_proj", {**sizes, "conv_dim": 2 * _count(k) + _count(v)})


def _state_space(layer: Any, share: Share) -> Division:
    """Mamba-2. Where there are fewer groups than ranks, those that go with a rank's heads are on several."""
    heads = share.of(layer.num_heads, "mamba_n_heads")
    groups = share.or_one(layer.n_groups, "mamba_n_groups")
    inner, wide = layer.intermediate_size, layer.n_groups * layer.ssm_state_size
    x, state = _times(heads, layer.head_dim), _times(groups, layer.ssm_state_size)
    convolved = ((inner, x), (wide, state), (wide, state))
    channels, of_heads = Cut(0, _stacked(*convolved)), Cut(0, (heads,))
    rows = Cut(0, _stacked((inner, x), *convolved, (layer.num_heads, heads)))
    cuts = {
        "in_proj.weight": rows,
        "in_proj.bias": rows,
        "mup_vector": Cut(2, rows.spans),
        "conv1d.weight": channels,
        "conv1d.bias": channels,
        "norm.weight": Cut(0, (x,)),
        "A_log": of_heads,
        "D": of_heads,
        "dt_bias": of_heads,
        "out_proj.weight": Cut(1, (x,)),
    }
    sizes = {
        "num_heads": _count(heads),
        "n_groups": _count(groups),
        "intermediate_size": _count(x),
        "conv_dim": _count(x) + 2 * _count(state),
        "groups_time_state_size": _count(state),
    }
    return Division(cuts, "out_proj", sizes, norm=_norm_over_ranks(layer, _count(x)))


def _norm_over_ranks(layer: Any, width: int) -> bool:
    """Whether a rank's numbers are a part of what the norm takes together: all of them in older transformers (5.17)."""
    if not isinstance(getattr(getattr(layer, "norm", None), "weight", None), Tensor):
        return False
    group = getattr(layer.norm, "group_size", layer.intermediate_size)
    if hasattr(layer.norm, "norm_before_gate") or (group % width and width % group):
        raise ModelError("norm", type(layer.norm).__name__, f"cannot be split over tp ranks of {width} channels")
    return bool(group > width)


def _short_conv(layer: Any, share: Share) -> Division:
    """LFM2, which projects two gates and what they are of."""
    channels = layer.conv.in_channels
    span = share.of(channels, "hidden_size")
    rows, one = Cut(0, _stacked(*[(channels, span)] * 3)), Cut(0, (span,))
    cuts = {"in_proj.weight": rows, "in_proj.bias": rows, "conv.weight": one, "conv.bias": one}
    return Division(cuts | {"out_proj.weight": Cut(1, (span,))}, "out_proj")


def _attention(layer: Any, share: Share) -> Division:
    """A query head's rows may hold its gate, too. Ranks share KV heads where there are fewer than ranks. A norm is of
    each head, with weights of its own in Cohere's, or of all of them together (OLMo 2, MiniMax M2)."""
    queries = layer.config.num_attention_heads
    keys = queries // layer.num_key_value_groups  # which layers may have different numbers of (Gemma 4)
    heads, kv_heads = share.of(queries, "num_attention_heads"), share.or_one(keys, "num_key_value_heads")
    cuts: dict[str, Cut] = {}
    norms: list[str] = []
    for name, count, span in (("q", queries, heads), ("k", keys, kv_heads), ("v", keys, kv_heads)):
        if not _has_linears(layer, f"{name}_proj"):
            continue  # keys are the values, too, or another layer's
        outputs = getattr(layer, f"{name}_proj").out_features
        rows = Cut(0, (_times(span, outputs // count),))
        cuts |= {f"{name}_proj.weight": rows, f"{name}_proj.bias": rows}
        norm = getattr(getattr(layer, f"{name}_norm", None), "weight", None)
        if norm is not None and norm.shape == (outputs,) and count > 1:
            cuts[f"{name}_norm.weight"] = rows
            norms.append(f"{name}_norm")
        elif norm is not None and norm.dim() == 2:
            cuts[f"{name}_norm.weight"] = Cut(0, (span,))
    out = "o_proj" if hasattr(layer, "o_proj") else "out_proj"
    cuts[f"{out}.weight"] = Cut(1, (_times(heads, getattr(layer, out).in_features // queries),))
    if hasattr(getattr(layer, "q_layernorm", None), "norms"):
        raise ModelError(
            "qk_layernorm", True, "norms of single heads (StableLM 2 12B) are not split over ranks; use tp = 1"
        )
    counts = {"num_heads": _count(heads), "num_key_value_heads": _count(kv_heads)}
    sizes = {name: count for name, count in counts.items() if hasattr(layer, name)}  # StableLM looks at them
    groups = _count(heads) // _count(kv_heads)
    return Division(cuts, out, {**sizes, "num_key_value_groups": groups}, norms=tuple(norms))


def _latent_attention(layer: Any, share: Share) -> Division:
    """DeepSeek's, whose keys and values are made of a latent vector, which is on every rank."""
    heads = share.of(layer.num_heads, "num_attention_heads")
    queries, values = Cut(0, (_times(heads, layer.qk_head_dim),)), _times(heads, layer.v_head_dim)
    cuts = {
        "q_proj.weight": queries,
        "q_b_proj.weight": queries,
        "kv_b_proj.weight": Cut(0, (_times(heads, layer.qk_nope_head_dim + layer.v_head_dim),)),
        "o_proj.weight": Cut(1, (values,)),
    }
    return Division(cuts, "o_proj", {"num_heads": _count(heads)})


def _mlp(layer: Any, share: Share) -> Division:
    into, out = next(names for names in _MLPS if _has_linears(layer, *names[0], names[1]))
    inner = getattr(layer, out).in_features
    span = share.of(inner, "intermediate_size")
    stacked = getattr(layer, into[0]).out_features // inner  # gate and up may be one layer
    rows = Cut(0, _stacked(*[(inner, span)] * stacked))
    cuts = {f"{name}.{kind}": rows for name in into for kind in ("weight", "bias")}
    return Division(cuts | {f"{out}.weight": Cut(1, (span,))}, out, ends=True)


def _experts(layer: Any, share: Share) -> Division:
    inner = layer.down_proj.shape[2]
    if getattr(layer, "is_transposed", False):
        raise ModelError("experts", type(layer).__name__, "stores its weights transposed: use tp = 1")
    span = share.of(inner, "moe_intermediate_size")
    into = "gate_up_proj" if hasattr(layer, "gate_up_proj") else "up_proj"
    rows = _stacked(*[(inner, span)] * (getattr(layer, into).shape[1] // inner))
    cuts = {into: Cut(1, rows), "down_proj": Cut(2, (span,))}
    return Division(cuts, sizes={"intermediate_dim": _count(span)}, ends=True)


_MLPS = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("up_proj",), "down_proj"),
    (("gate_up_proj",), "down_proj"),
    (("c_fc",), "c_proj"),
    (("w1", "w3"), "w2"),
    (("input_linear",), "output_linear"),
)


def _has_linears(module: nn.Module, *names: str) -> bool:
    return all(isinstance(getattr(module, name, None), nn.Linear) for name in names)


def _is_delta_net(module: nn.Module) -> bool:
    return _has_linears(module, "out_proj") and all(
        hasattr(module, name) for name in ("conv1d", "num_k_heads", "A_log")
    )


def _is_state_space(module: nn.Module) -> bool:
    return all(hasattr(module, name) for name in ("conv1d", "ssm_state_size", "n_groups", "A_log", "D"))


def _is_short_conv(module: nn.Module) -> bool:
    return _has_linears(module, "in_proj", "out_proj") and isinstance(getattr(module, "conv", None), nn.Conv1d)


def _is_attention(module: nn.Module) -> bool:
    return hasattr(module, "num_key_value_groups") and _has_linears(module, "q_proj")


def _is_latent_attention(module: nn.Module) -> bool:
    return hasattr(module, "qk_head_dim") and _has_linears(module, "kv_b_proj", "o_proj")


def _is_mlp(module: nn.Module) -> bool:
    return any(_has_linears(module, *into, out) for into, out in _MLPS)


def _is_experts(module: Any) -> bool:
    down = getattr(module, "down_proj", None)
    return isinstance(down, nn.Parameter) and down.dim() == 3


_Kind = tuple[Callable[[nn.Module], bool], Callable[[Any, Share], Division]]
_KINDS: tuple[_Kind, ...] = (
    (_is_delta_net, _delta_net),
    (_is_state_space, _state_space),
    (_is_short_conv, _short_conv),
    (_is_latent_attention, _latent_attention),
    (_is_attention, _attention),
    (_is_experts, _experts),
    (_is_mlp, _mlp),
)


def _times(span: Span, size: int) -> Span:
    return span[0] * size, span[1] * size


def _count(span: Span) -> int:
    return span[1] - span[0]


def _stacked(*parts: tuple[int, Span]) -> tuple[Span, ...]:
    """Spans of things that lie one after another, each given with how much of it there is in all."""

    def moved() -> Iterator[Span]:
        start = 0
        for size, (first, last) in parts:
            yield start + first, start + last
            start += size

    return tuple(moved())
