"""Compiles the native kernels at first start and keeps the library in the user's cache.

The sources are plain C++20 without dependencies, so this takes some seconds. A library is named by hashes of
everything that it depends on: sources, options and CPU, then the compiler. The cache directory must belong to the user
and be closed to others, because what lies in it is loaded into the process.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from common.user_cache import CacheError, cache_directory, check_private, make_private
from worker_proc.cpu.features import CpuFeatures, Level
from worker_proc.cpu.machine import available_memory, num_cpus

SOURCES = Path(__file__).parent / "native"
COMPILERS = ("c++", "g++", "clang++")
PACKAGE = "ziglang"  # from PyPI: Clang with all that it needs, for machines without a compiler
_STANDARD = "-std=c++20"
_OPTIONS = (_STANDARD, "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-pthread",
            "-Wall", "-Wextra")  # fmt: skip
# GCC from 13 on, where no processor is named, multiplies and adds in two steps where loops add to sums, and in one step
# elsewhere: that is slower, and bits would depend on how a loop is cut
_IN_ONE_STEP = "--param=avoid-fma-max-bits=0"
_NEWER = (_IN_ONE_STEP, "-mavxvnni")  # left out with a compiler that does not know them: Clang; GCC 10, Clang 11
_TIMEOUT_S = 240.0
_JOB_BYTES = 5 * 10**8  # what compiling one of the sources takes, and some more
_DAY_S = 86400.0
_KEPT_S = 60 * _DAY_S  # libraries that nobody uses

log = logging.getLogger(__name__)


class BuildError(RuntimeError):
    """The kernels cannot be built here; the text says why."""


def build(
    level: Level, features: CpuFeatures, cache: Path | None = None, sources: Path = SOURCES, *, again: bool = False
) -> Path:
    """The shared library with the kernels of `level`, from the cache or fresh from the compiler; with `again`, what is
    in the cache counts only if it can be loaded.

    Several processes may ask at once: one compiles, the others wait for it. Without a compiler, a library that another
    one made of the same sources will do. Raises BuildError where there is none and nothing in the cache, when the
    compiler refuses the sources, or when the cache cannot be used or is not private to the user.
    """
    try:
        directory = cache if cache is not None else cache_directory("kernels")
        make_private(directory)
        if os.statvfs(directory).f_flag & getattr(os, "ST_NOEXEC", 0):  # before compiling what cannot be loaded
            problem = f"nothing may be executed from {directory} (mounted with noexec); XDG_CACHE_HOME names another"
            raise BuildError(f"the native kernels cannot be kept: {problem}")
        options = (_IN_ONE_STEP, *features.options(level))
        made_of = f"{level}-{_key((*_OPTIONS, *options), features, sources)}"
        try:
            compiler = find_compiler()
        except BuildError:
            if again or (kept := _newest(directory, made_of)) is None:
                raise
            return _used(kept)
        known = [option for option in options if option not in _NEWER or knows(compiler, option)]
        made_by = _digest(*compiler, _version(compiler), *known)
        target = directory / f"{made_of}-{made_by[:8]}.so"
        if again or not target.exists():  # else the directory may be one that can only be read
            with _locked(target.with_suffix(".lock")):
                if not target.exists() or (again and not _loads(target)):
                    # who starts a cluster waits for it, and sees nothing else meanwhile
                    log.warning("compiling the CPU kernels (%s), once: half a minute or more on two cores", level)
                    _compile([*compiler, *_OPTIONS, *known], sources, target)
                    _tidy(directory)
        return _used(target)
    except (CacheError, OSError) as error:
        raise BuildError(f"the native kernels cannot be kept: {error}") from None


def find_compiler() -> tuple[str, ...]:
    """What calls a compiler for C++20: one that is installed, else a package's. Raises BuildError if there is none."""
    for command in _commands():
        if knows(command, _STANDARD):
            return command
    looked = f"looked for {', '.join(COMPILERS)}; the Python package {PACKAGE} has one"
    raise BuildError(f"no C++ compiler is installed that knows C++20 ({looked})")


def _commands() -> Iterator[tuple[str, ...]]:
    for path in map(shutil.which, COMPILERS):
        if path is not None:
            yield (path,)
    spec = importlib.util.find_spec(PACKAGE)
    if spec is not None and spec.origin is not None:
        # without its option it compiles for the processor that is here, whatever the level
        yield str(Path(spec.origin).with_name("zig")), "c++", "-mcpu=baseline"


def knows(compiler: Sequence[str], option: str) -> bool:
    """Whether the compiler takes this option."""
    try:
        _run([*compiler, "-Werror", option, "-E", "-x", "c++", os.devnull])
    except BuildError:
        return False
    return True


def _key(options: tuple[str, ...], features: CpuFeatures, sources: Path) -> str:
    files = (part for path in sorted(sources.iterdir()) for part in (path.name, path.read_bytes()))
    return _digest(*options, features.machine, *sorted(features.flags), *files)


def _digest(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(b"\0" + (part if isinstance(part, bytes) else part.encode()))
    return digest.hexdigest()[:24]


def _version(compiler: Sequence[str]) -> str:
    return _run([*compiler, "--version"]).partition("\n")[0]


def _compile(command: list[str], sources: Path, target: Path) -> None:
    """Compile every source on its own, side by side, and put the linked library in place in one step."""
    files = sorted(sources.glob("*.cpp"))
    with tempfile.TemporaryDirectory(prefix="build-", dir=target.parent) as directory:
        objects = [str(Path(directory) / f"{file.stem}.o") for file in files]
        jobs = [[*command, "-c", str(file), "-o", made] for file, made in zip(files, objects, strict=True)]
        with ThreadPoolExecutor(max(1, min(num_cpus(), available_memory() // _JOB_BYTES))) as pool:
            list(pool.map(_run, jobs))
        linked = Path(directory) / "linked.so"
        _run([*command, "-shared", *objects, "-o", str(linked)])
        linked.chmod(0o700)
        with linked.open("rb") as written:
            os.fsync(written.fileno())  # else the name may outlive a power failure, and the contents not
        linked.replace(target)


def _newest(directory: Path, made_of: str) -> Path | None:
    return max(directory.glob(f"{made_of}-*.so"), key=lambda path: path.stat().st_mtime, default=None)


def _loads(path: Path) -> bool:
    try:
        ctypes.CDLL(str(path))
    except OSError:
        return False
    return True


def _used(path: Path) -> Path:
    """`path`, which nobody else could have written, with a note of its use."""
    check_private(path)
    with contextlib.suppress(OSError):  # the directory may be one that can only be read
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
    return path


def _tidy(directory: Path) -> None:
    """Remove what builds that were cut off left behind, and what has not been used for long."""
    for path in directory.iterdir():
        with contextlib.suppress(OSError):  # another process was faster
            found = path.stat()
            if path.name.startswith("build-") and time.time() - found.st_mtime > _DAY_S:
                shutil.rmtree(path)
            elif path.suffix in (".so", ".lock") and time.time() - max(found.st_atime, found.st_mtime) > _KEPT_S:
                path.unlink()


def _run(command: list[str]) -> str:
    run = partial(subprocess.run, capture_output=True, text=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL)
    try:
        done = run(command)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from None
    if done.returncode:
        raise BuildError(f"{' '.join(command)} failed:\n{done.stderr.strip()[-2000:]}")
    return done.stdout


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)  # the kernel lets go when the process ends, however it ends
        yield
    finally:
        os.close(handle)
