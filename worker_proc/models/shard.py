"""Which part of a model each rank computes: Megatron-LM's split (Shoeybi et al., 2019). Needs no torch."""

import math
from dataclasses import dataclass

from worker_proc.errors import ModelError
from worker_proc.models.spec import DecoderSpec

CONV_LANES = 16  # channels of a short convolution that ranks divide among them, and kernels take together
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a model that `rank` of `size` computes: half-open ranges of heads, channels and vocabulary."""

    rank: int
    size: int
    heads: Span
    kv_heads: Span  # one head, shared with other ranks, when there are more ranks than KV heads
    channels: Span  # of the MLP
    vocab: Span  # may end past the vocabulary on the last ranks: padded with zero rows
    delta_keys: Span = (0, 0)  # heads of Gated DeltaNets
    delta_values: Span = (0, 0)
    conv: Span = (0, 0)  # channels of gated short convolutions
    shared: Span = (0, 0)  # channels of the shared expert
    dense: Span = (0, 0)  # of MLPs where other layers have mixtures, or beside them
    full_kv_heads: Span = (0, 0)  # of layers without a window, where they differ (Gemma 4)
    inputs: Span = (0, 0)  # numbers of a layer's inputs

    @classmethod
    def of(cls, spec: DecoderSpec, rank: int, size: int) -> "Shard":
        """Raises ModelError naming what does not divide by `size`."""
        delta, mixture = spec.delta, spec.mixture
        shared, dense = (mixture.shared, mixture.dense_size) if mixture is not None else (0, 0)
        divided = [("num_attention_heads", spec.num_heads), ("intermediate_size", spec.intermediate_size)]
        delta_keys = delta_values = (0, 0)
        if delta is not None and delta.tiled:  # the value heads of a key head lie apart: each rank has all keys
            divided.append(("linear_num_value_heads", delta.value_heads))
            delta_keys, delta_values = (0, delta.key_heads), span(delta.value_heads // size, rank)
        elif delta is not None:  # as many value heads go with each key head
            divided.append(("linear_num_key_heads", delta.key_heads))
            delta_keys, delta_values = (span(count // size, rank) for count in (delta.key_heads, delta.value_heads))
        divided += [("shared_expert_intermediate_size", shared), ("intermediate_size", dense)]
        conv = spec.hidden_size // CONV_LANES if spec.conv is not None else 0
        divided.append((f"hidden_size / {CONV_LANES}", conv))
        gemma4 = spec.gemma4
        divided.append(("hidden_size_per_layer_input", gemma4.inputs if gemma4 is not None else 0))
        for key, value in divided:
            if value % size:
                raise ModelError(key, value, f"cannot be split over tp = {size} ranks")
        return cls(
            rank=rank,
            size=size,
            heads=span(spec.num_heads // size, rank),
            kv_heads=kv_span("num_key_value_heads", spec.num_kv_heads, rank, size),
            channels=span(spec.intermediate_size // size, rank),
            vocab=span(math.ceil(spec.vocab_size / size), rank),
            delta_keys=delta_keys,
            delta_values=delta_values,
            conv=scaled(span(conv // size, rank), CONV_LANES),
            shared=span(shared // size, rank),
            dense=span(dense // size, rank),
            full_kv_heads=kv_span("num_global_key_value_heads", gemma4.full_kv_heads, rank, size) if gemma4 else (0, 0),
            inputs=span(gemma4.inputs // size, rank) if gemma4 else (0, 0),
        )

    def kv_heads_of(self, spec: DecoderSpec, layer: int) -> Span:
        """Those of the keys and values that a layer reads."""
        return self.full_kv_heads if spec.gemma4 is not None and spec.windows[layer] is None else self.kv_heads


def kv_span(key: str, count: int, rank: int, size: int) -> Span:
    """A rank's heads of keys. Raises ModelError naming `key`."""
    if count % size and size % count:
        raise ModelError(key, count, f"can be neither split over tp = {size} ranks nor replicated evenly")
    first = rank * count // size
    return (first, first + max(1, count // size))


def span(count: int, rank: int) -> Span:
    return (rank * count, (rank + 1) * count)


def moved(span: Span, start: int) -> Span:
    return (start + span[0], start + span[1])


def scaled(span: Span, factor: int) -> Span:
    return (span[0] * factor, span[1] * factor)
