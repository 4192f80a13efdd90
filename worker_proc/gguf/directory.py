"""A model directory for a GGUF file, in the user's cache.

It holds a link to the file (or to each of several), config.json from the file's settings, and the file's tokenizer and
chat template (`tokenizer`). Nothing of the weights is copied.
"""

import hashlib
import json
import tempfile
from pathlib import Path

from common.user_cache import CacheError, cache_directory, make_private
from worker_proc.errors import ModelError
from worker_proc.gguf.config import config_of, eos_token_ids
from worker_proc.gguf.header import Header
from worker_proc.gguf.names import SINGLE_FILE, GgufModel, shard_names, shards_of
from worker_proc.gguf.splits import splits_of
from worker_proc.gguf.tokenizer import write_tokenizer

_FORMAT = "2"  # of these directories; another number makes them anew


class GgufError(Exception):
    """A GGUF file that cannot be served, and why."""


def directory_for(file: Path, cache: Path | None = None) -> Path:
    """The model directory, made where it is not there yet. Raises GgufError."""
    try:
        real = file.resolve()  # beside it are the other parts, but in a cache that keeps files by their digests
        files = shards_of(real if real.suffix.lower() == ".gguf" else file.absolute())
        model = GgufModel.open(files)
        config = config_of(model.header, model.rope_factors())
        for _ in model.entries():  # every tensor is known
            pass
        splits_of(model.header)
        root = cache if cache is not None else cache_directory("gguf")
        make_private(root)
        directory = root / f"{file.stem}-{_key(files)}"
        if directory.is_dir():
            return directory
        with tempfile.TemporaryDirectory(prefix="new-", dir=root) as temporary:
            made = Path(temporary) / "model"
            made.mkdir(mode=0o700)
            _fill(made, files, config, model.header)
            try:
                made.rename(directory)
            except OSError:
                if not directory.is_dir():  # else another start was faster
                    raise
    except ModelError as error:
        raise GgufError(str(error)) from None
    except (CacheError, OSError) as error:
        raise GgufError(f"its model directory cannot be made: {error}") from None
    return directory


def _fill(directory: Path, files: list[Path], config: dict[str, object], header: Header) -> None:
    names = [SINGLE_FILE] if len(files) == 1 else shard_names("model", len(files))
    for name, file in zip(names, files, strict=True):
        (directory / name).symlink_to(file)
    tokens = write_tokenizer(files[0], directory)
    config = {**config, "eos_token_id": sorted({*eos_token_ids(header), *tokens}) or None}
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def _key(files: list[Path]) -> str:
    digest = hashlib.sha256(_FORMAT.encode())
    for file in files:
        found = file.stat()
        digest.update(f"\0{file}\0{found.st_size}\0{found.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]
