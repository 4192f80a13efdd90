"""Checkpoint files: what is read, and what is refused with the tensor and file named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers_models import VOCAB_SIZE, make_checkpoint
from tests.helpers_paged import Row, make_batch
from worker_proc.attention.reference import ReferenceAttention
from worker_proc.errors import ModelError
from worker_proc.kv_cache import KVCache
from worker_proc.models.interface import LanguageModel
from worker_proc.models.registry import load_model
from worker_proc.parallel import TensorParallel
from worker_proc.weights import INDEX_FILE, SINGLE_FILE, Checkpoint

NORM = "model.layers.1.input_layernorm.weight"


def load(path: Path, **settings: Any) -> LanguageModel:
    return load_model(
        path,
        **(
            {"dtype": torch.float32, "device": "cpu", "tp": TensorParallel(), "attention": ReferenceAttention()}
            | settings
        ),
    )


def logits(model: LanguageModel) -> torch.Tensor:
    return model.forward(make_batch([Row([5, 6, 7, 8, 9], [3, 1])], [5], 4), KVCache(model.kv_spec, 8, 4))


def rewrite(path: Path, change: Any) -> None:
    tensors = load_file(path / SINGLE_FILE)
    change(tensors)
    save_file(tensors, path / SINGLE_FILE)


def refusal(path: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        load(path)
    return caught.value


@pytest.mark.parametrize("kind", ["llama-gqa-untied", "gpt2"])
def test_sharded_equals_single(kind: str, tmp_path: Path) -> None:
    single = make_checkpoint(kind, tmp_path / "single")
    sharded = make_checkpoint(kind, tmp_path / "sharded", max_shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert torch.equal(logits(load(single)), logits(load(sharded)))


def test_progress_counts_every_byte_once(tmp_path: Path) -> None:
    path = make_checkpoint("llama-gqa-untied", tmp_path, max_shard_size="60KB")
    seen: list[tuple[int, int]] = []
    load(path, progress=lambda done, total: seen.append((done, total)))
    total = Checkpoint.open(path).nbytes
    assert seen[0] == (0, total) and seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_rank_reads_its_share_only(tmp_path: Path) -> None:
    path = make_checkpoint("llama-gqa-untied", tmp_path)
    seen: list[tuple[int, int]] = []
    load(path, tp=TensorParallel(1, 2, group=object()), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] < 0.52 * Checkpoint.open(path).nbytes


def test_missing_tensor(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path)
    rewrite(path, lambda tensors: tensors.pop(NORM))
    assert refusal(path).field == NORM


def test_untied_model_without_a_head(tmp_path: Path) -> None:
    path = make_checkpoint("llama-gqa-untied", tmp_path)
    rewrite(path, lambda tensors: tensors.pop("lm_head.weight"))
    assert refusal(path).field == "lm_head.weight"


def test_unexpected_tensor(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path)
    rewrite(path, lambda tensors: tensors.update({"model.layers.1.self_attn.q_norm.weight": torch.ones(16)}))
    error = refusal(path)
    assert error.field == "model.layers.1.self_attn.q_norm.weight" and SINGLE_FILE in str(error)


def test_wrong_shape(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path)
    rewrite(path, lambda tensors: tensors.update({NORM: torch.ones(65)}))
    error = refusal(path)
    assert error.field == NORM and error.value == [65] and "[64]" in str(error) and SINGLE_FILE in str(error)


def test_wrong_type(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path)
    rewrite(path, lambda tensors: tensors.update({NORM: torch.ones(64, dtype=torch.int8)}))
    error = refusal(path)
    assert error.field == NORM and error.value == "I8"


def test_stored_buffers_of_old_versions_are_no_weights(tmp_path: Path) -> None:
    path = make_checkpoint("gpt2", tmp_path)
    want = logits(load(path))
    rewrite(path, lambda tensors: tensors.update({"transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4)}))
    assert torch.equal(logits(load(path)), want)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_names_without_the_model_prefix(kind: str, tmp_path: Path) -> None:
    path = make_checkpoint(kind, tmp_path)
    want = logits(load(path))

    def strip(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.split(".", 1)[1]] = tensors.pop(name)

    rewrite(path, strip)
    assert torch.equal(logits(load(path)), want)


def test_a_stored_head_is_used_even_if_the_config_ties_it(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path)
    want = logits(load(path))
    embedding = load_file(path / SINGLE_FILE)["model.embed_tokens.weight"]
    rewrite(path, lambda tensors: tensors.update({"lm_head.weight": embedding.clone()}))
    assert torch.equal(logits(load(path)), want)
    rewrite(path, lambda tensors: tensors.update({"lm_head.weight": 2 * embedding}))
    torch.testing.assert_close(logits(load(path)), 2 * want)


@pytest.mark.parametrize("keep", [0, 5, 100, 10_000, -1])
def test_truncated_file(keep: int, tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path)
    data = (path / SINGLE_FILE).read_bytes()
    (path / SINGLE_FILE).write_bytes(data[:keep])
    error = refusal(path)
    assert "truncated" in error.reason and SINGLE_FILE in f"{error.field} {error.reason}"


def test_hostile_headers(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path)
    for header in (b"[1]", b"nonsense", b'{"a": 1}', b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [9, 2]}}',
                   b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 2]}}'):  # fmt: skip
        (path / SINGLE_FILE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
        assert isinstance(refusal(path), ModelError)
    (path / SINGLE_FILE).write_bytes((1 << 60).to_bytes(8, "little") + bytes(64))
    assert "truncated" in refusal(path).reason


def sharded(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    path = make_checkpoint("llama", tmp_path, max_shard_size="60KB")
    return path, json.loads((path / INDEX_FILE).read_text())["weight_map"]


def write_index(path: Path, weight_map: object) -> None:
    (path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


def test_missing_shard(tmp_path: Path) -> None:
    path, placed = sharded(tmp_path)
    (path / placed[NORM]).unlink()
    assert refusal(path).field == placed[NORM]


def test_shard_without_the_tensor_that_the_index_promises(tmp_path: Path) -> None:
    path, placed = sharded(tmp_path)
    other = next(file for file in placed.values() if file != placed[NORM])
    write_index(path, placed | {NORM: other})
    error = refusal(path)
    assert error.field == NORM and error.value == other


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "pytorch_model.bin", 7])
def test_index_may_not_point_elsewhere(file: object, tmp_path: Path) -> None:
    path, placed = sharded(tmp_path)
    write_index(path, placed | {NORM: file})
    assert refusal(path).value == file


@pytest.mark.parametrize("weight_map", [None, {}, [], "x"])
def test_malformed_index(weight_map: object, tmp_path: Path) -> None:
    path, _ = sharded(tmp_path)
    write_index(path, weight_map)
    assert "weight_map" in refusal(path).field


def test_pickled_weights_are_refused_by_name(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path)
    (path / SINGLE_FILE).rename(path / "pytorch_model.bin")
    error = refusal(path)
    assert error.value == "pytorch_model.bin" and "safetensors" in str(error)


def test_no_weights_and_no_directory(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path)
    (path / SINGLE_FILE).unlink()
    assert SINGLE_FILE in str(refusal(path))
    with pytest.raises(ModelError, match="no such"):
        Checkpoint.open(tmp_path / "nowhere")
    assert VOCAB_SIZE % 2  # the tests of padded vocabularies rely on it
