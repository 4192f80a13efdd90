"""Clusters with quantized weights and KV: the same tokens as the models in this process have."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common.sampling_params import SamplingParams
from tests.helpers_models import VOCAB_SIZE, make_checkpoint
from tests.helpers_native import COMPRESSING
from tests.helpers_paged import generate, make_prompts
from tests.helpers_quantized import quantize_checkpoint, store_bytes, store_mxfp4
from tests.integration.cluster import ROOT, Cluster, running
from tests.integration.test_cluster import GREEDY, collect, crowd
from tests.worker.test_cpu_build import needs_compiler
from worker_proc.attention.reference import ReferenceAttention
from worker_proc.models.registry import load_model
from worker_proc.parallel import TensorParallel
from worker_proc.quantization.scheme import FP8, Scheme

NEW_TOKENS = 20
PROMPTS = make_prompts(VOCAB_SIZE)
FLAGS = ("--tp", "2", "--kv-dtype", "int8", "--chunk-tokens", "16")


def answers(cluster: Cluster) -> list[list[int]]:
    """All prompts at once, and once more when their prefixes are cached: the same tokens both times."""
    params = SamplingParams(max_tokens=NEW_TOKENS, **GREEDY)
    rounds = []
    with cluster.connect() as connection:
        for _ in range(2):
            rids = [connection.submit(prompt, params) for prompt in PROMPTS]
            found = collect(connection, rids)
            rounds.append([found[rid].token_ids for rid in rids])
    assert rounds[0] == rounds[1]
    return rounds[0]


def in_process(path: Path, scheme: Scheme | None) -> list[list[int]]:
    """The reference: dequantized weights and KV in float32, one rank."""
    tp, attention = TensorParallel(), ReferenceAttention()
    model = load_model(path, dtype=torch.float32, device="cpu", tp=tp, attention=attention, quantization=scheme)
    return generate(model, PROMPTS, NEW_TOKENS, int8=True)


def two_ranks(path: Path, directory: Path, group: int) -> list[list[int]]:
    """Two ranks without a cluster, on the native kernels; with `group` 0, weights as they are stored."""
    outs = [directory / f"rank{rank}.json" for rank in range(2)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.helpers_quantized_rank", str(rank), str(directory / "store"), str(out),
             str(path), str(group), json.dumps(PROMPTS), str(NEW_TOKENS)],
            cwd=ROOT,
        )
        for rank, out in enumerate(outs)
    ]  # fmt: skip
    try:
        assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    first, second = (json.loads(out.read_text()) for out in outs)
    assert first == second
    return first


def test_int4_weights_and_int8_kv_over_two_ranks(tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path / "model", intermediate_size=128)
    int4 = ("--quantization", "int4", "--quantization-group-size", "32")
    with running(path, *FLAGS, *int4, "--dtype", "float32") as cluster:
        assert cluster.info["model"]["quantization"] == "int4, groups of 32"
        assert cluster.info["model"]["kv_cache_dtype"] == "int8"
        assert answers(cluster) == in_process(path, Scheme(4, 32))
    with running(path, *FLAGS, *int4, "--dtype", "bfloat16") as cluster:
        assert answers(cluster) == two_ranks(path, tmp_path, 32)


@pytest.mark.parametrize(
    "quantization",
    ["int8", pytest.param("w8a8", marks=needs_compiler), pytest.param("w4a8, groups of 32", marks=needs_compiler)],
)
def test_preempted_requests_have_the_tokens_that_they_have_alone(quantization: str, tmp_path: Path) -> None:
    """Their int8 pages are shared, copied, evicted and computed again."""
    path = make_checkpoint("llama", tmp_path / "model")
    prompts, _ = crowd(300)
    params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=60, ignore_eos=True) for i in range(32)]
    batch = ("--max-batch-tokens", "64", "--chunk-tokens", "16", "--max-running", "32", "--page-size", "4")
    outputs = {}
    for name, tokens in (("roomy", "8192"), ("tight", "320")):
        method, _, groups = quantization.partition(", groups of ")
        flags = (
            "--quantization",
            method,
            *(("--quantization-group-size", groups) if groups else ()),
            "--kv-cache-dtype",
            "int8",
            "--dtype",
            "bfloat16",
            "--kv-tokens",
            tokens,
        )
        with running(path, *batch, *flags) as cluster, cluster.connect() as connection:
            rids = [connection.submit(prompt, param) for prompt, param in zip(prompts, params, strict=True)]
            found = collect(connection, rids)
            outputs[name] = [found[rid].token_ids for rid in rids]
            assert (connection.stats()["scheduler.preempted"] > 0) == (name == "tight")
            assert cluster.info["model"]["quantization"] == quantization
    assert outputs["tight"] == outputs["roomy"]


def test_a_gptq_checkpoint_over_two_ranks(tmp_path: Path) -> None:
    source = make_checkpoint("llama-gqa-untied", tmp_path / "source", intermediate_size=128)
    codes, plain = quantize_checkpoint(source, tmp_path, "gptq", Scheme(4, 32, symmetric=False))
    del plain
    with running(codes, *FLAGS, "--dtype", "float32") as cluster:
        assert cluster.info["model"]["quantization"] == "gptq"
        assert answers(cluster) == in_process(codes, None)


def test_an_fp8_checkpoint_over_two_ranks(tmp_path: Path) -> None:
    """Blocks of outputs and inputs, as DeepSeek and Qwen publish them; then plain weights that become FP8."""
    source = make_checkpoint("qwen3", tmp_path / "source", intermediate_size=128)
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
    codes, plain = store_bytes(source, tmp_path, config, (32, 32), "weight_scale_inv")
    del plain
    with running(codes, *FLAGS, "--dtype", "float32") as cluster:
        assert cluster.info["model"]["quantization"] == "fp8"
        assert answers(cluster) == in_process(codes, None)
    with running(source, *FLAGS, "--dtype", "float32", "-q", "fp8") as cluster:
        assert cluster.info["model"]["quantization"] == "fp8"
        assert answers(cluster) == in_process(source, FP8)


def test_a_gpt_oss_over_two_ranks(tmp_path: Path) -> None:
    """Experts in MXFP4, of which each rank has half of the channels; windows, and sinks in every softmax."""
    source = make_checkpoint("gpt-oss", tmp_path / "source", intermediate_size=128)
    codes, plain = store_mxfp4(source, tmp_path)
    del plain
    with running(codes, *FLAGS, "--dtype", "float32") as cluster:
        assert cluster.info["model"]["quantization"] == "mxfp4"
        assert answers(cluster) == in_process(codes, None)
    with running(codes, *FLAGS, "--dtype", "bfloat16") as cluster:
        assert answers(cluster) == two_ranks(codes, tmp_path, 0)


@pytest.mark.skipif(not COMPRESSING, reason="compressed weights need vectors")
def test_weights_in_12_bits_give_the_same_answers() -> None:
    """Greedy and sampled, whole and in chunks, over two ranks."""
    prompts, _ = crowd(300)
    params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=20, ignore_eos=True) for i in range(32)]
    outputs = []
    for compression in ("off", "on"):
        flags = ("--weight-compression", compression, "--dtype", "bfloat16", "--tp", "2", "--chunk-tokens", "48")
        more = ("--kv-tokens", "8192", "--log-level", "info")
        with running(ROOT / "demo_model", *flags, *more) as cluster, cluster.connect() as connection:
            rids = [connection.submit(prompt, param) for prompt, param in zip(prompts, params, strict=True)]
            found = collect(connection, rids)
            outputs.append([found[rid].token_ids for rid in rids])
            said = f"{5 * 4 + 1} of {5 * 4 + 1} matrices are in 12 bits"
            assert (said in cluster.log) == (compression == "on")
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("kind", "quantization", "reason"),
    [
        ("vaultgemma", "int4", "vaultgemma runs through transformers"),
        ("llama", "w8a8", "activations are rounded by the native CPU kernels alone"),
        ("llama", "w4a8", "activations are rounded by the native CPU kernels alone"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(
    kind: str, quantization: str, reason: str, tmp_path: Path
) -> None:
    path = make_checkpoint(kind, tmp_path / "model")
    with Cluster(path, "--quantization", quantization, "--dtype", "float32") as cluster:
        assert cluster.process.wait(120) == 1
        assert f"quantization = '{quantization}': {reason}" in cluster.log
