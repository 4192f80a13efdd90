"""Opens the weights of a model directory: safetensors, or else a GGUF file that gguf/directory.py put there. Of
multimodal models, those of the language model alone."""

from pathlib import Path

from worker_proc.errors import ModelError
from worker_proc.gguf.names import GgufModel, gguf_files
from worker_proc.models.language_part import is_multimodal, language_tensors
from worker_proc.weights import INDEX_FILE, SINGLE_FILE, Checkpoint, TensorEntry, read_json


def open_checkpoint(directory: Path) -> Checkpoint:
    """Headers only. Raises ModelError as `Checkpoint.open` and `GgufModel.open` do."""
    files = gguf_files(directory)
    if not files or any((directory / name).is_file() for name in (SINGLE_FILE, INDEX_FILE)):
        checkpoint = Checkpoint.open(directory)
        if is_multimodal(read_json(directory / "config.json")):
            return Checkpoint(language_tensors(checkpoint.tensors))
        return checkpoint
    tensors: dict[str, TensorEntry] = {}
    for entry in GgufModel.open(files).entries():
        if entry.name in tensors:
            raise ModelError(entry.name, entry.file.name, "two tensors of the file are this one")
        tensors[entry.name] = entry
    return Checkpoint(tensors)
