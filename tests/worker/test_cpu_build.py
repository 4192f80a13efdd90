"""Building, caching and loading the native kernels, and their thread pool."""

import errno
import os
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.user_cache import CacheError, cache_directory
from worker_proc.cpu import build as build_module
from worker_proc.cpu import library
from worker_proc.cpu.build import BuildError, build, find_compiler, knows
from worker_proc.cpu.features import CpuFeatures, cpu_features
from worker_proc.cpu.library import NativeLibrary, best_library, load_library

ROOT = Path(__file__).resolve().parents[2]
TINY = '#include "abi.h"\nRHIZOME_EXPORT int answer() { return 42; }\n'


def have_compiler() -> bool:
    try:
        find_compiler()
    except BuildError:
        return False
    return True


needs_compiler = pytest.mark.skipif(not have_compiler(), reason="no C++ compiler")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    directory = tmp_path / "sources"
    directory.mkdir()
    (directory / "abi.h").write_text((build_module.SOURCES / "abi.h").read_text())
    (directory / "tiny.cpp").write_text(TINY)
    return directory


@needs_compiler
def test_a_library_is_built_once_and_again_when_anything_changes(
    sources: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    first = build("generic", cpu_features(), cache, sources)
    assert len(caplog.records) == 1 and "(generic), once" in caplog.text
    caplog.clear()
    made = first.stat().st_mtime_ns
    assert build("generic", cpu_features(), cache, sources) == first and first.stat().st_mtime_ns == made
    assert not caplog.records, "nobody waits for a compiler"
    (sources / "tiny.cpp").write_text(TINY.replace("42", "43"))
    assert build("generic", cpu_features(), cache, sources) != first
    other = CpuFeatures("other", frozenset())
    assert build("generic", other, cache, sources).name != first.name
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert not [path for path in cache.iterdir() if path.name.startswith("build-")], "nothing half-made stays"


@needs_compiler
def test_a_compiler_error_is_told_with_its_text(sources: Path, tmp_path: Path) -> None:
    (sources / "tiny.cpp").write_text("int broken( {\n")
    with pytest.raises(BuildError, match=r"(?s)failed:.*error"):
        build("generic", cpu_features(), tmp_path / "cache", sources)
    assert not list((tmp_path / "cache").glob("*.so"))


@needs_compiler
@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_cache_that_others_can_write_is_refused(mode: int, sources: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(mode)
    with pytest.raises(BuildError, match="writable by nobody else"):
        build("generic", cpu_features(), cache, sources)


@needs_compiler
def test_a_cache_that_is_a_link_or_a_library_that_others_can_write_is_refused(sources: Path, tmp_path: Path) -> None:
    made = build("generic", cpu_features(), tmp_path / "cache", sources)
    (tmp_path / "link").symlink_to(tmp_path / "cache")
    with pytest.raises(BuildError, match="must belong to the user"):
        build("generic", cpu_features(), tmp_path / "link", sources)
    made.chmod(0o777)
    with pytest.raises(BuildError, match="must belong to the user"):
        build("generic", cpu_features(), tmp_path / "cache", sources)


def test_a_cache_that_cannot_be_made_is_named(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "COMPILERS", (sys.executable,))
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="cannot be made"):
        build("generic", cpu_features(), tmp_path / "file" / "cache", sources)


def test_a_cache_from_which_nothing_can_be_executed_is_named_before_anything_is_compiled(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted = os.statvfs(tmp_path)
    flags = mounted.f_flag | os.ST_NOEXEC
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((*mounted[:8], flags, *mounted[9:])))
    with pytest.raises(BuildError, match=r"noexec.*XDG_CACHE_HOME"):
        build("generic", cpu_features(), tmp_path / "cache", sources)
    assert not list((tmp_path / "cache").iterdir())


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "COMPILERS", ("no-such-compiler",))
    monkeypatch.setattr(build_module, "PACKAGE", "no_such_package")


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_there_is_one_warning_and_no_library(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load_library.cache_clear()
    assert best_library() is None
    assert len(caplog.records) == 1 and "no C++ compiler" in caplog.text


def test_the_cache_is_where_the_desktop_standard_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory("kernels") == tmp_path / "rhizome" / "kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory("kernels") == tmp_path / ".cache" / "rhizome" / "kernels"


def test_without_a_home_there_is_one_warning_and_no_library(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    with pytest.raises(CacheError, match="home directory"):
        cache_directory("kernels")
    load_library.cache_clear()
    assert best_library() is None
    assert len(caplog.records) == 1 and "home directory" in caplog.text


@needs_compiler
@pytest.mark.parametrize("fails", ["fcntl.flock", "tempfile.TemporaryDirectory"])
def test_what_the_system_refuses_is_told(
    fails: str, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fails, refused)
    with pytest.raises(BuildError, match="No space left"):
        build("generic", cpu_features(), tmp_path / "cache", sources)


@needs_compiler
def test_a_library_is_used_where_the_cache_can_only_be_read(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = build("generic", cpu_features(), tmp_path / "cache", sources)

    def read_only(*_: object, **__: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "open", read_only)
    monkeypatch.setattr(os, "utime", read_only)
    assert build("generic", cpu_features(), tmp_path / "cache", sources) == made


@needs_compiler
def test_a_library_is_used_where_its_compiler_is_not_installed(
    sources: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    made = build("generic", cpu_features(), tmp_path / "cache", sources)
    request.getfixturevalue("no_compiler")
    assert build("generic", cpu_features(), tmp_path / "cache", sources) == made
    with pytest.raises(BuildError, match=r"no C\+\+ compiler"):
        build("generic", CpuFeatures("other", frozenset()), tmp_path / "cache", sources)
    made.chmod(0o777)
    with pytest.raises(BuildError, match="must belong to the user"):
        build("generic", cpu_features(), tmp_path / "cache", sources)


@needs_compiler
def test_a_damaged_library_is_built_once_more(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = build("generic", cpu_features(), tmp_path / "cache", sources)
    whole = made.stat().st_size
    made.write_bytes(b"")
    monkeypatch.setattr(
        library, "build", lambda level, features, **how: build(level, features, tmp_path / "cache", sources, **how)
    )
    assert library._load("generic", cpu_features()).answer() == 42
    assert made.stat().st_size == whole and "built once more" in caplog.text
    at = made.stat().st_ino
    assert build("generic", cpu_features(), tmp_path / "cache", sources, again=True).stat().st_ino == at, "it loads"


@needs_compiler
def test_a_library_is_on_the_disk_before_it_has_its_name(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync, replace = os.fsync, Path.replace

    def synced(handle: int) -> None:
        done.append(f"fsync {Path(f'/proc/self/fd/{handle}').readlink().name}")
        sync(handle)

    def replaced(path: Path, target: Path) -> Path:
        done.append(f"replace {path.name}")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    build("generic", cpu_features(), tmp_path / "cache", sources)
    assert done == ["fsync linked.so", "replace linked.so"]


@needs_compiler
def test_a_compiler_that_is_too_old_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = Path(find_compiler()[0]).resolve()
    old = tmp_path / "old"
    old.write_text("#!/bin/sh\necho \"unrecognized command-line option '-std=c++20'\" >&2\nexit 1\n")
    old.chmod(0o700)
    monkeypatch.setattr(build_module, "COMPILERS", (str(old), str(good)))
    assert find_compiler() == (str(good),)
    monkeypatch.setattr(build_module, "COMPILERS", (str(old),))
    monkeypatch.setattr(build_module, "PACKAGE", "no_such_package")
    with pytest.raises(BuildError, match=r"knows C\+\+20"):
        find_compiler()


@needs_compiler
def test_a_package_has_a_compiler_where_none_is_installed(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for ziglang's, which takes the same arguments: a command of its own, and the kind of processor."""
    compiler, zig = " ".join(find_compiler()), tmp_path / "ziglang" / "zig"
    zig.parent.mkdir()
    (zig.parent / "__init__.py").touch()
    zig.write_text(f'#!/bin/sh\n[ "$1 $2" = "c++ -mcpu=baseline" ] || exit 1\nshift 2\nexec {compiler} "$@"\n')
    zig.chmod(0o700)
    monkeypatch.setattr(build_module, "COMPILERS", ("no-such-compiler",))
    monkeypatch.syspath_prepend(tmp_path)
    assert find_compiler() == (str(zig), "c++", "-mcpu=baseline")
    assert build("generic", cpu_features(), tmp_path / "cache", sources).is_file()


def test_kernels_of_a_lesser_processor_are_used_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load(level: str) -> object:
        if level == "avx512":
            raise BuildError("an intrinsic is missing")
        return level

    avx512 = frozenset({"avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"})
    monkeypatch.setattr(library, "cpu_features", lambda: CpuFeatures("x86_64", avx512))
    monkeypatch.setattr(library, "load_library", load)
    assert best_library() == "generic"  # type: ignore[comparison-overlap]
    assert len(caplog.records) == 1 and "(generic)" in caplog.text and "an intrinsic is missing" in caplog.text


@needs_compiler
@pytest.mark.parametrize(("cpus", "memory", "jobs"), [(3, 2**40, 3), (8, 12 * 10**8, 2), (8, 10**6, 1)])
def test_compilers_run_on_the_cpus_and_in_the_memory_that_there_are(
    cpus: int, memory: int, jobs: int, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[int] = []
    pool = build_module.ThreadPoolExecutor

    def noted(workers: int) -> ThreadPoolExecutor:
        pools.append(workers)
        return pool(workers)

    monkeypatch.setattr(build_module, "ThreadPoolExecutor", noted)
    monkeypatch.setattr(build_module, "num_cpus", lambda: cpus)
    monkeypatch.setattr(build_module, "available_memory", lambda: memory)
    build("generic", cpu_features(), tmp_path / "cache", sources)
    assert pools == [jobs]


@needs_compiler
def test_a_build_removes_what_nobody_needs_any_more(sources: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    used = build("generic", cpu_features(), cache, sources)
    days = {
        "build-of-today": 0,
        "build-cut-off": 2,
        "generic-1.so": 61,
        "generic-1.lock": 61,
        "generic-2.so": 59,
        "x": 99,
    }
    for name, age in days.items():
        path = cache / name
        path.mkdir() if name.startswith("build-") else path.touch()
        os.utime(path, (time.time() - age * 86400,) * 2)
    (cache / "build-cut-off" / "linear.o").touch()
    os.utime(cache / "build-cut-off", (time.time() - 2 * 86400,) * 2)
    os.utime(used, (time.time() - 61 * 86400,) * 2)
    assert build("generic", cpu_features(), cache, sources) == used, "which is a use"
    other = build("generic", CpuFeatures("other", frozenset()), cache, sources)
    left = {path.name for path in cache.iterdir() if path.suffix != ".lock"}
    assert left == {used.name, other.name, "build-of-today", "generic-2.so", "x"}
    assert not (cache / "generic-1.lock").exists()


@needs_compiler
def test_an_option_that_the_compiler_does_not_know_is_left_out(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = find_compiler()
    assert knows(compiler, "-O1") and not knows(compiler, "-mno-such-instructions")
    monkeypatch.setattr("worker_proc.cpu.build._NEWER", (*build_module._NEWER, "-mno-such-instructions"))
    monkeypatch.setattr(CpuFeatures, "options", lambda self, level: ("-mno-such-instructions",))
    assert build("generic", cpu_features(), tmp_path / "cache", sources).is_file()


@needs_compiler
def test_processes_that_build_at_once_compile_once(sources: Path, tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from worker_proc.cpu import build as b; from worker_proc.cpu.features "
        "import cpu_features; c = b._compile; b._compile = lambda *a: (print('compiled'), c(*a)); "
        "b.build('generic', cpu_features(), Path(sys.argv[1]), Path(sys.argv[2]))"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "cache"), str(sources)]
    running = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    printed = [process.communicate(timeout=60)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert "".join(printed).count("compiled") == 1


def test_levels_follow_from_the_features_of_a_cpu() -> None:
    avx512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
    amx = avx512 | {"avx512_bf16", "avx512_vbmi2", "amx_tile", "amx_bf16", "amx_int8"}
    avx2 = {"avx2", "fma", "f16c"}
    assert CpuFeatures("x86_64", frozenset(amx | avx2)).levels() == ("amx", "avx512bf16", "avx512", "generic")
    for lacking in ("amx_tile", "amx_int8"):
        features = CpuFeatures("x86_64", frozenset((amx | avx2) - {lacking}))
        assert features.levels() == ("avx512bf16", "avx512", "generic")
    assert CpuFeatures("x86_64", frozenset(amx - {"avx512_bf16"})).levels() == ("avx512", "generic")
    assert CpuFeatures("x86_64", frozenset(avx2)).levels() == ("generic",)
    assert CpuFeatures("aarch64", frozenset({"fp", "asimd"})).levels() == ("generic",)
    arm = CpuFeatures("aarch64", frozenset({"fp", "asimd", "i8mm", "bf16"}))
    assert arm.levels() == ("armbf16", "generic")
    everything = CpuFeatures("x86_64", frozenset(amx | avx2))
    assert everything.options("generic") == ("-mavx2", "-mfma", "-mf16c")
    alder_lake = CpuFeatures("x86_64", frozenset(avx2 | {"avx_vnni"}))
    assert alder_lake.levels() == ("generic",) and alder_lake.options("generic")[-1] == "-mavxvnni"
    assert "-mavx512vl" in everything.options("avx512") and "-mavx512bf16" not in everything.options("avx512")
    ice_lake = CpuFeatures("x86_64", frozenset((amx | avx2 | {"avx512_vnni"}) - {"avx512_bf16"}))
    assert ice_lake.levels() == ("avx512", "generic") and ice_lake.options("avx512")[-1] == "-mavx512vnni"
    assert "-mavx512vbmi2" in everything.options("avx512bf16") and "-mamx-tile" not in everything.options("avx512bf16")
    zen_4 = CpuFeatures("x86_64", frozenset(avx512 | avx2 | {"avx512_vnni", "avx512_bf16", "avx512vbmi"}))
    assert zen_4.options("avx512bf16")[-1] == "-mavx512vbmi" and zen_4.options("avx512")[-1] == "-mavx512vnni"
    assert "-mamx-bf16" in everything.options("amx")
    assert arm.options("generic") == ()
    assert arm.options("armbf16") == ("-march=armv8.2-a+bf16",)


@needs_compiler
@pytest.mark.parametrize("level", cpu_features().levels())
def test_every_level_of_this_cpu_loads(level: library.Level) -> None:
    assert load_library(level).level == level


@needs_compiler
@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 300)), min_size=1, max_size=20))
def test_every_task_is_done_once(runs: list[tuple[int, int]]) -> None:
    native = load_library("generic")
    for threads, tasks in runs:
        assert native.set_threads(threads) == threads
        sums = torch.zeros(threads, dtype=torch.int64)
        for _ in range(3):
            native.functions.rhizome_test_tasks(tasks, sums.data_ptr())
        assert int(sums.sum()) == 3 * tasks * (tasks + 1) // 2
    native.set_threads(1)


@needs_compiler
def test_the_caller_can_work_alone() -> None:
    native = load_library("generic")
    native.set_threads(3)
    assert helped(native)
    native.work_alone(True)
    assert not helped(native, 10)
    native.work_alone(False)
    assert helped(native)
    native.work_alone(True)
    native.set_threads(2)
    assert helped(native), "what is said of threads is said anew"
    native.set_threads(1)


def helped(native: library.NativeLibrary, operations: int = 2000) -> bool:
    """Whether helpers take a task in so many operations of some milliseconds: they need a core to do so."""
    sums = torch.zeros(3, dtype=torch.int64)
    for _ in range(operations):
        native.functions.rhizome_test_tasks(1_000_000, sums.data_ptr())
        if sums[1:].any():
            return True
    return False


@needs_compiler
def test_a_level_that_the_cpu_lacks_is_not_among_its_levels() -> None:
    assert cpu_features().levels()[-1] == "generic"
    assert NativeLibrary("generic").functions.rhizome_enable() == 1
