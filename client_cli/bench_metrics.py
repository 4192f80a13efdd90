"""What a serving benchmark measures, from one record per request. Times are CLOCK_MONOTONIC nanoseconds.

TTFT   from sending a request to its first token
ITL    between two arrivals of one answer (a token each, unless the server sends several at once)
TPOT   a request's mean time per token after the first: (E2E - TTFT) / (tokens - 1)
E2E    from sending a request to its last token
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

PERCENTILES = (50, 90, 99)
METRICS = ("ttft", "itl", "tpot", "e2e")


@dataclass(slots=True)
class Record:
    """One request as the client saw it. `due_ns` is when it was to be sent; `asked` tokens were to be generated."""

    due_ns: int
    sent_ns: int
    asked: int
    first_ns: int = 0
    last_ns: int = 0
    gaps_ns: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None

    def arrived(self, now: int) -> None:
        """New output came."""
        if self.first_ns:
            self.gaps_ns.append(now - self.last_ns)
        else:
            self.first_ns = now
        self.last_ns = now

    @property
    def ttft(self) -> float | None:
        """In ms, as all of these; None where there is none."""
        return (self.first_ns - self.sent_ns) / 1e6 if self.first_ns else None

    @property
    def tpot(self) -> float | None:
        return (self.last_ns - self.first_ns) / 1e6 / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def itl(self) -> float | None:
        """The mean time between arrivals."""
        return sum(self.gaps_ns) / len(self.gaps_ns) / 1e6 if self.gaps_ns else None

    @property
    def e2e(self) -> float | None:
        return (self.last_ns - self.sent_ns) / 1e6 if self.first_ns else None


def percentile(values: Sequence[float], percent: float) -> float:
    """With linear interpolation between the closest ranks; `values` sorted and not empty."""
    at = (len(values) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (at - low)


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles and maximum, or None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    named = {f"p{p}": percentile(ordered, p) for p in PERCENTILES}
    return {"mean": sum(ordered) / len(ordered), **named, "max": ordered[-1]}


class SloError(ValueError):
    """An objective is not METRIC:MILLISECONDS."""


def parse_slos(texts: Sequence[str]) -> dict[str, float]:
    """Objectives as `ttft:200`: at most so many ms. A request's ITL is its mean. Raises SloError."""
    found = {}
    for text in texts:
        name, _, limit = text.partition(":")
        try:
            found[name] = float(limit)
        except ValueError:
            raise SloError(f"must be METRIC:MILLISECONDS, got {text!r}") from None
        if name not in METRICS or not 0 < found[name] < float("inf"):
            raise SloError(f"METRIC is one of {', '.join(METRICS)} and the time more than 0 ms, got {text!r}")
    return found


def meets(record: Record, slos: dict[str, float]) -> bool:
    """Whether a request ended well and within every objective. An answer of one token has no TPOT to violate."""
    values = ((getattr(record, name), limit) for name, limit in slos.items())
    return record.error is None and all(value is None or value <= limit for value, limit in values)


def summarize(records: Sequence[Record], planned: int, slos: dict[str, float], duration_s: float) -> dict[str, Any]:
    """Counts, rates per second, and the spread of each metric in ms. JSON-ready. Of the `planned` requests those were
    not sent whose conversation had failed before."""
    good = [r for r in records if r.error is None]
    prompt, output = sum(r.prompt_tokens for r in good), sum(r.output_tokens for r in good)
    summary: dict[str, Any] = {
        "duration_s": duration_s,
        "completed": len(good),
        "failed": len(records) - len(good),
        "not_sent": planned - len(records),
        "errors": dict(Counter(r.error for r in records if r.error is not None).most_common(10)),
        "short_answers": sum(r.output_tokens != r.asked for r in good),
        "prompt_tokens": prompt,
        "cached_tokens": sum(r.cached_tokens for r in good),
        "output_tokens": output,
        "requests_per_s": len(good) / duration_s,
        "output_tokens_per_s": output / duration_s,
        "total_tokens_per_s": (prompt + output) / duration_s,
        "late_sends_ms": spread([(r.sent_ns - r.due_ns) / 1e6 for r in records]),
    }
    if slos:
        met = sum(meets(r, slos) for r in records)
        summary |= {"slo_ms": slos, "met_slo": met, "goodput_requests_per_s": met / duration_s}
    for name in ("ttft", "tpot", "e2e"):
        values = (getattr(r, name) for r in good)
        summary[f"{name}_ms"] = spread([value for value in values if value is not None])
    summary["itl_ms"] = spread([gap / 1e6 for r in good for gap in r.gaps_ns])
    return summary
