"""API keys: read once at start, compared in constant time, each with a cache namespace and a limit of its own."""

import hashlib
import hmac
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from gateway_proc.errors import ApiError

KEYS_VARIABLE = "RHIZOME_API_KEYS"
MIN_KEY_CHARS = 8
MAX_KEYS = 10_000
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KEY = re.compile(r"[\x21-\x7e]{%d,512}" % MIN_KEY_CHARS)


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
                raise KeysError(f"--api-key-file {path}: is open to other users (mode {mode:04o}, must be 0600 or 0400)")
            return file.read(2**24).decode()
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
        digest = _digest(key.encode())
        if digest in keys:
            raise KeysError(f"{where} {number}: this key is there twice")
        keys[digest] = name


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class Keys:
    """The keys of a running gateway: names by digest. With none of them, everybody may ask. `concurrency` bounds the
    live requests of each name, 0 is no limit."""

    def __init__(self, names: Mapping[bytes, str], concurrency: int = 0):
        self._names = names
        self._concurrency = concurrency
        self._live: Counter[str] = Counter()

    def name_of(self, authorization: str | None) -> str:
        """Whose key an Authorization header holds; "-" where no keys are asked for. Raises ApiError(401).

        Every key is compared, so that the time tells nothing about them.
        """
        if not self._names:
            return "-"
        if authorization is None:
            problem = "no API key was given; send it as: Authorization: Bearer KEY"
            raise ApiError(401, problem, code="missing_api_key")
        scheme, _, key = authorization.partition(" ")
        given = _digest(key.strip().encode("utf-8", "surrogateescape"))
        found = ""
        for digest, name in self._names.items():
            if hmac.compare_digest(digest, given):
                found = name
        if not found or scheme.lower() != "bearer":
            raise ApiError(401, "the API key is not valid", code="invalid_api_key")
        return found

    def enter(self, name: str) -> None:
        """A request of `name` begins. Raises ApiError(429) when too many are live."""
        if self._concurrency and self._names and self._live[name] >= self._concurrency:
            problem = f"this API key has {self._concurrency} requests in work, which is its limit; try again later"
            raise ApiError(429, problem, code="concurrency_limit", retry_after_s=1.0)
        self._live[name] += 1

    def leave(self, name: str) -> None:
        self._live[name] -= 1
        if not self._live[name]:
            del self._live[name]


def namespace(key_name: str, salt: str | None) -> str:
    """The prefix cache namespace of a request: one for each key, and within it for each salt of the client."""
    if key_name == "-" and (salt is None or len(salt) <= 64):
        return salt or ""
    return hashlib.sha256(f"{key_name}\0{salt or ''}".encode()).hexdigest()
