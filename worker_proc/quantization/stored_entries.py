"""Finds the tensors that a stored projection consists of."""

from worker_proc.errors import ModelError
from worker_proc.models.loading import Part
from worker_proc.weights import Checkpoint, TensorEntry

SCALE_DTYPES = ("F16", "BF16", "F32")


def module_of(part: Part) -> str:
    """The module whose weight `part` is."""
    return part.name.removesuffix(".weight")


def find_entry(
    checkpoint: Checkpoint, name: str, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[str, ...]
) -> TensorEntry:
    """The tensor `name`. Raises ModelError if it is missing, or has none of `shapes` or `dtypes`."""
    entry = checkpoint.tensors.get(name)
    if entry is None:
        raise ModelError(name, None, "the checkpoint lacks this tensor")
    if entry.shape not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise ModelError(name, list(entry.shape), f"shape in {entry.file.name} should be {wanted}")
    if entry.dtype not in dtypes:
        raise ModelError(name, entry.dtype, f"type in {entry.file.name} should be {' or '.join(dtypes)}")
    return entry
