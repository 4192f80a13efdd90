"""The private directory of a cluster: sockets, configuration, and `cluster.json` for those who look for it.

A living cluster holds an exclusive lock on `lock`, which the kernel drops with the process, so a directory whose lock
is free belongs to nobody and may be healed.
"""

import fcntl
import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

LOCK_FILE = "lock"
CLUSTER_FILE = "cluster.json"
_OWN_FILES = ("cluster.json", "config.json", "store", LOCK_FILE)


class RunDirError(RuntimeError):
    """The directory cannot be used, or no cluster lives there."""


def base_dir() -> Path:
    """Where run directories are made when none is named: private to the user."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "rhizome"
    return Path(tempfile.gettempdir()) / f"rhizome-{os.getuid()}"


class RunDir:
    """A run directory held by this process. Raises RunDirError when it is another's or a living cluster's."""

    def __init__(self, path: Path | None = None):
        if path is None:
            path = base_dir() / str(os.getpid())
            _make_private(path.parent)
        self.path = path.absolute()
        self._made = _make_private(self.path)
        self._lock = os.open(self.path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise RunDirError(f"a living cluster uses {self.path}") from None
        self._remove_own_files(keep=LOCK_FILE)

    def write_cluster(self, info: dict[str, Any]) -> None:
        """Replace cluster.json in one step, so that readers see the old or the new one."""
        temporary = self.path / "cluster.json.tmp"
        temporary.write_text(json.dumps(info, indent=1))
        temporary.replace(self.path / CLUSTER_FILE)

    def close(self) -> None:
        """Remove what the cluster made, and the directory when it was made for it."""
        self._remove_own_files(keep="")
        if self._made:
            try:
                self.path.rmdir()
            except OSError:
                pass  # somebody else put a file there: leave it
        os.close(self._lock)

    def _remove_own_files(self, keep: str) -> None:
        for entry in self.path.iterdir():
            if entry.name == keep:
                continue
            if entry.name in _OWN_FILES or entry.suffix == ".sock" or entry.name == "cluster.json.tmp":
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
        candidates = sorted(base.iterdir()) if base.is_dir() and base.stat().st_uid == os.getuid() else []
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
        info: dict[str, Any] = json.loads((ready[0] / CLUSTER_FILE).read_text())
    except (OSError, ValueError) as error:
        raise RunDirError(f"{ready[0] / CLUSTER_FILE} cannot be read: {error}") from None
    return info
