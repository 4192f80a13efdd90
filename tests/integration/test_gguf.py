"""Clusters on GGUF files, with the launcher's way from a file to a model directory."""

import json
import shutil
from pathlib import Path

import httpx
import pytest
from transformers import AutoTokenizer

from common.user_cache import cache_directory
from tests.helpers_gguf import write_gguf
from tests.helpers_hub import hub
from tests.integration.cluster import ROOT, Cluster, running
from tests.integration.test_cluster import DEMO, reference

PROMPTS = ("The with statement is used to", "Return a copy of the string", "Raise ValueError if", "é\n\t  naïve 1234")
FLAGS = ("--tp", "2", "--dtype", "float32", "--port", "0")


@pytest.fixture
def cache(tmp_path: Path) -> dict[str, str]:
    """The environment for a cache directory of the test's own, with the kernels that are there already."""
    kernels = cache_directory("kernels")
    if kernels.is_dir():
        shutil.copytree(kernels, tmp_path / "cache" / "rhizome" / "kernels")
    return {"XDG_CACHE_HOME": str(tmp_path / "cache")}


def test_a_gguf_file_answers_as_the_model_that_its_blocks_stand_for(tmp_path: Path, cache: dict[str, str]) -> None:
    plain = tmp_path / "plain"
    file = write_gguf(DEMO, tmp_path / "demo-Q4_0.gguf", lambda name: "F32" if "embd" in name else "Q4_0", plain=plain)
    tokenizer = AutoTokenizer.from_pretrained(plain)
    messages = [{"role": "user", "content": "What is a list?"}]
    templated = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = [tokenizer(prompt)["input_ids"] for prompt in (*PROMPTS, templated)]
    expected = reference(plain, ids, [40] * len(ids))
    texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in expected]
    with running(file, *FLAGS, env=cache) as cluster:
        for prompt, tokens, text in zip(PROMPTS, expected, texts, strict=False):
            done = cluster.client(prompt, "--max-tokens", "40", "--temperature", "0", "--ignore-eos", "--json")
            assert done.returncode == 0, done.stderr
            answer = json.loads(done.stdout)
            assert (answer["token_ids"], answer["text"]) == (tokens, text)
        url = cluster.info["addresses"]["http"]
        body = {"messages": messages, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        done = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
        assert done["choices"][0]["message"]["content"] == texts[-1]
        models = httpx.get(f"{url}/v1/models").json()["data"]
        assert [model["id"] for model in models] == ["demo-Q4_0"]
    assert len(list((tmp_path / "cache" / "rhizome" / "gguf").iterdir())) == 1


def test_a_gguf_file_is_served_by_its_hub_id(tmp_path: Path, cache: dict[str, str]) -> None:
    home = tmp_path / "repository"
    home.mkdir()
    file = write_gguf(DEMO, home / "demo-Q4_0.gguf", lambda name: "F32" if "embd" in name else "Q4_0")
    write_gguf(DEMO, home / "demo-BF16.gguf", lambda name: "BF16")
    body = {"prompt": PROMPTS[0], "max_tokens": 20, "temperature": 0}
    texts = []
    with hub({"owner/demo-GGUF": home}) as server:
        env = cache | {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_DISABLE_XET": "1"}
        for model, name in (("owner/demo-GGUF:q4_0", "owner/demo-GGUF:q4_0"), (file, "demo-Q4_0")):
            with running(model, "--port", "0", env=env) as cluster:
                url = cluster.info["addresses"]["http"]
                done = httpx.post(f"{url}/v1/completions", json=body | {"model": name}, timeout=60).json()
                texts.append(done["choices"][0]["text"])
        assert server.served == ["demo-Q4_0.gguf"]
    assert texts[0] == texts[1] != ""


def test_a_file_that_cannot_be_served_is_named_with_the_cause(tmp_path: Path, cache: dict[str, str]) -> None:
    file = write_gguf(DEMO, tmp_path / "demo.gguf", lambda name: "BF16")
    whole = file.read_bytes()
    other = tmp_path / "other.gguf"
    other.write_bytes(whole[: len(whole) // 2])
    for path, cause in ((other, "other.gguf"), (ROOT / "README.md", "no GGUF file")):
        with Cluster(path, env=cache) as cluster:
            assert cluster.process.wait(60) == 1
            assert f"--model {path}: " in cluster.log and cause in cluster.log, cluster.log
            assert "Traceback" not in cluster.log
