"""What is made once and kept in the user's cache directory, where nobody else may have put it."""

import os
import stat
from pathlib import Path


class CacheError(RuntimeError):
    """A cache directory that cannot be made, or that others could write to."""


def cache_directory(name: str) -> Path:
    """`rhizome/NAME` in the user's cache directory (XDG Base Directory specification)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
    return root / "rhizome" / name


def make_private(directory: Path) -> None:
    """Raises CacheError."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise CacheError(f"the cache directory {directory} cannot be made: {error}") from None
    check_private(directory)


def check_private(path: Path) -> None:
    """Refuse, with a CacheError, what others could have written, or could write later."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise CacheError(f"{path} must belong to the user and be writable by nobody else")
