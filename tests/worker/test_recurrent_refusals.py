"""What models with recurrent layers cannot have is refused before their weights are read."""

from pathlib import Path

import pytest

from common.config import CacheConfig, ClusterConfig, ModelConfig, SchedulerConfig
from tests.helpers_hybrid import HYBRIDS, make_hybrid
from tests.helpers_models import make_checkpoint
from worker_proc import startup
from worker_proc.errors import ModelError
from worker_proc.models.registry import has_recurrent_layers


def without_weights(directory: Path) -> Path:
    for path in directory.glob("*.safetensors*"):
        path.unlink()
    return directory


@pytest.mark.parametrize("kind", sorted(HYBRIDS))
def test_hybrid_models_are_known_without_their_weights(kind: str, tmp_path: Path) -> None:
    assert has_recurrent_layers(without_weights(make_hybrid(kind, tmp_path)))


@pytest.mark.parametrize("kind", ["llama", "olmo"])
def test_others_are_none(kind: str, tmp_path: Path) -> None:
    assert not has_recurrent_layers(without_weights(make_checkpoint(kind, tmp_path)))


@pytest.mark.parametrize(
    ("flag", "scheduler", "cache"),
    [
        ("speculation", SchedulerConfig(speculation="ngram"), CacheConfig()),
        ("host_kv_memory", SchedulerConfig(), CacheConfig(host_kv_bytes=2**20)),
    ],
)
def test_they_are_refused_before(
    flag: str, scheduler: SchedulerConfig, cache: CacheConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "load_model", lambda *_, **__: pytest.fail("weights are read"))
    path = make_hybrid("lfm2", tmp_path / "model")
    model = ModelConfig(path=str(path), device="cpu", cpu_kernels="torch")
    config = ClusterConfig(str(tmp_path), model, cache, scheduler)
    with pytest.raises(ModelError, match=flag):
        startup.load_worker(config, 0, "0", tmp_path / "store")
