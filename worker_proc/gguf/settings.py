"""The settings of a GGUF file's architecture, read strictly. What is left unread at the end is refused by name, as it
might change the numbers.
"""

import math
from typing import Any

from worker_proc.errors import ModelError
from worker_proc.gguf.header import Header

_HARMLESS = ("vocab_size", "rope.scaling.finetuned", "rope.scaling.yarn_log_multiplier")


class Settings:
    """Those of the file's architecture, by their names behind it."""

    def __init__(self, header: Header) -> None:
        self.prefix = f"{header.settings.get('general.architecture')}."
        start = len(self.prefix)
        found = header.settings.items()
        self.values = {key[start:]: value for key, value in found if key.startswith(self.prefix)}
        self.used: set[str] = set(_HARMLESS)

    def get(self, key: str, default: Any = None) -> Any:
        self.used.add(key)
        return self.values.get(key, default)

    def whole(self, key: str, default: int | None = None) -> int:
        """Of a list with a number for each layer, the one that all have."""
        value = self.get(key, default)
        if isinstance(value, list) and value and len(set(value)) == 1:
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ModelError(self.prefix + key, value, "must be a whole number, the same in all layers")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if not isinstance(value, float | int) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ModelError(self.prefix + key, value, "must be a positive number")
        return shortest(value)

    def must_be(self, key: str, *allowed: Any) -> None:
        if (value := self.get(key)) is not None and value not in allowed:
            raise ModelError(self.prefix + key, value, "not supported")

    def heads(self, *, keys: bool) -> int:
        """Of queries, or of keys."""
        count = self.whole("attention.head_count")
        return self.whole("attention.head_count_kv", count) if keys else count

    def attending(self, layers: int) -> list[bool]:
        """Which layers have heads of keys, where those without attention have 0 of them; from then on, all have as many
        as these."""
        key = "attention.head_count_kv"
        counts = self.get(key)
        if not isinstance(counts, list) or len(counts) != layers or not any(counts):
            raise ModelError(self.prefix + key, counts, "must say so for each layer, and some must have attention")
        self.values[key] = [count for count in counts if count != 0]
        return [count != 0 for count in counts]

    def by_layer(self, key: str, layers: int, kind: type[int] = int) -> list[Any]:
        """A whole number above 0 (or a flag) for each layer: of a list, or the one of all."""
        value = self.get(key)
        values: list[Any] = value if isinstance(value, list) else [value] * layers
        if len(values) < layers or any(type(each) is not kind or (kind is int and each <= 0) for each in values):
            raise ModelError(self.prefix + key, value, "must say so for each layer")
        return values[:layers]

    def refuse_others(self) -> None:
        for key in sorted(set(self.values) - self.used):
            raise ModelError(self.prefix + key, self.values[key], "an unknown setting of this architecture")


def layers_of(settings: Settings) -> int:
    """Those that a token goes through; files count those that guess further tokens, too."""
    blocks, guessing = settings.whole("block_count"), settings.get("nextn_predict_layers", 0)
    if not isinstance(guessing, int) or not 0 <= guessing < blocks:
        raise ModelError(f"{settings.prefix}nextn_predict_layers", guessing, "must be fewer than the layers")
    return blocks - guessing


def shortest(value: float) -> float:
    """The number that float32 stands for: 1e-06 rather than 9.999999974752427e-07."""
    return float(f"{value:.7g}")
