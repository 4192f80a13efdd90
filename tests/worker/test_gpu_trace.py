"""What bench/gpu reads out of a profiler's trace, and the plans of its steady decode."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers_triton import DEVICE

pytest.importorskip("triton")

from bench.gpu.steady import SteadyDecode
from bench.gpu.trace import read, table
from common.sampling_params import DrawParams
from tests.helpers_models import make_checkpoint
from tests.worker.test_cuda_decoder import load, run_again
from worker_proc.cuda.graphs import GraphedDecoder
from worker_proc.kv_cache import KVCache


def event(cat: str, name: str, ts: float, dur: float) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 0, "tid": 7}


STEADY = [
    event("cuda_runtime", "cudaStreamSynchronize", 0, 5),  # before the first launch
    event("cuda_runtime", "cudaGraphLaunch", 10, 5),
    event("cuda_runtime", "cudaLaunchKernel", 16, 2),
    event("cuda_runtime", "cudaEventSynchronize", 19, 30),
    event("cuda_driver", "cuLaunchKernelEx", 50, 2),
    event("cuda_runtime", "cudaDeviceSynchronize", 60, 99),  # after the last
    event("kernel", "decode", 20, 40),
    event("kernel", "combine", 50, 20),  # overlaps the one before it
    event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 72, 8),
    event("kernel", "decode", 80, 40),
    {"ph": "M", "name": "process_name", "pid": 0},
    event("cpu_op", "aten::empty", 0, 1000),
]


def test_a_steady_trace() -> None:
    trace = read(list(reversed(STEADY)))
    assert (trace.span, trace.waits, trace.tokens_waited_for) == (100.0, [], 1)
    assert trace.idle == 0 and trace.gaps == pytest.approx(0.02)
    assert trace.kernels[:2] == [("decode", 80.0, 2), ("combine", 20.0, 1)]
    assert [line.split()[0] for line in table(trace, steps=2)] == ["40.0", "10.0", "4.0"]


def test_short_gaps_between_kernels_are_not_idleness() -> None:
    """As inside a graph: a kernel does not begin at the moment in which the one before it ends."""
    later = [event("kernel", "decode", begin, 9) for begin in (125, 140, 154)]  # after gaps of 5, 6 and 5 us
    trace = read([*STEADY, *later])
    assert trace.span == 143
    assert (trace.idle * trace.span, trace.gaps * trace.span) == (pytest.approx(6), pytest.approx(2 + 5 + 5))


@pytest.mark.parametrize("name", ["cudaStreamSynchronize", "cudaDeviceSynchronize", "cuStreamSynchronize", "cudaMemcpy",
                                  "cudaMalloc", "cudaHostAlloc"])  # fmt: skip
def test_what_waits_between_launches_is_named(name: str) -> None:
    assert read([*STEADY, event("cuda_runtime", name, 30, 1)]).waits == [name]


def test_copies_of_pageable_memory_are_named() -> None:
    copy = event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 121, 4)
    assert read([*STEADY, copy]).waits == [copy["name"]]


def test_a_trace_without_kernels_is_no_proof() -> None:
    with pytest.raises(ValueError, match="no kernels"):
        read([event("cuda_runtime", "cudaGraphLaunch", 10, 5)])


@pytest.mark.skipif(DEVICE.type == "cuda", reason="bench/gpu.sh runs it")
def test_plans_of_steady_decode_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(make_checkpoint("llama", tmp_path, num_hidden_layers=1))
    cache = KVCache(model.kv_spec, 9 * 4, 4)
    for pages in (*cache.k, *cache.v):
        pages.normal_()
    graphed = GraphedDecoder(model, 9, 16, run_again)
    graphed.capture(cache)
    decodes = SteadyDecode(graphed, cache, 9, 16, "cpu")
    for rows, draw in ((9, DrawParams(temperature=0.0)), (3, DrawParams(0.8, top_p=0.9))):
        launched = decodes._run(decodes.plans(rows, draw, 2), None)
        assert launched is not None and len(launched.finish().tokens) == rows
    monkeypatch.setattr("bench.gpu.steady._WARM_UP", 1)
    monkeypatch.setattr("bench.gpu.steady._CLOCKED", 2)
    assert decodes.step_time(3, DrawParams(temperature=0.0)) > 0
