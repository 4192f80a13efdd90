"""Compile every Triton kernel for Hopper, as the shapes of a model use them, without a GPU.

    python -m bench.gpu.compile_kernels --dtype bf16 --dtype fp32

A line per kernel: shared memory in bytes, which matrix instructions it has, whether some of its float32 instructions
are approximations (divisions, powers), whether it takes its turn as worker_proc/cuda/overlap.py wants it, writing
nothing before, and, where the CUDA toolkit's cuobjdump is installed, registers per thread and bytes of stack (spills).
`--smaller` compiles attention over wide heads for GPUs with 99 KiB of shared memory for a program instead, and fails
where that is too little.
"""

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from itertools import product
from typing import Any
from unittest.mock import patch

import click
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from worker_proc.cuda import attention as launches
from worker_proc.cuda import attention_kernels as attention
from worker_proc.cuda import few_rows_kernels as few_rows
from worker_proc.cuda import layer_kernels as layers
from worker_proc.cuda import linear_kernels as linear
from worker_proc.cuda import sampling_kernels as sampling
from worker_proc.cuda.attention import decode_tiles, prefill_tiles, shared_tiles
from worker_proc.cuda.few_rows import SIZES, Cut
from worker_proc.kv_cache import KVCache, KVSpec

HOPPER, SMALLER = GPUTarget("cuda", 90, 32), GPUTarget("cuda", 89, 32)
_SMALLER_BYTES = 99 * 2**10
_FLOATS = {"scale", "softcap", "eps", "attention_factor", "unit", "never"}
_POINTERS = dict.fromkeys(("table_ptr", "lens_ptr", "starts_ptr", "slots_ptr", "positions_ptr"), "*i64")
_POINTERS |= dict.fromkeys(
    ("seeds_ptr", "index_ptr", "tokens_ptr", "skipped_ptr", "levels_ptr", "tiles_ptr"), "*i64"
) | {"params_ptr": "*fp64"}
_POINTERS |= dict.fromkeys(("partial_ptr", "sums_ptr", "frequencies_ptr", "weights_ptr"), "*fp32")
_POINTERS |= dict.fromkeys(("logits_ptr", "best_ptr", "few_ptr"), "*fp32")
_POINTERS |= {"masses_ptr": "*fp64", "ranges_ptr": "*fp64", "names_ptr": "*i32"}
_POINTERS |= dict.fromkeys(
    ("sinks_ptr", "k_scales_ptr", "v_scales_ptr", "scales_ptr", "zeros_ptr", "parts_ptr"), "*fp32"
)
_POINTERS["codes_ptr"] = "*i32"
# multiples of 16, as Triton finds out when it launches a kernel; all pointers are, where it is to look at them
_ALIGNED = {"x_row", "codes_row", "inputs", "outputs", "width", "vocab", "logits_row", "weights_row"}
_ALIGNED |= {"q_row", "q_head", "q_token", "out_row", "out_head", "out_token", "k_token", "k_head", "v_token", "v_head"}
_ALIGNED |= {"k_page_stride", "k_head_stride", "v_page_stride", "v_head_stride"}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_OPTIONS = ("num_warps", "num_stages")


def variants(numbers: str) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Name, kernel, and compile-time constants and options of all that is compiled for `numbers`."""
    shape = {"PAGE": 16, "GROUP": 4, "DIM_K": 128, "DIM_V": 128, "BLOCK_K": 128, "BLOCK_V": 128, "BLOCK_N": 64}
    plain: dict[str, Any] = shape | {"WINDOW": 0, "SOFTCAP": False, "INT8": False}
    narrow = plain | {"PAGE": 1, "GROUP": 1, "DIM_K": 64, "DIM_V": 64, "BLOCK_K": 64, "BLOCK_V": 64}
    limited = plain | {"WINDOW": 4096, "SOFTCAP": True}
    codes = plain | {"INT8": True}
    for name, constants in (("", plain), (" narrow", narrow), (" window, softcap", limited), (" int8", codes)):
        decode, prefill = cuts(constants, numbers)
        yield f"decode{name}", attention.decode_kernel, constants | decode | {"BLOCK_G": 16, "SHARED": False}
        yield f"prefill{name}", attention.prefill_kernel, constants | prefill | {"SINKS": False, "ALIKE": True}
    gpt_oss = plain | {"GROUP": 8, "DIM_K": 64, "DIM_V": 64, "BLOCK_K": 64, "BLOCK_V": 64, "SINKS": True}
    for window in (0, 128):
        _, prefill = cuts(gpt_oss, numbers)
        constants = gpt_oss | prefill | {"WINDOW": window, "ALIKE": False}
        yield f"prefill sinks window={window}", attention.prefill_kernel, constants
    yield "decode, rest of shared", attention.decode_kernel, plain | {"BLOCK_G": 16, "SHARED": True}
    for group in (1, 4, 8):
        together = {"GROUP": group, "BLOCK_G": 16 * group, "MEMBERS": 16}
        yield f"shared group={group}", attention.shared_kernel, plain | together
    yield "shared group=4 int8", attention.shared_kernel, codes | {"GROUP": 4, "BLOCK_G": 64, "MEMBERS": 16}
    for shared, parts in product((False, True), (16, 128)):
        constants = {"DIM_V": 128, "BLOCK_V": 128, "BLOCK_S": parts, "SHARED": shared, "SINKS": False}
        yield f"combine {parts} shared={shared}", attention.combine_kernel, constants
    yield "combine 128 shared, sinks", attention.combine_kernel, constants | {"SINKS": True}
    stored = {key: shape[key] for key in ("PAGE", "DIM_K", "DIM_V", "BLOCK_K", "BLOCK_V")}
    for int8 in (False, True):
        yield f"store int8={int8}", attention.store_kernel, stored | {"INT8": int8}
    for delta in (False, True):
        yield f"add_rms_norm delta={delta}", layers.add_rms_norm_kernel, {"HAS_DELTA": delta, "BLOCK": 4096}
    for norm in (False, True):
        constants = {"PAGE": 16, "DIM": 128, "HALF_BLOCK": 64, "NORM": norm, "INT8": False}
        yield f"rope_store norm={norm}", layers.rope_store_kernel, constants
    yield "rope_store int8", layers.rope_store_kernel, constants | {"INT8": True}
    yield "rope_store kv_heads=1", layers.rope_store_kernel, constants | {"kv_heads": 1}  # a constant then
    few = {"BLOCK_M": 16, "BLOCK_N": 64, "ZEROS": False, "BIAS": False, "EVEN": True, "num_stages": 3}
    many = few | {"BLOCK_M": 128}
    for rows, cut in (("few", few), ("many", many)):
        if rows == "few" or numbers != "fp32":  # which is cut smaller
            for name, codes_of in (
                ("int4", {"BITS": 4, "FLOAT": False, "GROUP": 128}),
                ("int8", {"BITS": 8, "FLOAT": False, "GROUP": 0}),
                ("fp8", {"BITS": 8, "FLOAT": True, "GROUP": 0}),
                ("fp4", {"BITS": 4, "FLOAT": True, "GROUP": 32}),
            ):
                yield f"linear {name} {rows} rows", linear.quantized_linear_kernel, cut | codes_of
    zeros = few | {"BITS": 4, "FLOAT": False, "GROUP": 32, "BLOCK_M": 64, "ZEROS": True, "BIAS": True}
    yield "linear int4 groups of 32", linear.quantized_linear_kernel, zeros
    for bits in (4, 8):
        constants = {"BITS": bits, "FLOAT": False, "GROUP": 0, "ZEROS": False, "BLOCK_N": 64}
        yield f"widen int{bits}", linear.widen_kernel, constants
    yield "linear, parts", linear.sum_parts_kernel, {"BIAS": False, "BLOCK": 1024}
    if numbers != "fp32":  # whose products are cuBLAS's
        kinds = [(1, True), *((rows, False) for rows in SIZES)]
        for (rows, gated), inputs in product(kinds, (1024, 4096)):
            cut = Cut.of(rows, inputs, gated)
            constants = {"BLOCK_N": cut.block_n, "BLOCK_K": cut.block_k, "num_warps": 1, "ROWS": rows}
            constants |= {"BIAS": False, "GATED": gated, "EVEN": True}
            yield f"{rows} rows of {inputs}, gated={gated}", few_rows.few_rows_kernel, constants
    yield "silu_mul", layers.silu_mul_kernel, {"BLOCK": 1024}
    yield "weights of logits", sampling.weights_kernel, {"BLOCK": 2048}
    blocks = {"SUMMED": 2048, "BLOCKS": 128, "ROOM": 4096}
    yield "gather", sampling.gather_kernel, blocks | {"EACH": 8}
    yield "draw", sampling.draw_kernel, blocks | {"SEARCHED": 4096, "num_warps": 16}


def cuts(constants: dict[str, Any], numbers: str) -> tuple[dict[str, int], dict[str, int]]:
    """How a decode and a prefill of such heads are cut, by what the worker goes by."""
    spec = KVSpec.uniform(1, 1, constants["DIM_K"], constants["DIM_V"], _DTYPES[numbers], constants["INT8"])
    cache = KVCache(spec, 1, constants["PAGE"])
    decode, prefill = decode_tiles(cache), prefill_tiles(cache)
    options = [{"BLOCK_N": t.block_n, "num_warps": t.warps, "num_stages": t.stages} for t in (decode, prefill)]
    return options[0], options[1] | {"BLOCK_M": prefill.block_m}


def wide_heads(numbers: str) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """As `variants`, of attention for GPUs with little shared memory."""
    dim = 128 if numbers == "fp32" else 256
    with patch.object(launches, "is_roomy", return_value=False):
        for group, int8 in product((1, 8), (False, True)):
            shape = {"PAGE": 16, "GROUP": group, "DIM_K": dim, "DIM_V": dim, "BLOCK_K": dim, "BLOCK_V": dim}
            constants = shape | {"WINDOW": 0, "SOFTCAP": False, "INT8": int8}
            decode, prefill = cuts(constants, numbers)
            together = shared_tiles(KVCache(KVSpec.uniform(1, 1, dim, dim, _DTYPES[numbers], int8), 1, 16))
            shared = {"BLOCK_N": together.block_n, "num_warps": together.warps, "num_stages": together.stages}
            name = f"group={group} int8={int8}"
            yield f"decode {name}", attention.decode_kernel, constants | decode | {"BLOCK_G": 16, "SHARED": False}
            yield f"prefill {name}", attention.prefill_kernel, constants | prefill | {"SINKS": False, "ALIKE": True}
            yield f"shared {name}", attention.shared_kernel, constants | shared | {"BLOCK_G": 16 * group, "MEMBERS": 16}


def compiled(kernel: Any, constants: dict[str, Any], numbers: str, target: GPUTarget = HOPPER) -> Any:
    """The kernel for tensors of `numbers` ("bf16", "fp16", "fp32"). Raises what Triton or ptxas object to."""
    names = kernel.arg_names
    if "OVERLAP" in names:
        constants = constants | {"OVERLAP": target is HOPPER}
    signature = {name: "constexpr" if name in constants else _type(name, numbers) for name in names}
    if constants.get("INT8"):
        signature |= dict.fromkeys(("k_pages_ptr", "v_pages_ptr"), "*i8")
    values = {(names.index(name),): value for name, value in constants.items() if name in names}
    options = {name: constants[name] for name in _OPTIONS if name in constants}
    specialized = [param for param in kernel.params if not param.do_not_specialize and param.name not in constants]
    aligned = [param.num for param in specialized if param.name in _ALIGNED or param.name.endswith("_ptr")]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    return triton.compile(ASTSource(kernel, signature, values, attributes), target=target, options=options)


def _type(name: str, numbers: str) -> str:
    if name.endswith("_ptr"):
        return _POINTERS.get(name, f"*{numbers}")
    return "fp32" if name in _FLOATS else "i32"


def turn(ptx: str) -> str:
    """Whether a kernel waits for the one before it, once and before it writes anything."""
    before, *after = ptx.split("griddepcontrol.wait")
    early = re.search(r"\b(st|red|atom)\.(\w+\.)*global", before)
    return "-" if not after else "EARLY" if early or len(after) > 1 else "turn"


def resources(cubin: bytes) -> str:
    """Registers and stack as cuobjdump reports them, empty where it is not installed."""
    tool = shutil.which("cuobjdump")
    if tool is None:
        return ""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    return f"{found[1]:>4} registers  stack {found[2]}" if found else ""


@click.command()
@click.option("--dtype", "dtypes", multiple=True, default=("bf16", "fp16", "fp32"), show_default=True)
@click.option("--smaller", is_flag=True, help="For GPUs with 99 KiB of shared memory for a program.")
def main(dtypes: tuple[str, ...], smaller: bool) -> None:
    for numbers in dtypes if smaller else ():
        for name, kernel, constants in wide_heads(numbers):
            taken = compiled(kernel, constants, numbers, SMALLER).metadata.shared
            print(f"{numbers}  {name:<28} shared {taken:>6}", flush=True)
            if taken > _SMALLER_BYTES:
                raise SystemExit(f"{name} takes more than {_SMALLER_BYTES} bytes of shared memory")
    for numbers in () if smaller else dtypes:
        for name, kernel, constants in variants(numbers):
            made = compiled(kernel, constants, numbers)
            unit = "wgmma" if "wgmma" in made.asm["ptx"] else "mma" if "mma.sync" in made.asm["ptx"] else "-"
            rounded = "approx" if re.search(r"\.approx|div\.full", made.asm["ptx"]) else "-"
            usage = resources(made.asm["cubin"])
            about = f"shared {made.metadata.shared:>6}  {unit:<5} {rounded:<6} {turn(made.asm['ptx'])}"
            print(f"{numbers}  {name:<28} {about} {usage}", flush=True)


if __name__ == "__main__":
    main()
