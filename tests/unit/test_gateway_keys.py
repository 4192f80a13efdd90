"""API keys: where they come from, whose they are, what each may."""

import os
import re
import socket
from pathlib import Path

import pytest

from common.config import ConfigError, HttpConfig
from gateway_proc.address import find_address
from gateway_proc.auth import Keys, namespace
from gateway_proc.errors import ApiError
from gateway_proc.key_file import KeysError, digest_of, read_keys

ALICE, BOB = "sk-alice-1234", "sk-bob-12345"


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    file = path / "keys"
    file.write_text(text)
    file.chmod(mode)
    return file


def test_file_and_environment(tmp_path: Path) -> None:
    file = write(tmp_path, f"# ours\n\nalice:{ALICE}\n{BOB}\n  alice:another-of-alice \t\n")
    keys = read_keys(file, {"RHIZOME_API_KEYS": "carol:sk-carol-1234, sk-nameless-1\n"})
    assert keys == {
        digest_of(ALICE.encode()): "alice", digest_of(BOB.encode()): "key2", digest_of(b"another-of-alice"): "alice",
        digest_of(b"sk-carol-1234"): "carol", digest_of(b"sk-nameless-1"): "key5",
    }  # fmt: skip
    file.write_text(f"alice:{ALICE}\r\n", encoding="utf-8-sig")  # as editors of Windows write it
    assert read_keys(file, {}) == {digest_of(ALICE.encode()): "alice"}
    assert read_keys(None, {}) == {} and read_keys(None, {"RHIZOME_API_KEYS": ""}) == {}


@pytest.mark.parametrize(
    ("text", "mode", "problem"),
    [
        ("alice:sk-alice-1234", 0o644, "open to other users"),
        ("alice:sk-alice-1234", 0o620, "open to other users"),
        ("", 0o600, "holds no key"),
        ("# nothing\n", 0o600, "holds no key"),
        ("alice:short", 0o600, "line 1: a key must have"),
        ("alice:sk-alice 1234", 0o600, "line 1: a key must have"),
        ("al ice:sk-alice-1234", 0o600, "line 1: the name must"),
        ("a:sk-alice-1234\nb:sk-alice-1234", 0o600, "line 2: this key is there twice"),
    ],
)
def test_bad_files_are_refused_without_showing_a_key(tmp_path: Path, text: str, mode: int, problem: str) -> None:
    with pytest.raises(KeysError, match=problem) as caught:
        read_keys(write(tmp_path, text, mode), {})
    assert "sk-" not in str(caught.value) and "short" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(KeysError, match="--api-key-file"):
            read_keys(path, {})
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe" * 20)
    binary.chmod(0o600)
    with pytest.raises(KeysError, match="UTF-8"):
        read_keys(binary, {})


def test_only_a_file_of_this_user_or_of_root_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeysError, match="not a file of this user"):
        read_keys(Path(os.devnull), {})
    file = write(tmp_path, ALICE)
    monkeypatch.setattr(os, "getuid", lambda: file.stat().st_uid + 1)
    if file.stat().st_uid == 0:
        assert len(read_keys(file, {})) == 1
        os.chown(file, 2, -1)
    with pytest.raises(KeysError, match="not a file of this user"):
        read_keys(file, {})


def test_so_many_keys_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway_proc.key_file.MAX_KEYS", 2)
    file = write(tmp_path, f"{ALICE}\n{BOB}\n")
    assert len(read_keys(file, {})) == 2
    with pytest.raises(KeysError, match="at most 2 API keys are allowed, got 3"):
        read_keys(file, {"RHIZOME_API_KEYS": "sk-carol-1234"})


def test_whose_key_it_is() -> None:
    keys = Keys({digest_of(ALICE.encode()): "alice", digest_of(BOB.encode()): "bob"})
    assert keys.name_of(f"Bearer {ALICE}") == "alice" and keys.name_of(f"bearer  {BOB} ") == "bob"
    for header in ("", "Bearer", "Bearer ", f"Bearer {ALICE}x", f"Basic {ALICE}", ALICE, "Bearer \udcff"):
        with pytest.raises(ApiError) as caught:
            keys.name_of(header)
        assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
        assert ALICE not in caught.value.message
    with pytest.raises(ApiError) as caught:
        keys.name_of(None)
    assert (caught.value.status, caught.value.code) == (401, "missing_api_key")
    assert Keys({}).name_of(None) == Keys({}).name_of("Bearer anything") == "-"


def test_each_name_has_its_own_limit() -> None:
    keys = Keys({digest_of(b"x"): "a"}, 2)
    for name in ("a", "a", "b"):
        keys.enter(name)
    with pytest.raises(ApiError) as caught:
        keys.enter("a")
    assert (caught.value.status, caught.value.code) == (429, "concurrency_limit")
    assert caught.value.headers() == {"retry-after": "1"}
    keys.leave("a")
    keys.enter("a")
    with pytest.raises(ApiError):
        keys.enter("a")
    for unlimited, name in ((Keys({}, 1), "-"), (Keys({digest_of(b"x"): "a"}), "a")):
        for _ in range(5):
            unlimited.enter(name)


def test_namespaces_are_kept_apart() -> None:
    spaces = [namespace(name, salt) for name in ("-", "a", "b") for salt in (None, "s", "a\0s", "x" * 1000)]
    assert len(set(spaces)) == len(spaces) and all(len(space) <= 64 for space in spaces)
    assert namespace("-", None) == "" and namespace("-", "s") == "s" and namespace("a", None) != ""
    assert namespace("-", "x" * 64) == "x" * 64 and len(namespace("-", "x" * 65)) == 64


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.3.2.1", "127.1", "localhost", "LOCALHOST", "::1", "::ffff:127.0.0.1"]
)
def test_loopback_needs_no_keys(host: str) -> None:
    find_address(HttpConfig(host=host), with_keys=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "0", "::", "192.0.2.1", "::ffff:192.0.2.1", "fe80::1"])
def test_other_addresses_need_keys(host: str) -> None:
    with pytest.raises(ConfigError, match=f"^--host {host} is open to others: API keys are required"):
        find_address(HttpConfig(host=host), with_keys=False)
    find_address(HttpConfig(host=host), with_keys=True)


def test_the_address_decides_and_not_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """No name server answers in tests: the system's answer is made up."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 8000))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    for host in ("127.example.com", "localhost.example.com"):
        with pytest.raises(ConfigError, match="open to others"):
            find_address(HttpConfig(host=host), with_keys=False)


@pytest.mark.parametrize("host", ["a..b", "x" * 64, "no such host", "[::1]"])
def test_hosts_that_are_none(host: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"--host {host}: ")):
        find_address(HttpConfig(host=host), with_keys=True)
