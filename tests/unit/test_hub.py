"""Models by hub id: which names are ids, what is fetched and what never is, and what a user reads when it fails."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.hub import split_id
from tests.helpers_hub import hub

ROOT = Path(__file__).resolve().parents[2]
FETCH = """
import sys
from launcher.hub import HubError, fetch, split_id
try:
    print(fetch(*split_id(sys.argv[1])))
except HubError as error:
    sys.exit(f"refused: {error}")
"""


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("Qwen/Qwen3-0.6B", ("Qwen/Qwen3-0.6B", None)),
        ("Qwen/Qwen3-0.6B@v1.0", ("Qwen/Qwen3-0.6B", "v1.0")),
        ("a/b@refs/pr/1", ("a/b", "refs/pr/1")),
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
def test_hub_ids(model: str, expected: tuple[str, str | None] | None) -> None:
    assert split_id(model) == expected


def test_a_directory_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert split_id("owner/name") is not None
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert split_id("owner/name") is None


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    home = tmp_path / "repository"
    shutil.copytree(ROOT / "demo_model", home)
    for name in ("modeling_evil.py", "pytorch_model.bin", "original/model.safetensors", "onnx/config.json"):
        (home / name).parent.mkdir(exist_ok=True)
        (home / name).write_text("not to be fetched")
    return home


def run_fetch(url: str, model: str, cache: Path) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    env |= {"HF_ENDPOINT": url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", FETCH, model]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, cwd=cache.parent)


def test_weights_configuration_and_tokenizer_are_fetched_and_nothing_else(repository: Path, tmp_path: Path) -> None:
    with hub({"owner/name": repository}) as server:
        done = run_fetch(server.url, "owner/name", tmp_path / "cache")
        assert done.returncode == 0, done.stderr
        wanted = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
        assert wanted <= set(server.served)
        assert not [name for name in server.served if "/" in name or name.endswith((".py", ".bin"))]
        path = Path(done.stdout.strip())
        assert (path / "model.safetensors").read_bytes() == (repository / "model.safetensors").read_bytes()
        before = len(server.served)
        assert run_fetch(server.url, "owner/name@main", tmp_path / "cache").stdout.strip() == str(path)
        assert len(server.served) == before, "fetched again what the cache holds"


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("owner/nothing", "no such model"),
        ("owner/name@v9", "no revision v9"),
        ("owner/pickle", "no weights as safetens"),
    ],
)
def test_what_cannot_be_had_is_said(model: str, reason: str, repository: Path, tmp_path: Path) -> None:
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text("{}")
    (pickled / "pytorch_model.bin").write_text("pickle")
    with hub({"owner/name": repository, "owner/pickle": pickled}) as server:
        done = run_fetch(server.url, model, tmp_path / "cache")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("refused: ") and reason in done.stderr, done.stderr


def test_a_hub_that_does_not_answer_is_said(tmp_path: Path) -> None:
    done = run_fetch("http://127.0.0.1:9", "owner/name", tmp_path / "cache")
    assert done.returncode == 1
    assert "fetching it from the hub failed" in done.stderr.splitlines()[-1], done.stderr
