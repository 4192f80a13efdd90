"""Models by hub id: which names are ids, and which file of a repository is meant."""

from pathlib import Path

import pytest

from launcher.hub import HubError, HubId, choose_gguf, split_id


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("Qwen/Qwen3-0.6B", HubId("Qwen/Qwen3-0.6B")),
        ("Qwen/Qwen3-0.6B@v1.0", HubId("Qwen/Qwen3-0.6B", None, "v1.0")),
        ("a/b@refs/pr/1", HubId("a/b", None, "refs/pr/1")),
        ("a/b-GGUF:Q4_K_M", HubId("a/b-GGUF", "Q4_K_M")),
        ("a/b:sub/c-Q8_0.gguf@main", HubId("a/b", "sub/c-Q8_0.gguf", "main")),
        ("a/b:", None),
        ("a/b:../c", None),
        ("a:b/c", None),
        ("model", None),
        ("/a/b", None),
        ("./a", None),
        ("../a/b", None),
        ("a/b/c", None),
        ("a/b@", None),
        ("a/..", None),
        ("a b/c", None),
        ("", None),
    ],
)
def test_hub_ids(model: str, expected: HubId | None) -> None:
    assert split_id(model) == expected


NAMES = (
    "README.md", "m-Q4_K.gguf", "m-Q4_K_M.gguf", "m-UD-Q4_K_M.gguf", "m.q5_1.gguf", "mmproj-m-F16.gguf", "config.json",
    "BF16/m-BF16-00002-of-00002.gguf", "BF16/m-BF16-00001-of-00002.gguf",
)  # fmt: skip


@pytest.mark.parametrize(
    ("which", "files"),
    [
        ("Q4_K_M", ["m-Q4_K_M.gguf"]),
        ("q4_k", ["m-Q4_K.gguf"]),
        ("UD-Q4_K_M", ["m-UD-Q4_K_M.gguf"]),
        ("Q5_1", ["m.q5_1.gguf"]),
        ("m-UD-Q4_K_M.gguf", ["m-UD-Q4_K_M.gguf"]),
        ("BF16", ["BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf"]),
        ("BF16/m-BF16-00002-of-00002.gguf", ["BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf"]),
    ],
)
def test_which_gguf_file_is_meant(which: str, files: list[str]) -> None:
    assert choose_gguf(NAMES, which) == files


@pytest.mark.parametrize("which", ["4_K_M", "F16", "Q6_K", "README.md", ".*"])
def test_a_gguf_file_that_is_not_there(which: str) -> None:
    with pytest.raises(HubError, match="there are: BF16/m-BF16, m-Q4_K, m-Q4_K_M"):
        choose_gguf(NAMES, which)


def test_a_directory_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert split_id("owner/name") is not None
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert split_id("owner/name") is None
