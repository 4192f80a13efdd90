"""Opens the weights of a model directory: safetensors, or else a GGUF file that gguf/directory.py put there."""

from pathlib import Path

from worker_proc.errors import ModelError
from worker_proc.gguf.names import GgufModel, gguf_files
from worker_proc.weights import INDEX_FILE, SINGLE_FILE, Checkpoint, TensorEntry


def open_checkpoint(directory: Path) -> Checkpoint:
    """Headers only. Raises ModelError as `Checkpoint.open` and `GgufModel.open` do."""
    files = gguf_files(directory)
    if not files or any((directory / name).is_file() for name in (SINGLE_FILE, INDEX_FILE)):
        return Checkpoint.open(directory)
    tensors: dict[str, TensorEntry] = {}
    for entry in GgufModel.open(files).entries():
        if entry.name in tensors:
            raise ModelError(entry.name, entry.file.name, "two tensors of the file are this one")
        tensors[entry.name] = entry
    return Checkpoint(tensors)
