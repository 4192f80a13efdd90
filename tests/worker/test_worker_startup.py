"""What a worker chooses at start-up: device, precision, context window, number of pages."""

import logging
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.config import CacheConfig, ConfigError, ModelConfig
from common.messages.types import MAX_BATCH_TOKENS
from tests.helpers_models import make_checkpoint
from worker_proc.attention.cpu import CpuAttention
from worker_proc.attention.reference import ReferenceAttention
from worker_proc.choices import (
    choose_attention,
    choose_context_len,
    choose_device,
    choose_dtype,
    choose_kernels,
    choose_threads,
    share_of_cores,
)
from worker_proc.cpu.features import CpuFeatures
from worker_proc.errors import ModelError
from worker_proc.kv_cache import KVSpec
from worker_proc.memory import CacheSize, choose_size, describe_cache
from worker_proc.models.describe import describe
from worker_proc.models.interface import ModelInfo
from worker_proc.recurrent import StateKey, StateSpec
from worker_proc.startup import ready_info

ROOT = Path(__file__).resolve().parents[2]
SPEC = KVSpec.uniform(
    num_layers=2, num_kv_heads=4, k_head_dim=8, v_head_dim=8, dtype=torch.float32
)  # 512 bytes per token
INFO = ModelInfo("LlamaForCausalLM", "llama", "native", 320, 1024, (2, 7), 10**6, "bfloat16")
MODEL = ModelConfig(path="m")
CPU = torch.device("cpu")


def pages(cache: CacheConfig, *, ranks: int = 1, context_len: int = 64, max_running: int = 2) -> int:
    limits = {"ranks": ranks, "context_len": context_len, "max_running": max_running}
    return choose_size(cache, SPEC, device=CPU, **limits).num_pages


def test_kv_tokens_are_rounded_up_to_pages() -> None:
    assert pages(CacheConfig(page_size=16, kv_tokens=100)) == 7
    assert pages(CacheConfig(page_size=1, kv_tokens=100)) == 100


def test_kv_bytes_are_for_one_rank() -> None:
    assert pages(CacheConfig(page_size=16, kv_bytes=5 * 16 * 512 + 1), ranks=1) == 5
    assert pages(CacheConfig(page_size=16, kv_bytes=5 * 16 * 512 + 1), ranks=4) == 5


@pytest.mark.parametrize("size", [{"kv_tokens": 1}, {"kv_bytes": 1023}])
def test_a_cache_of_one_token_holds_no_request(size: dict[str, int]) -> None:
    name = "kv_tokens" if "kv_tokens" in size else "kv_memory"
    with pytest.raises(ModelError, match=f"{name} = .* has at least 2 tokens"):
        pages(CacheConfig(page_size=1, **size))
    assert pages(CacheConfig(page_size=1, kv_tokens=2)) == pages(CacheConfig(page_size=1, kv_bytes=1024)) == 2
    assert pages(CacheConfig(page_size=2, kv_tokens=2)) == 1


def test_no_more_than_all_running_requests_can_use() -> None:
    assert pages(CacheConfig(page_size=16, kv_bytes=10**12), context_len=65, max_running=3) == 15
    assert pages(CacheConfig(page_size=16), context_len=65, max_running=3) == 15


def test_too_little_memory_is_named_with_the_numbers() -> None:
    with pytest.raises(ModelError, match=r"kv_memory = 8191: .* one page of 16 tokens, which needs 8192 bytes"):
        pages(CacheConfig(page_size=16, kv_bytes=8191))


def test_more_than_the_memory_that_is_available_is_named_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker_proc.memory.available_memory", lambda: 3 * 2**30)
    tokens = 2 * 2**30 // 512
    assert pages(CacheConfig(page_size=16, kv_tokens=tokens)) == tokens // 16
    with pytest.raises(ModelError, match=r"kv_tokens = 4194304: needs 2.00 GiB for each of 2 ranks, and 3.00 GiB of"):
        pages(CacheConfig(page_size=16, kv_tokens=tokens), ranks=2)
    with pytest.raises(ModelError, match=r"kv_memory = 4294967296: needs 4.00 GiB for each of 1 ranks"):
        pages(CacheConfig(page_size=16, kv_bytes=2**32), context_len=2**20, max_running=64)


def test_a_gpu_keeps_what_steps_take_from_every_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that was asked for, too: else the first large step would find no memory."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * 2**30, 8 * 2**30))

    def pages(cache: CacheConfig, activations: int) -> int:
        gpu = torch.device("cuda", 0)
        limits = {"ranks": 2, "context_len": 2**20, "max_running": 64}
        return choose_size(cache, SPEC, device=gpu, activations=activations, **limits).num_pages

    assert pages(CacheConfig(page_size=16), 2**30) == int(0.92 * 2 * 2**30) // (16 * 512)
    tokens = 2 * 2**30 // 512
    assert pages(CacheConfig(page_size=16, kv_tokens=tokens), 2**30) == tokens // 16
    with pytest.raises(ModelError, match=r"kv_tokens = 4194304: needs 2.00 GiB for .*, and 1.50 GiB of GPU memory"):
        pages(CacheConfig(page_size=16, kv_tokens=tokens), 3 * 2**29)
    with pytest.raises(ModelError, match=r"kv_memory = 2147483648: needs 2.00 GiB for .*, and 1.50 GiB of GPU memory"):
        pages(CacheConfig(page_size=16, kv_bytes=2**31), 3 * 2**29)


def test_less_than_a_context_window_is_worth_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert pages(CacheConfig(page_size=16, kv_tokens=64)) == 4
        assert not caplog.records
        assert pages(CacheConfig(page_size=16, kv_tokens=48)) == 3
    assert "48 tokens, less than the context window of 64" in caplog.text


def test_states_of_recurrent_layers_take_a_part_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker_proc.memory.available_memory", lambda: 2**34)
    state = StateSpec(StateKey(0, "recurrent", 0), (2**10, 2**8), torch.float32)  # 1 MiB

    def size(max_running: int = 256, prefix_cache: bool = True, context_len: int = 2**20, **cache: int) -> CacheSize:
        given = CacheConfig(page_size=16, prefix_cache=prefix_cache, **cache)
        limits = {"ranks": 1, "context_len": context_len, "max_running": max_running}
        return choose_size(given, replace(SPEC, states=(state,)), device=CPU, **limits)

    mib, page = 2**20, 16 * 512
    assert size(kv_bytes=64 * mib) == CacheSize(32 * mib // page, 16, 16)
    assert size(kv_bytes=64 * mib, max_running=5) == CacheSize(43 * mib // page, 5, 16)
    assert size(kv_bytes=64 * mib, prefix_cache=False) == CacheSize(48 * mib // page, 16, 0)
    assert size() == CacheSize((4096 - 256 - 1024) * mib // page, 256, 1024)  # of a quarter of 16 GiB
    assert size(kv_tokens=100) == CacheSize(7, 256, 1024)
    assert size(kv_bytes=4 * mib) == CacheSize(2 * mib // page, 1, 1)
    # windows of 2 MiB: those of 16 requests fill what is left; of 32 KiB, which leave room for more requests
    assert size(kv_bytes=64 * mib, context_len=4096) == CacheSize(32 * mib // page, 16, 16)
    assert size(kv_bytes=64 * mib, context_len=64) == CacheSize(46 * 4, 46, 16)
    assert size(kv_bytes=64 * mib, context_len=64, prefix_cache=False) == CacheSize(62 * 4, 62, 0)
    assert size(kv_bytes=64 * mib, context_len=64, max_running=20) == CacheSize(20 * 4, 20, 16)
    assert size(kv_tokens=100, context_len=64) == CacheSize(7, 256, 1024)
    with pytest.raises(ModelError, match=r"kv_memory = 4194303: .* keep of one request, 1048576 bytes"):
        size(kv_bytes=4 * mib - 1)
    assert choose_size(
        CacheConfig(kv_tokens=64), SPEC, device=CPU, ranks=1, context_len=64, max_running=2
    ) == CacheSize(4)
    said = describe_cache(CacheSize(4, 3, 2), 16, replace(SPEC, states=(state,)))
    assert said.endswith("; states of 3 requests and 2 snapshots, 0.00 GiB")


def test_without_attention_states_take_all_of_the_memory_and_pages_none() -> None:
    state = StateSpec(StateKey(0, "recurrent", 0), (2**10, 2**8), torch.float32)  # 1 MiB
    spec = KVSpec((), torch.float32, states=(state,))

    def size(context_len: int, **cache: int) -> CacheSize:
        limits = {"ranks": 1, "context_len": context_len, "max_running": 256}
        return choose_size(CacheConfig(page_size=16, **cache), spec, device=CPU, **limits)

    mib = 2**20
    assert spec.bytes_per_token == spec.num_kv_heads == spec.k_head_dim == 0
    assert size(1024, kv_bytes=64 * mib) == CacheSize(32 * 64, 32, 32)  # as many tokens as all requests may have
    assert size(2**18, kv_bytes=64 * mib) == CacheSize(2**17, 32, 32)  # or 2 million
    assert size(2**22, kv_bytes=64 * mib) == CacheSize(2**18, 32, 32)  # or a context window
    assert size(2**22, kv_tokens=100).num_pages == 7
    with pytest.raises(ModelError, match=r"kv_memory = 2097151: 1/2 of .* keep of one request, 1048576 bytes"):
        size(1024, kv_bytes=2 * mib - 1)


FAULTS = """
import resource, torch
from worker_proc.memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        blocks = [torch.ones(2**20) for _ in range(4)]  # 4 MiB, 1024 pages each
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
first = faults()
keep_freed_memory()
faults()
print(first, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_freed_memory_is_not_fetched_again_from_the_kernel() -> None:
    """In a process of its own: what is freed in a heap that others use is not at its end, and is kept anyway."""
    run = subprocess.run([sys.executable, "-c", FAULTS], cwd=ROOT, capture_output=True, text=True, check=True)
    without, with_it = (int(word) for word in run.stdout.split())
    assert with_it < without / 10, run.stdout


def test_context_window() -> None:
    assert choose_context_len(MODEL, INFO) == 1024
    assert choose_context_len(replace(MODEL, context_len=100), INFO) == 100
    with pytest.raises(ConfigError, match="context-len 1025 is more than the 1024 tokens"):
        choose_context_len(replace(MODEL, context_len=1025), INFO)
    scout = replace(INFO, context_length=10_485_760)
    assert choose_context_len(MODEL, scout) == MAX_BATCH_TOKENS, "no Go could say more"
    with pytest.raises(ConfigError, match="context-len 5000000 is more than the 4194304 tokens that are served"):
        choose_context_len(replace(MODEL, context_len=5_000_000), scout)


def test_dtype() -> None:
    assert choose_dtype(MODEL, INFO) == torch.bfloat16
    assert choose_dtype(replace(MODEL, dtype="float32"), INFO) == torch.float32


def test_models_that_exceed_float16_are_not_computed_in_it(tmp_path: Path) -> None:
    for kind in ("gemma2", "gemma3"):
        info = replace(describe(make_checkpoint(kind, tmp_path / kind)), dtype="float16")
        assert choose_dtype(MODEL, info) == torch.bfloat16
        assert choose_dtype(replace(MODEL, dtype="float32"), info) == torch.float32
        with pytest.raises(ConfigError, match="dtype float16: hidden states of gemma"):
            choose_dtype(replace(MODEL, dtype="float16"), info)
    assert choose_dtype(MODEL, replace(INFO, dtype="float16")) == torch.float16


def test_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert choose_kernels(replace(MODEL, cpu_kernels="torch"), cpu) is None
    assert choose_kernels(MODEL, torch.device("cuda", 0)) is None
    library = choose_kernels(replace(MODEL, cpu_kernels="generic"), cpu)
    if library is not None:  # there is a compiler
        assert library.level == "generic"
        assert isinstance(choose_attention(library, torch.bfloat16, CPU, MODEL), CpuAttention)
    assert isinstance(choose_attention(library, torch.float16, CPU, MODEL), ReferenceAttention)
    assert isinstance(choose_attention(None, torch.bfloat16, CPU, MODEL), ReferenceAttention)
    monkeypatch.setattr("worker_proc.choices.cpu_features", lambda: CpuFeatures("x86_64", frozenset()))
    with pytest.raises(ConfigError, match="cpu-kernels amx: this machine cannot run them"):
        choose_kernels(replace(MODEL, cpu_kernels="amx"), cpu)


def test_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device(replace(MODEL, tp=2), 1) == torch.device("cuda", 1)
    assert choose_device(replace(MODEL, tp=4), 1) == torch.device("cpu")
    assert choose_device(replace(MODEL, device="cpu"), 0) == torch.device("cpu")
    with pytest.raises(ConfigError, match="device cuda: tp 4 needs as many GPUs, this machine shows 2"):
        choose_device(replace(MODEL, tp=4, device="cuda"), 0)


def test_ready_info() -> None:
    info = ready_info(INFO, CacheSize(10), 16, 512, 2048)
    assert info == {
        "num_pages": 10, "page_size": 16, "context_len": 512, "vocab_size": 320, "kv_bytes_per_token": 2048,
        "eos_0": 2, "eos_1": 7,
    }  # fmt: skip


def test_a_small_model_runs_on_one_thread_and_a_large_one_on_its_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker_proc.choices.num_cpus", lambda: 8)
    large = replace(INFO, parameter_bytes=2**30)
    assert choose_threads(MODEL, INFO) == 1
    assert choose_threads(MODEL, large) == 8
    assert choose_threads(replace(MODEL, tp=2), large) == 4
    assert choose_threads(replace(MODEL, tp=16), large) == 1
    assert choose_threads(replace(MODEL, threads=3), INFO) == 3
    assert [share_of_cores(replace(MODEL, tp=ranks)) for ranks in (1, 3, 16)] == [8, 2, 1]
