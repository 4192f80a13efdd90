"""Fetching models by hub id, by processes of their own from a hub on loopback: what is fetched and what never is, and
what a user reads when it fails."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers_hub import hub

ROOT = Path(__file__).resolve().parents[2]
FETCH = """
import json, sys
from launcher.hub import HubError, fetch, split_id
for model in sys.argv[1:]:
    try:
        answer = str(fetch(split_id(model)))
    except HubError as error:
        answer = f"refused: {error}"
    print(json.dumps(answer))
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    home = tmp_path / "repository"
    shutil.copytree(ROOT / "demo_model", home)
    for name in (
        "modeling_evil.py",
        "pytorch_model.bin",
        "original/model.safetensors",
        "onnx/config.json",
        "consolidated.safetensors",
    ):
        (home / name).parent.mkdir(exist_ok=True)
        (home / name).write_text("not to be fetched")
    return home


def run_fetch(url: str, cache: Path, *models: str) -> list[str]:
    """Where each model is, or "refused: " and why, by one process with that cache."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    env |= {"HF_ENDPOINT": url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", FETCH, *models]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, cwd=cache.parent)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_weights_configuration_and_tokenizer_are_fetched_and_nothing_else(repository: Path, tmp_path: Path) -> None:
    with hub({"owner/name": repository}) as server:
        (place,) = run_fetch(server.url, tmp_path / "cache", "owner/name")
        wanted = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
        assert wanted <= set(server.served)
        assert not [name for name in server.served if "/" in name or name.endswith((".py", ".bin"))]
        assert "consolidated.safetensors" not in server.served, "the weights once more, in Mistral's format"
        assert (Path(place) / "model.safetensors").read_bytes() == (repository / "model.safetensors").read_bytes()
        before = len(server.served)
        assert run_fetch(server.url, tmp_path / "cache", "owner/name@main") == [place]
        assert len(server.served) == before, "fetched again what the cache holds"


def test_the_gguf_file_that_is_named_is_fetched_and_no_other(tmp_path: Path) -> None:
    home = tmp_path / "repository"
    home.mkdir()
    for name in ("m-Q4_0.gguf", "m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf", "mmproj-m.gguf", "a.py"):
        (home / name).write_text(name)
    with hub({"owner/name": home}) as server:
        asked = ("owner/name:q8_0", "owner/name", "owner/name:Q3_K")
        place, unsaid, unknown = run_fetch(server.url, tmp_path / "cache", *asked)
        file = Path(place)
        assert file.read_text() == file.name == "m-Q8_0-00001-of-00002.gguf"
        assert set(server.served) == {file.name, "m-Q8_0-00002-of-00002.gguf"}
        assert unsaid.startswith("refused: ") and "say which, such as owner/name:Q4_0" in unsaid
        assert unknown.startswith("refused: ") and "there are: m-Q4_0, m-Q8_0" in unknown
    again = run_fetch("http://127.0.0.1:9", tmp_path / "cache", "owner/name:Q8_0")
    assert again == [place]  # without the hub, too


def test_what_cannot_be_had_is_said(repository: Path, tmp_path: Path) -> None:
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text("{}")
    (pickled / "pytorch_model.bin").write_text("pickle")
    reasons = {
        "owner/nothing": "no such model",
        "owner/name@v9": "no revision v9",
        "owner/pickle": "no weights as safetens",
    }
    with hub({"owner/name": repository, "owner/pickle": pickled}) as server:
        answers = run_fetch(server.url, tmp_path / "cache", *reasons)
    for answer, reason in zip(answers, reasons.values(), strict=True):
        assert answer.startswith("refused: ") and reason in answer


def test_a_hub_that_does_not_answer_is_said(tmp_path: Path) -> None:
    whole, file = run_fetch("http://127.0.0.1:9", tmp_path / "cache", "owner/name", "owner/name:Q8_0")
    assert "fetching it from the hub failed" in whole.splitlines()[-1]
    assert "refused" in file.splitlines()[-1].split("fetching it from the hub failed: ")[1]
