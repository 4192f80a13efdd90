"""What a step costs: fitted to measured steps, or computed from a machine's bandwidth and FLOP rate.

Both say how long a worker needs for a step of a given shape. What lies outside the worker (sockets, the processes on
both sides of the scheduler) is in `Overheads`, and is measured too: see bench/validate_simulator.py.
"""

import dataclasses
import json
from dataclasses import dataclass
from operator import attrgetter, mul
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

T = TypeVar("T")


class CostError(ValueError):
    """A file does not describe costs or a model, or a rate is none; the text names the file and the field."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """The shape of a step.

    `tokens` are computed, `rows` are requests, `chunks` those of them that prefill, `samples` those that get a token.
    `context` are the tokens whose keys and values are read, all rows together, the step's own included; `pairs` are
    (query, key) pairs in attention, so that a prefill of n tokens onto p cached ones has n * p + n * (n + 1) / 2.
    `padded` is what an attention reads that pads: the rows that decode, times the context of the longest of them.
    """

    tokens: int
    rows: int
    chunks: int
    samples: int
    context: int
    pairs: int
    padded: int


class CostModel(Protocol):
    def seconds(self, work: StepWork) -> float: ...


@dataclass(frozen=True, slots=True)
class LinearCost:
    """A sum of terms, each a coefficient in seconds times one number of a step, in the order of `features`.

    The time of the matrices as a function of the tokens is flat as long as reading the weights takes longer than the
    arithmetic, then it rises: three further slopes begin at 8, 32 and 128 tokens.
    """

    base_s: float = 0.0
    per_token_s: float = 0.0
    per_row_s: float = 0.0
    per_chunk_s: float = 0.0
    per_context_s: float = 0.0
    per_pair_s: float = 0.0
    per_padded_s: float = 0.0
    per_token_over_8_s: float = 0.0
    per_token_over_32_s: float = 0.0
    per_token_over_128_s: float = 0.0

    @staticmethod
    def features(work: StepWork) -> tuple[float, ...]:
        """What the fields are multiplied with, in their order."""
        over = (max(0, work.tokens - knot) for knot in (8, 32, 128))
        return 1.0, work.tokens, work.rows, work.chunks, work.context, work.pairs, work.padded, *over

    def seconds(self, work: StepWork) -> float:
        return float(sum(map(mul, _coefficients(self), self.features(work))))


_coefficients = attrgetter(*(f.name for f in dataclasses.fields(LinearCost)))


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What one step of a dense decoder moves and computes. FLOPs count a multiplication and an addition as two."""

    weight_bytes: int  # read once a step: every matrix and the output head
    kv_bytes_per_token: int
    flops_per_token: int
    flops_per_sample: int  # the output head
    flops_per_pair: int  # attention: a dot product and a weighted sum in every query head and layer

    @classmethod
    def of_config(cls, path: Path, bytes_per_weight: float = 2.0, bytes_per_kv: float = 2.0) -> Self:
        """From a Hugging Face `config.json`, or a directory that holds one.

        Raises CostError when the file cannot be read, lacks a size, or is of a mixture of experts.
        """
        file = path / "config.json" if path.is_dir() else path
        config = _read_object(file)
        for experts in ("num_experts", "num_local_experts", "n_routed_experts"):
            if config.get(experts):
                raise CostError(f"{file}: {experts}: mixtures of experts are not modelled")
        if "n_embd" in config:  # GPT-2 has names of its own, and no gate in its MLP
            hidden, layers, heads = (_size(config, file, name) for name in ("n_embd", "n_layer", "n_head"))
            kv_heads, head_dim, matrices = heads, hidden // heads, 2
            inner = config.get("n_inner") or 4 * hidden
        else:
            names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
            hidden, layers, heads, inner = (_size(config, file, name) for name in names)
            kv_heads = config.get("num_key_value_heads") or heads
            head_dim, matrices = config.get("head_dim") or hidden // heads, 3
        vocab = _size(config, file, "vocab_size")
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        body = layers * (attention + matrices * hidden * inner)
        return cls(
            weight_bytes=int((body + vocab * hidden) * bytes_per_weight),
            kv_bytes_per_token=int(2 * layers * kv_heads * head_dim * bytes_per_kv),
            flops_per_token=2 * body,
            flops_per_sample=2 * vocab * hidden,
            flops_per_pair=4 * layers * heads * head_dim,
        )


@dataclass(frozen=True, slots=True)
class Roofline:
    """The longer of moving the bytes and doing the arithmetic (Williams et al., CACM 2009), plus a fixed overhead.

    It is a floor: give the rates that the machine reaches, not those of its data sheet, for what will be measured.
    """

    shape: ModelShape
    bytes_per_s: float
    flops_per_s: float
    overhead_s: float = 0.0

    def __post_init__(self) -> None:
        for name, rate in (("bandwidth", self.bytes_per_s), ("tflops", self.flops_per_s)):
            if not rate > 0:
                raise CostError(f"{name}: must be more than 0")
        if not 0 <= self.overhead_s < float("inf"):
            raise CostError("step-overhead-us: must be at least 0")

    def seconds(self, work: StepWork) -> float:
        shape = self.shape
        moved = shape.weight_bytes + shape.kv_bytes_per_token * (work.context + work.tokens)
        flops = (
            shape.flops_per_token * work.tokens
            + shape.flops_per_sample * work.samples
            + shape.flops_per_pair * work.pairs
        )
        return self.overhead_s + max(moved / self.bytes_per_s, flops / self.flops_per_s)


@dataclass(frozen=True, slots=True)
class Overheads:
    """Time on the way, in seconds, outside the worker's own steps.

        client ──submit──► scheduler ──plan──► worker ──result──► scheduler ──deliver──► client
                               ▲    commit                            │
                               └──────────────────────────────────────┘

    `turnaround_s` lies between two steps of a worker whose next plan is there already; `deliver_row_s` comes on top
    of `deliver_s` for each row of a batch. Processes share cores: while the worker computes, a request takes
    `submit_busy_s` more to come, and lengthens the worker's computing by `arrival_s`.
    """

    submit_s: float = 0.0
    plan_s: float = 0.0
    turnaround_s: float = 0.0
    result_s: float = 0.0
    commit_s: float = 0.0
    deliver_s: float = 0.0
    deliver_row_s: float = 0.0
    submit_busy_s: float = 0.0
    arrival_s: float = 0.0


NO_OVERHEADS = Overheads()


@dataclass(frozen=True, slots=True)
class Costs:
    """A fitted model with the overheads of the same cluster, as in a costs file; `source` says where they are from."""

    step: LinearCost
    overheads: Overheads
    source: str = ""

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises CostError when the file is not one that `save` writes."""
        values = _read_object(path)
        unknown = set(values) - {"step", "overheads", "source"}
        if unknown:
            raise CostError(f"{path}: {min(unknown)}: no such field; there are step, overheads and source")
        return cls(
            _numbers(LinearCost, values.get("step", {}), f"{path}: step"),
            _numbers(Overheads, values.get("overheads", {}), f"{path}: overheads"),
            str(values.get("source", "")),
        )


def _numbers(cls: type[T], values: Any, where: str) -> T:
    names = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    if not isinstance(values, dict):
        raise CostError(f"{where}: must be an object, got {values!r}")
    for name, value in values.items():
        if name not in names:
            raise CostError(f"{where}.{name}: no such field; there are {', '.join(names)}")
        if type(value) not in (int, float) or not 0 <= value < 1e6:
            raise CostError(f"{where}.{name}: must be seconds from 0 to 1e6, got {value!r}")
    return cls(**values)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CostError(f"{path}: cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise CostError(f"{path}: must hold a JSON object")
    return values


def _size(config: dict[str, Any], file: Path, name: str) -> int:
    value = config.get(name)
    if type(value) is not int or value < 1:
        raise CostError(f"{file}: {name}: must be an integer of at least 1, got {value!r}")
    return value
