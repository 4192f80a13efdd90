"""What is made once and kept in the user's cache directory, where nobody else may have put it."""

import os
import stat
from pathlib import Path


class CacheError(RuntimeError):
    """A cache directory that cannot be made, or that others could write to."""


def cache_directory(name: str) -> Path:
    """`rhizome/NAME` in the user's cache directory (XDG Base Directory specification). Raises CacheError where there is
    none."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if Path(base).is_absolute():
        return Path(base) / "rhizome" / name
    try:
        return Path.home() / ".cache" / "rhizome" / name
    except RuntimeError as error:  # a user without an entry, and without HOME
        raise CacheError(f"there is no cache directory: {error}") from None


def make_private(directory: Path) -> None:
    """Raises CacheError."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise CacheError(f"the cache directory {directory} cannot be made: {error}") from None
    check_private(directory)


def check_private(path: Path) -> None:
    """Refuse, with a CacheError, what others could have written, or could write later."""
    try:
        found = path.lstat()
    except OSError as error:
        raise CacheError(f"{path} cannot be looked at: {error}") from None
    if stat.S_ISLNK(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise CacheError(f"{path} must belong to the user and be writable by nobody else")
