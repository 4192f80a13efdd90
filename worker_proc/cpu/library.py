"""Loads the native kernels and declares the types of their functions."""

import ctypes
import logging
from functools import cache

from worker_proc.cpu.build import BuildError, build
from worker_proc.cpu.features import CpuFeatures, Level, cpu_features

log = logging.getLogger(__name__)

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_SPIN_NS = 50_000

# name: result, arguments
_FUNCTIONS: dict[str, tuple[type | None, list[type]]] = {
    "rhizome_set_threads": (_INT, [_INT, _LONG]),
    "rhizome_alone": (None, [_INT]),
    "rhizome_test_tasks": (None, [_LONG, _POINTER]),
    "rhizome_enable": (_INT, []),
    "rhizome_read": (ctypes.c_uint32, [_POINTER, _LONG]),
    "rhizome_hand_over": (_LONG, [_LONG]),
    "rhizome_multiply": (ctypes.c_double, [_LONG]),
    "rhizome_multiply_bytes": (ctypes.c_double, [_LONG]),
    "rhizome_pack": (None, [_POINTER, _LONG, _POINTER, _LONG, _LONG, _LONG, _INT]),
    "rhizome_compress": (_LONG, [_POINTER, _POINTER, _LONG, _LONG, _LONG, _INT, _POINTER, _LONG]),
    "rhizome_compresses": (_INT, []),
    "rhizome_compresses_well": (_INT, []),
    "rhizome_exact": (_INT, [_INT]),
    "rhizome_knows": (_INT, [_INT]),
    "rhizome_integers": (_INT, []),
    "rhizome_scales_sums": (_INT, [_INT]),
    "rhizome_inflate": (None, [_POINTER, _POINTER]),
    "rhizome_quantize": (None, [_POINTER, _INT, _LONG, _LONG, _LONG, _LONG, _INT, _INT, _POINTER, _POINTER]),
    "rhizome_pack_codes": (None, [_POINTER, _POINTER, _LONG, _LONG, _INT, _LONG, _INT]),
    "rhizome_linear": (None, [_POINTER, _POINTER, _LONG, _LONG, _POINTER, _LONG, _INT]),
    "rhizome_find_largest": (None, [_POINTER, _POINTER, _POINTER, _LONG, _LONG, _POINTER, _POINTER]),
    "rhizome_filtered_outputs": (
        None,
        [_POINTER, _POINTER, _POINTER, _LONG, _LONG, _POINTER, _INT, _POINTER, _LONG],
    ),
    "rhizome_code_errors": (None, [_POINTER, _LONG, _LONG, _LONG, _LONG, _POINTER, _POINTER, _POINTER, _POINTER]),
    "rhizome_experts": (
        None,
        [_POINTER, _POINTER, _LONG, _POINTER, _LONG, _LONG, _POINTER, _POINTER, _LONG, _INT, _POINTER],
    ),
    "rhizome_rms_norm": (None, [_POINTER, _LONG, _LONG, _POINTER, _FLOAT, _POINTER]),
    "rhizome_delta_net": (None, [_POINTER]),
    "rhizome_state_space": (None, [_POINTER]),
    "rhizome_short_conv": (None, [_POINTER]),
    "rhizome_scan_convolve": (None, [_POINTER]),
    "rhizome_selective_scan": (None, [_POINTER]),
    "rhizome_best": (None, [_POINTER, _LONG, _LONG, _LONG, _POINTER, _POINTER]),
    "rhizome_draw": (None, [_POINTER]),
    "rhizome_score": (None, [_POINTER]),
    "rhizome_draw_weights": (None, [_POINTER, _LONG, _FLOAT, _FLOAT, _POINTER]),
    "rhizome_draw_uniform": (ctypes.c_double, [_LONG, _LONG]),
    "rhizome_unpack_rows": (None, [_POINTER, _POINTER, _LONG, _POINTER, _LONG]),
}


class NativeLibrary:
    """The kernels of one level, as `functions.rhizome_...`. Pointers are plain integers (`tensor.data_ptr()`); the
    caller keeps the memory alive and answers for shapes, dtypes and strides."""

    def __init__(self, level: Level, features: CpuFeatures | None = None) -> None:
        """`features` are the CPU's, unless tests leave some out. Raises BuildError where the library cannot be built or
        loaded, or the system does not allow its use."""
        self.level = level
        self.functions = _load(level, features or cpu_features())
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(self.functions, name)
            function.restype, function.argtypes = result, arguments
        if not self.functions.rhizome_enable():
            raise BuildError(f"the system does not let this process use {level} instructions")

    @property
    def compresses(self) -> bool:
        """Whether products with weights in 12 bits are known (`worker_proc.cpu.compressed`)."""
        return bool(self.functions.rhizome_compresses())

    @property
    def compresses_well(self) -> bool:
        """Whether they are fast, as far as is known."""
        return bool(self.functions.rhizome_compresses_well())

    @property
    def integers(self) -> bool:
        """Whether products with int8 and int4 codes are computed in integers (`native/linear_integers.h`)."""
        return bool(self.functions.rhizome_integers())

    def knows(self, format: int) -> bool:
        """Whether a matrix may have this `Format`: all but those in segments are known everywhere."""
        return bool(self.functions.rhizome_knows(format))

    def exact(self, format: int) -> bool:
        """Whether sums of products with a matrix in this `Format` are exact (`in_quads` of
        `native/linear_quantized.h`)."""
        return bool(self.functions.rhizome_exact(format))

    def scales_sums(self, format: int) -> bool:
        """Whether the scales of groups of this `Format` multiply sums of floating point numbers, instead of weights
        that are rounded to bfloat16."""
        return bool(self.functions.rhizome_scales_sums(format))

    def set_threads(self, threads: int) -> int:
        """Use `threads` threads, the caller's included. Returns how many there are. One pool serves the whole
        process."""
        return int(self.functions.rhizome_set_threads(threads, _SPIN_NS))

    def work_alone(self, alone: bool) -> None:
        """Whether the caller computes what comes next without the other threads, until it says otherwise: for so little
        work, waking them costs more than they do."""
        self.functions.rhizome_alone(alone)


def _load(level: Level, features: CpuFeatures) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(build(level, features)))
    except OSError as error:
        log.warning("the native CPU kernels are built once more: %s", error)  # damaged, as by a power failure
    path = build(level, features, again=True)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} cannot be loaded: {error}") from None


@cache
def load_library(level: Level) -> NativeLibrary:
    """The library of a level, loaded once. Raises BuildError."""
    return NativeLibrary(level)


def best_library(wanted: Level | None = None) -> NativeLibrary | None:
    """The library of the level that is `wanted`, or of the best that works; None, with a warning, if none does."""
    failed: list[str] = []
    for level in (wanted,) if wanted is not None else cpu_features().levels():
        try:
            library = load_library(level)
        except BuildError as error:
            failed.append(str(error))
            continue
        if failed:
            log.warning("CPU kernels of a lesser processor (%s) are used, which are slower: %s", level, failed[0])
        return library
    log.warning("the native CPU kernels are not available, torch computes instead and is slower: %s", failed[0])
    return None
