"""What a torch profiler's trace of decode steps says: the GPU's idle share, what the host waited for, which kernels
took the time. Works on the exported Chrome trace, so it is tested without a GPU."""

import json
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_HOST = {"cuda_runtime", "cuda_driver"}
_EVENT = "cudaEventSynchronize"
_SHORT = 5.0  # microseconds: from one kernel to the next, also inside a graph, a GPU takes about one
_WAITS = {
    "cudaMemcpy",
    "cudaMemset",
    "cudaMalloc",
    "cudaFree",
    "cudaHostAlloc",
    "cudaFreeHost",
    "cuMemAlloc",
    "cuMemFree",
}


@dataclass(frozen=True, slots=True)
class Trace:
    """Times are microseconds. `kernels` have name, time in all, and how often; most time first."""

    span: float  # from the first kernel's beginning to the last one's end
    idle: float  # the share of it in which nothing ran on the GPU for longer than `_SHORT`
    gaps: float  # the share of it in shorter gaps between kernels
    waits: list[str]  # calls between the first and the last launch that wait for the GPU
    tokens_waited_for: int  # events that were waited for: each is a step's tokens, when the next step has been launched
    kernels: list[tuple[str, float, int]]


def export(profiler: Any) -> Trace:
    """The trace of a torch.profiler.profile that has ended."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read(json.loads(path.read_text())["traceEvents"])


def read(events: list[dict[str, Any]]) -> Trace:
    """Raises ValueError if nothing ran on the GPU."""
    whole = [event for event in events if event.get("ph") == "X"]
    device = sorted((e for e in whole if e.get("cat") in _DEVICE), key=lambda e: float(e["ts"]))
    if not device:
        raise ValueError("the trace has no kernels: is CUPTI there?")
    idle, gaps, first = 0.0, 0.0, float(device[0]["ts"])
    reached = first
    kernels, counts = Counter[str](), Counter[str]()
    for event in device:
        begin, taken = float(event["ts"]), float(event["dur"])
        gap = max(0.0, begin - reached)
        if gap > _SHORT:
            idle += gap
        else:
            gaps += gap
        reached = max(reached, begin + taken)
        kernels[event["name"]] += taken  # type: ignore[assignment]
        counts[event["name"]] += 1
    calls = sorted((e for e in whole if e.get("cat") in _HOST), key=lambda e: float(e["ts"]))
    launches = [i for i, call in enumerate(calls) if "Launch" in call["name"]]
    between = [call["name"] for call in calls[launches[0] : launches[-1]]] if launches else []
    waits = [name for name in between if name in _WAITS or ("Synchronize" in name and name != _EVENT)]
    waits += [event["name"] for event in device if "Pageable" in event["name"]]  # such copies wait, too
    most = [(name, taken, counts[name]) for name, taken in kernels.most_common()]
    span = reached - first
    return Trace(span, idle / span, gaps / span, waits, between.count(_EVENT), most)


def table(trace: Trace, steps: int, rows: int = 10) -> list[str]:
    """The kernels that take most time, a line each: microseconds a step, their share, launches a step."""
    busy = sum(taken for _, taken, _ in trace.kernels)
    return [
        f"    {taken / steps:9.1f} us {taken / busy:6.1%} {count / steps:6.1f}x  {name[:80]}"
        for name, taken, count in trace.kernels[:rows]
    ]
