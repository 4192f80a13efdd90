"""API keys as they are configured: read once at start, kept as digests. Light, because launch.py checks them too."""

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from common.config import KEYS_VARIABLE

MIN_KEY_CHARS = 8
MAX_KEYS = 10_000
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KEY = re.compile(rf"[\x21-\x7e]{{{MIN_KEY_CHARS},512}}")


class KeysError(ValueError):
    """The keys cannot be used; the text says which line is wrong, never what is in it."""


def read_keys(path: Path | None, environment: Mapping[str, str]) -> dict[bytes, str]:
    """Names by the digest of their key, from a file and from RHIZOME_API_KEYS, where keys are separated by commas or
    white space. A line is `name:key` or a key alone; empty lines and those that begin with # are skipped. Several keys
    may share a name, and with it cache and limits. Raises KeysError."""
    keys: dict[bytes, str] = {}
    if path is not None:
        _add(keys, _read_private(path).splitlines(), f"--api-key-file {path}: line")
    if environment.get(KEYS_VARIABLE):
        _add(keys, re.split(r"[,\s]+", environment[KEYS_VARIABLE]), f"{KEYS_VARIABLE}: entry")
    if path is not None and not keys:
        raise KeysError(f"--api-key-file {path}: holds no key")
    if len(keys) > MAX_KEYS:
        raise KeysError(f"at most {MAX_KEYS} API keys are allowed, got {len(keys)}")
    return keys


def _read_private(path: Path) -> str:
    try:
        with path.open("rb") as file:
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode) or info.st_uid not in (os.getuid(), 0):
                raise KeysError(f"--api-key-file {path}: is not a file of this user")
            if info.st_mode & 0o077:
                mode = stat.S_IMODE(info.st_mode)
                raise KeysError(
                    f"--api-key-file {path}: is open to other users (mode {mode:04o}, must be 0600 or 0400)"
                )
            return file.read(2**24).decode("utf-8-sig")
    except OSError as error:
        raise KeysError(f"--api-key-file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise KeysError(f"--api-key-file {path}: is not UTF-8 text") from None


def _add(keys: dict[bytes, str], lines: Iterable[str], where: str) -> None:
    for number, line in enumerate(lines, start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        name, colon, key = line.partition(":")
        if not colon:
            name, key = f"key{len(keys) + 1}", line
        if not _NAME.fullmatch(name):
            raise KeysError(f"{where} {number}: the name must have 1 to 64 letters, digits, dots, dashes, underscores")
        if not _KEY.fullmatch(key):
            raise KeysError(f"{where} {number}: a key must have {MIN_KEY_CHARS} to 512 printable characters, no spaces")
        digest = digest_of(key.encode())
        if digest in keys:
            raise KeysError(f"{where} {number}: this key is there twice")
        keys[digest] = name


def digest_of(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
