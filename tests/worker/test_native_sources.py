"""The native sources as compilers take them, whichever is there.

What they use of C++'s library is included by name: which headers bring which others along differs between versions of
compilers, and a source that does not compile costs a machine all of its kernels.
"""

import os
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.worker.test_cpu_build import needs_compiler
from worker_proc.cpu import build as build_module
from worker_proc.cpu.build import SOURCES, find_compiler, knows
from worker_proc.cpu.features import CpuFeatures, cpu_features

FILES = sorted(path for path in SOURCES.iterdir() if path.suffix in (".cpp", ".h"))
NAMES = {
    "algorithm": "all_of any_of clamp copy copy_n equal fill fill_n find find_if generate lexicographical_compare"
    " lower_bound max max_element min min_element minmax nth_element partial_sort partition reverse rotate"
    " sort stable_sort swap_ranges transform unique upper_bound",
    "array": "array",
    "atomic": "atomic atomic_ref memory_order_acq_rel memory_order_acquire memory_order_relaxed memory_order_release"
    " memory_order_seq_cst atomic_thread_fence",
    "bit": "bit_cast bit_ceil bit_floor bit_width countl_zero countr_zero popcount",
    "chrono": "chrono",
    "cmath": "abs ceil cos exp exp2 expm1 floor fma isfinite isinf isnan lround log log1p log2 nearbyint pow round sin"
    " sqrt tanh",
    "condition_variable": "condition_variable",
    "cstdlib": "abort free malloc",
    "cstring": "memcmp memcpy memmove memset",
    "functional": "function greater less",
    "iterator": "back_inserter begin distance end next prev size",
    "limits": "numeric_limits",
    "memory": "make_unique shared_ptr unique_ptr",
    "mutex": "lock_guard mutex scoped_lock unique_lock",
    "new": "align_val_t bad_alloc nothrow",
    "numeric": "accumulate inner_product iota lcm partial_sum reduce",
    "optional": "nullopt optional",
    "span": "span",
    "string": "string to_string",
    "thread": "jthread thread this_thread",
    "tuple": "tie tuple",
    "type_traits": "bool_constant conditional_t decay_t enable_if_t false_type integral_constant is_same_v"
    " remove_cvref_t remove_reference_t true_type",
    "utility": "exchange forward index_sequence integer_sequence make_index_sequence make_integer_sequence move pair"
    " swap",
    "vector": "erase_if vector",
}
HEADER_OF = {name: header for header, names in NAMES.items() for name in names.split()}


@cache
def included(path: Path) -> frozenset[str]:
    """The standard headers that a file includes, by itself or through files beside it."""
    text = path.read_text()
    found = set(re.findall(r"#include <([a-z_]+)>", text))
    for name in re.findall(r'#include "([a-z0-9_]+\.h)"', text):
        found |= included(SOURCES / name)
    return frozenset(found)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_headers_are_included_for_what_is_used(path: Path) -> None:
    code = re.sub(r"//[^\n]*", "", path.read_text())
    names = set(re.findall(r"std::([a-z_0-9]+)", code))
    assert names <= HEADER_OF.keys(), f"say in which headers these are: {names - HEADER_OF.keys()}"
    needed = {HEADER_OF[name] for name in names}
    if re.search(r"\bu?int(8|16|32|64|ptr)_t\b", code):
        needed.add("cstdint")
    assert needed <= included(path)


@needs_compiler
@pytest.mark.skipif("avx2" not in cpu_features().flags, reason="options for x86")
@pytest.mark.parametrize("flags", [("avx2",), ("avx2", "f16c"), ("avx2", "avx_vnni")], ids=" ".join)
def test_sources_compile_for_avx2_without_fma(flags: tuple[str, ...]) -> None:
    """As some emulators and virtual machines have it. Without optimization, intrinsics are looked up all the same."""
    compiler = find_compiler()
    options = [one for one in CpuFeatures("x86_64", frozenset(flags)).options("generic") if knows(compiler, one)]
    command = [*compiler, "-std=c++20", "-O0", "-w", *options, "-c", "-o", os.devnull]
    done = subprocess.run([*command, str(SOURCES / "linear_panels.cpp")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@needs_compiler
@pytest.mark.parametrize("flags", [(), ("avx2",), ("avx2", "f16c")], ids=str)
def test_every_number_of_float16_is_read_as_it_is(flags: tuple[str, ...], tmp_path: Path) -> None:
    """With instructions for it and without; not all compilers know a type for it."""
    if not cpu_features().flags.issuperset(flags):
        pytest.skip("needs a processor with these instructions")
    compiler, program = find_compiler(), tmp_path / "float16.cpp"
    program.write_text("""
#include <cstdio>
#include "scale_forms.h"
int main() {
  for (unsigned first = 0; first < 65536; first += rhizome::kLanes) {
    uint16_t halves[rhizome::kLanes];
    for (int i = 0; i < rhizome::kLanes; ++i) halves[i] = static_cast<uint16_t>(first + i);
    const rhizome::floats read = rhizome::load_float16(reinterpret_cast<const uint8_t*>(halves));
    std::fwrite(&read, sizeof read, 1, stdout);
  }
}
""")
    options = CpuFeatures("x86_64", frozenset(flags)).options("generic")
    command = [*compiler, "-std=c++20", "-O2", "-w", *options, f"-I{SOURCES}", str(program), "-o"]
    subprocess.run([*command, str(tmp_path / "float16")], check=True)
    numbers = subprocess.run([str(tmp_path / "float16")], capture_output=True, check=True).stdout
    found = torch.frombuffer(bytearray(numbers), dtype=torch.float32)
    wanted = torch.arange(65536).to(torch.uint16).view(torch.float16).float()
    assert torch.equal(found.signbit(), wanted.signbit()) and found.allclose(wanted, 0, 0, equal_nan=True)


@needs_compiler
def test_a_vector_is_held_at_any_address(tmp_path: Path) -> None:
    """Numbers lie where they lie: a reference to the plain vector type made an unoptimized program end here."""
    compiler, program = find_compiler(), tmp_path / "held.cpp"
    program.write_text("""
#include "bf16.h"
#include "registers.h"
int main() {
  alignas(64) float numbers[1 + rhizome::kLanes] = {};
  rhizome::floats& odd = *reinterpret_cast<rhizome::floats*>(numbers + 1);
  odd = rhizome::held(odd);
}
""")
    options = [option for option in cpu_features().options("generic") if knows(compiler, option)]
    command = [*compiler, "-std=c++20", "-O0", *options, f"-I{SOURCES}", str(program), "-o"]
    subprocess.run([*command, str(tmp_path / "held")], check=True)
    subprocess.run([str(tmp_path / "held")], check=True)


@needs_compiler
@pytest.mark.skipif("fma" not in cpu_features().flags, reason="options for x86")
def test_sums_in_loops_are_rounded_once_on_every_processor(tmp_path: Path) -> None:
    """GCC would not for some, and from 13 on for those that it knows nothing of."""
    source, made = tmp_path / "sum.cpp", tmp_path / "sum.s"
    source.write_text("float sum(const float* a, const float* b, long n) {\n"
                      "  float s = 0;\n  for (long i = 0; i < n; ++i) s += a[i] * b[i];\n  return s;\n}\n")  # fmt: skip
    compiler = find_compiler()
    command = [*compiler, "-O2", "-mfma", "-mtune=znver3", str(source), "-S", "-o", str(made)]
    option = build_module._IN_ONE_STEP
    known = [option] if knows(compiler, option) else []
    subprocess.run([*command, *known], check=True)
    assert "vfmadd" in made.read_text()
    if known:
        subprocess.run(command, check=True)
        assert "vfmadd" not in made.read_text(), "or this says nothing"
