"""A cluster on a model that is named by its hub id, from a hub on loopback."""

from pathlib import Path

import httpx

from tests.helpers_hub import hub
from tests.integration.cluster import ROOT, running


def test_a_model_is_served_by_its_hub_id_and_under_that_name(tmp_path: Path) -> None:
    with hub({"owner/demo": ROOT / "demo_model"}) as server:
        env = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
        with running("owner/demo", "--port", "0", env=env) as cluster:
            url = cluster.info["addresses"]["http"]
            assert [model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]] == ["owner/demo"]
            body = {"model": "owner/demo", "prompt": "The with statement", "max_tokens": 4, "temperature": 0}
            named = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
    with running(ROOT / "demo_model", "--port", "0") as cluster:
        url = cluster.info["addresses"]["http"]
        local = httpx.post(f"{url}/v1/completions", json=body | {"model": None}, timeout=60).json()
    assert named["choices"][0]["text"] == local["choices"][0]["text"] != ""
