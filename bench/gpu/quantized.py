"""Quantized weights on the GPU: errors beside torch, the products of an 8B Llama's layers, and its decode steps.

    python -m bench.gpu.quantized [--small]

Errors are norms of differences over norms of the product in float32 with the widened weights: below 1e-2 in bfloat16,
1e-5 in float32. Times of products are those of four layers in one CUDA graph, more than the caches hold, divided by
four. Their floor is the bytes of the weights over the copy bandwidth or the products over the matrix rate, whichever
takes longer, both measured in the same run; beside them stand cuBLAS's with bfloat16 weights.
"""

import sys
from collections.abc import Callable

import click
import torch
import torch.nn.functional as F

from bench.gpu.limits import Limits, measure, seconds
from bench.gpu.shapes import CONFIGS, in_codes, make_model, random_matrix
from bench.gpu.worker import decode
from worker_proc.cuda.quantized import PackedWeight
from worker_proc.models.layers import Linear
from worker_proc.quantization.rows import QuantizedRows
from worker_proc.quantization.scheme import FP8, MXFP4, Scheme

BOUNDS = {torch.bfloat16: 1e-2, torch.float32: 1e-5}
CHECKED = [
    Scheme(8), Scheme(8, 64, symmetric=False), Scheme(4, 128), Scheme(4, 32, symmetric=False), FP8,
    Scheme(8, 128, floating=True), MXFP4,
]  # fmt: skip
TIMED = [Scheme(8), Scheme(4, 128), FP8]
ROWS = (1, 16, 64, 256, 4096)
LAYERS = 4


def check(scheme: Scheme, rows: int, dtype: torch.dtype) -> bool:
    """Whether a product of an odd shape is right, with scales and zeros of all kinds."""
    outputs, inputs = 1100, 2080
    codes = torch.randint(0, 2**scheme.bits, (outputs, inputs), dtype=torch.uint8, device="cuda")
    codes = torch.where((codes & 127) == 127, codes - 60, codes) if scheme.floating else codes  # no NaN
    groups = scheme.num_groups(inputs)
    scales = torch.randn(outputs, groups, device="cuda")
    zeros = None if scheme.symmetric else torch.randint(0, 2**scheme.bits, scales.shape, device="cuda").float()
    held = QuantizedRows(scheme, codes, scales, zeros)
    weight = PackedWeight.empty(outputs, inputs, scheme, dtype, torch.device("cuda"))
    weight.put(0, held)
    x, bias = torch.randn(rows, inputs, device="cuda").to(dtype), torch.randn(outputs, device="cuda").to(dtype)
    want = F.linear(x.double(), held.dequantize(torch.float64), bias.double())
    error = float((weight.linear(x, bias).double() - want).norm() / want.norm())
    wrong = not error < BOUNDS[dtype]
    zero = "" if scheme.symmetric else ", zeros"
    print(f"{f'{scheme}{zero}, {rows} rows, {dtype}':<52} error {error:.1e}{' WRONG' * wrong}", flush=True)
    return not wrong


def graph(step: Callable[[], object]) -> Callable[[], None]:
    """`step`, replayed: launches cost the host more than the products take."""
    step()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        step()
    return captured.replay


def shapes() -> list[tuple[int, int]]:
    """Outputs and inputs of the four products of a layer."""
    config = CONFIGS["llama-8b"]
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    return [(hidden + 2 * kv, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)]


def time_products(limits: Limits) -> None:
    plain = [random_matrix(*shape) for _ in range(LAYERS) for shape in shapes()]
    variants = {"bfloat16, cuBLAS": [Linear(weight, None) for weight in plain]}
    for scheme in TIMED:
        variants[str(scheme)] = [Linear(in_codes(weight, scheme), None) for weight in plain]
    numbers = sum(weight.numel() for weight in plain)
    for rows in ROWS:
        inputs = [torch.randn(rows, weight.shape[1], dtype=torch.bfloat16, device="cuda") for weight in plain]
        for name, linears in variants.items():

            def step(linears: list[Linear] = linears, inputs: list[torch.Tensor] = inputs) -> None:
                for linear, x in zip(linears, inputs, strict=True):
                    linear(x)

            taken = seconds(graph(step), repeats=10) / LAYERS
            read = sum(linear.weight.nbytes for linear in linears) / limits.bandwidth
            floor = max(read, 2 * rows * numbers / limits.matrix_rate) / LAYERS
            line = f"{rows:>5} rows, {name:<26} {taken * 1e6:8.1f} us a layer, floor {floor * 1e6:8.1f} us"
            print(f"{line} = {floor / taken:4.0%}", flush=True)


@click.command()
@click.option("--small", is_flag=True, help="Errors only, for slow tools.")
@torch.inference_mode()
def main(small: bool) -> None:
    torch.manual_seed(0)
    right = [check(scheme, rows, torch.bfloat16) for scheme in CHECKED for rows in (1, 30, 300, 600)]
    right += [check(scheme, 30, torch.float32) for scheme in CHECKED]
    if not small:
        limits = measure()
        time_products(limits)
        torch.cuda.empty_cache()
        print("llama-8b, int4 in groups of 128, int8 KV cache")
        right.append(decode(make_model("llama-8b", Scheme(4, 128)), [1, 64], limits, int8_kv=True))
    sys.exit(not all(right))


if __name__ == "__main__":
    main()
