"""The private directory of a cluster: sockets, configuration, and `cluster.json` for those who look for it.

A living cluster holds an exclusive lock on `lock`, which the kernel drops with the process, so a directory whose lock
is free belongs to nobody and may be healed. It holds one on the directory, too: systemd-tmpfiles, which removes what
was not used for days, passes over directories that are locked.
"""

import fcntl
import json
import os
import re
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

LOCK_FILE = "lock"
CLUSTER_FILE = "cluster.json"
_OWN_FILES = re.compile(  # configuration, where the ranks of a worker group meet, and the sockets of common/sockets.py
    r"cluster\.json(\.tmp)?|config\.json|store-\d+"
    r"|(control|frontend|(tokenizer|detokenizer|scheduler|results|plan\d+)-\d+)\.sock"
)


class RunDirError(RuntimeError):
    """The directory cannot be used, or no cluster lives there."""


def base_dir() -> Path:
    """Where run directories are made when none is named: private to the user."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "rhizome"
    return Path(tempfile.gettempdir()) / f"rhizome-{os.getuid()}"


class RunDir:
    """A run directory held by this process. Raises RunDirError when it is another's or a living cluster's, or cannot be
    made."""

    def __init__(self, path: Path | None = None):
        try:
            self._make(path)
        except OSError as error:
            raise RunDirError(f"{error.filename or path}: {error.strerror}") from None

    def _make(self, path: Path | None) -> None:
        named = path is not None
        if path is None:
            path = base_dir() / str(os.getpid())
            _make_private(path.parent)
            _remove_dead(path.parent)
        self.path = path.absolute()
        _check_ours(self.path)
        made, self._lock = _lock_directory(self.path)
        self._made = made or not named
        self._kept = _keep_from_cleaners(self.path)
        _remove_own_files(self.path)

    def write_cluster(self, info: dict[str, Any]) -> None:
        """Replace cluster.json in one step, so that readers see the old or the new one."""
        temporary = self.path / "cluster.json.tmp"
        temporary.write_text(json.dumps(info, indent=1))
        temporary.replace(self.path / CLUSTER_FILE)

    def close(self) -> None:
        """Remove what the cluster made, and the directory when it was made for it."""
        _remove_own_files(self.path)
        (self.path / LOCK_FILE).unlink(missing_ok=True)  # last: from here on the directory may be another's
        if self._made:
            try:
                self.path.rmdir()
            except OSError:
                pass  # somebody else put a file there: leave it
        os.close(self._lock)
        os.close(self._kept)


def _check_ours(path: Path) -> None:
    """A directory with files that look like a cluster's, but where none has lived, is another's: they would be lost."""
    if (path / LOCK_FILE).exists() or not path.is_dir():
        return
    names = sorted(entry.name for entry in path.iterdir() if _OWN_FILES.fullmatch(entry.name))
    if names and not (path / LOCK_FILE).exists():  # one that is just starting has made it first
        raise RunDirError(f"{path} holds {names[0]}, which no cluster has made; name a directory of its own")


def _lock_directory(path: Path) -> tuple[bool, int]:
    """Whether the directory was made, and the descriptor of its exclusive lock."""
    deadline = time.monotonic() + 0.5
    made = False
    while True:
        made = _make_private(path) or made
        try:
            handle = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue  # a cluster that ended, or a clean-up, removed the directory just now
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(handle).st_nlink:
                return made, handle
        except OSError:  # held by a cluster, or for an instant by somebody in `is_alive`
            if time.monotonic() > deadline:
                os.close(handle)
                raise RunDirError(f"a living cluster uses {path}") from None
            time.sleep(0.01)
        os.close(handle)


def _keep_from_cleaners(path: Path) -> int:
    """The descriptor of the directory, locked where its file system can do that."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return handle


def _remove_dead(base: Path) -> None:
    """Remove the directories that clusters left in `base` when they were killed."""
    for path in base.iterdir():
        try:
            handle = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # not a run directory, or one that is being made or removed
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_own_files(path)
            (path / LOCK_FILE).unlink(missing_ok=True)
            path.rmdir()
        except OSError:
            pass  # it lives, or holds files of somebody else
        finally:
            os.close(handle)


def _remove_own_files(path: Path) -> None:
    """Remove what clusters leave in a directory, except the lock."""
    for entry in path.iterdir():
        if _OWN_FILES.fullmatch(entry.name) and not entry.is_dir():
            entry.unlink(missing_ok=True)


def _make_private(path: Path) -> bool:
    """Create `path` with mode 0700 or check that it is ours alone; True when it was created."""
    try:
        path.mkdir(mode=0o700, parents=True)
        return True
    except FileExistsError:
        pass
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        raise RunDirError(f"{path} is not a directory of this user")
    if info.st_mode & 0o077:
        raise RunDirError(f"{path} is open to other users (mode {stat.S_IMODE(info.st_mode):04o}, must be 0700)")
    return False


def _is_private(path: Path) -> bool:
    try:
        info = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o077


def is_alive(path: Path) -> bool:
    """Whether a living launcher holds the directory."""
    try:
        handle = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def find_cluster(path: Path | None = None) -> dict[str, Any]:
    """cluster.json of the cluster in `path`, or of the one cluster of this user. Raises RunDirError otherwise."""
    if path is not None:
        candidates = [path]
    else:
        base = base_dir()
        candidates = sorted(base.iterdir()) if _is_private(base) else []
    living = [c for c in candidates if is_alive(c)]
    ready = [c for c in living if (c / CLUSTER_FILE).is_file()]
    if not ready:
        place = f" in {path}" if path else ""
        if living:
            raise RunDirError(f"the cluster{place} is still starting; try again when it says that it is ready")
        raise RunDirError(f"no cluster is running{place}; start one with: python launch.py")
    if len(ready) > 1:
        names = "\n  ".join(str(c) for c in ready)
        raise RunDirError(f"several clusters are running; choose one with --run-dir:\n  {names}")
    try:
        info = json.loads((ready[0] / CLUSTER_FILE).read_text())
    except (OSError, ValueError) as error:
        raise RunDirError(f"{ready[0] / CLUSTER_FILE} cannot be read: {error}") from None
    if not isinstance(info, dict):
        raise RunDirError(f"{ready[0] / CLUSTER_FILE} does not describe a cluster")
    return info
