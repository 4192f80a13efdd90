"""What the native sources use of C++'s library is included by name: which headers bring which others along differs
between versions of compilers, and a source that does not compile costs a machine all of its kernels."""

import re
from functools import cache
from pathlib import Path

import pytest

from worker_proc.cpu.build import SOURCES

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
    "numeric": "accumulate inner_product iota partial_sum reduce",
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
