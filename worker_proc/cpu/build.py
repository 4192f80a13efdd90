"""Compiles the native kernels at first start and keeps the library in the user's cache.

The sources are plain C++20 without dependencies, so this takes some seconds. A library is named by a hash of
everything that it depends on: sources, options, compiler, CPU. The cache directory must belong to the user and be
closed to others, because what lies in it is loaded into the process.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from common.user_cache import CacheError, cache_directory, check_private, make_private
from worker_proc.cpu.features import CpuFeatures, Level

SOURCES = Path(__file__).parent / "native"
COMPILERS = ("c++", "g++", "clang++")
_OPTIONS = ("-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-pthread",
            "-Wall", "-Wextra")  # fmt: skip
_NEWER = ("-mavxvnni",)  # left out with a compiler that does not know them: GCC before 11, Clang before 12
_TIMEOUT_S = 120.0


class BuildError(RuntimeError):
    """The kernels cannot be built here; the text says why."""


def build(level: Level, features: CpuFeatures, cache: Path | None = None, sources: Path = SOURCES) -> Path:
    """The shared library with the kernels of `level`, from the cache or fresh from the compiler.

    Several processes may ask at once: one compiles, the others wait for it. Raises BuildError without a compiler, when
    it refuses the sources, or when the cache directory is not private to the user.
    """
    compiler = find_compiler()
    options = [option for option in features.options(level) if option not in _NEWER or knows(compiler, option)]
    command = [compiler, *_OPTIONS, *options]
    directory = cache if cache is not None else cache_directory("kernels")
    target = directory / f"{level}-{_key(command, features, sources)}.so"
    try:
        make_private(directory)
        with _locked(target.with_suffix(".lock")):
            if not target.exists():
                _compile(command, sources, target)
        check_private(target)
    except CacheError as error:
        raise BuildError(str(error)) from None
    return target


def find_compiler() -> str:
    """The path of a C++ compiler. Raises BuildError if there is none."""
    for name in COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return path
    raise BuildError(f"no C++ compiler is installed (looked for {', '.join(COMPILERS)})")


def knows(compiler: str, option: str) -> bool:
    """Whether the compiler takes this option."""
    try:
        _run([compiler, "-Werror", option, "-E", "-x", "c++", os.devnull])
    except BuildError:
        return False
    return True


def _key(command: list[str], features: CpuFeatures, sources: Path) -> str:
    parts = [*command, _version(command[0]), features.machine, *sorted(features.flags)]
    digest = hashlib.sha256("\0".join(parts).encode())
    for path in sorted(sources.iterdir()):
        digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:24]


def _version(compiler: str) -> str:
    return _run([compiler, "--version"]).splitlines()[0]


def _compile(command: list[str], sources: Path, target: Path) -> None:
    """Compile every source on its own, side by side, and put the linked library in place in one step."""
    files = sorted(sources.glob("*.cpp"))
    with tempfile.TemporaryDirectory(prefix="build-", dir=target.parent) as directory:
        objects = [str(Path(directory) / f"{file.stem}.o") for file in files]
        jobs = [[*command, "-c", str(file), "-o", made] for file, made in zip(files, objects, strict=True)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, jobs))
        linked = Path(directory) / "linked.so"
        _run([*command, "-shared", *objects, "-o", str(linked)])
        linked.chmod(0o700)
        linked.replace(target)


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
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise BuildError(f"{path} cannot be opened: {error}") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)  # the kernel lets go when the process ends, however it ends
        yield
    finally:
        os.close(handle)
