"""What tensors of GGUF files are called in Hugging Face checkpoints, and what llama.cpp's converter did to them."""

import math
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker_proc.errors import ModelError
from worker_proc.gguf.architectures import Architecture, architecture_of
from worker_proc.gguf.header import Header, StoredTensor, read_header
from worker_proc.gguf.rope import Factors
from worker_proc.gguf.settings import Settings, layers_of
from worker_proc.weights import TensorEntry

SINGLE_FILE = "model.gguf"
SHARD = re.compile(r"(?P<stem>.+)-(?P<which>\d{5})-of-(?P<count>\d{5})\.gguf")
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_OUTSIDE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_OUTSIDE |= {"output.weight": "lm_head.weight"}
_OUTSIDE |= {"token_embd_norm.weight": "model.embedding_norm.weight"}  # LFM2's name for the norm before the head
_OUTSIDE |= {  # inputs of layers of Gemma 4
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
_GATES_AND_UPS = "ffn_gate_up_exps.weight"  # all gates of an expert before its ups
_EXPERTS = re.compile(r"(ffn_\w+)_exps\.(weight|bias)")
_EXPERT = re.compile(r"(ffn_\w+)\.(\d+)\.weight")  # a tensor each, in files of early 2024 and before


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A model of one or several files. `header` has the settings of the first, and the tensors of all."""

    header: Header
    files: dict[str, Path]  # by tensor

    @classmethod
    def open(cls, paths: list[Path]) -> "GgufModel":
        """Raises ModelError as `read_header` does, and for a tensor that two files have."""
        headers = [read_header(path) for path in paths]
        files: dict[str, Path] = {}
        for path, header in zip(paths, headers, strict=True):
            for tensor in header.tensors:
                if tensor.name in files:
                    raise ModelError(tensor.name, path.name, f"the tensor is also in {files[tensor.name].name}")
                files[tensor.name] = path
        return cls(Header(headers[0].settings, tuple(t for header in headers for t in header.tensors)), files)

    def rope_factors(self) -> Factors:
        """What frequencies are divided by, where the file says so by tensors. Raises ModelError for another type."""
        names = architecture_of(self.header).factors
        return {tensor.name: self._vector(tensor) for tensor in self.header.tensors if tensor.name in names}

    def _vector(self, tensor: StoredTensor) -> list[float]:
        if tensor.kind != "F32" or len(tensor.shape) != 1 or tensor.nbytes > 2**16:
            raise ModelError(tensor.name, [tensor.kind, *tensor.shape], "must be a vector in F32")
        with self.files[tensor.name].open("rb") as file:
            file.seek(tensor.begin)
            return list(array("f", file.read(tensor.nbytes)))

    def entries(self) -> Iterator[TensorEntry]:
        """The tensors under their names in Hugging Face's checkpoints. Raises ModelError for one that is unknown."""
        architecture, settings = architecture_of(self.header), Settings(self.header)
        if architecture.other_layers:  # from then on, all layers have the heads of keys that some have
            settings.attending(layers_of(settings))
        for tensor in self.header.tensors:
            if tensor.name not in architecture.factors:
                yield from _entries(architecture, settings, tensor, self.files[tensor.name])


def gguf_files(directory: Path) -> list[Path]:
    """The files of a model in a directory, none where there are none. Raises ModelError where one is missing."""
    if (directory / SINGLE_FILE).is_file():
        return [directory / SINGLE_FILE]
    shards = [file for file in sorted(directory.glob("model-*.gguf")) if SHARD.fullmatch(file.name)]
    return shards_of(shards[0]) if shards else []


def shards_of(file: Path) -> list[Path]:
    """All files of the model that `file` is, or is the first of. Raises ModelError where one is missing."""
    match = SHARD.fullmatch(file.name)
    if match is None:
        return [file]
    files = [file.with_name(name) for name in shard_names(match["stem"], int(match["count"]))]
    for part in files:
        if not part.is_file():
            raise ModelError(part.name, str(file), f"one of the {len(files)} files of this model is missing")
    return files


def shard_names(stem: str, count: int) -> list[str]:
    return [f"{stem}-{which:05}-of-{count:05}.gguf" for which in range(1, count + 1)]


def _entries(architecture: Architecture, settings: Settings, tensor: StoredTensor, file: Path) -> Iterator[TensorEntry]:
    entry = TensorEntry(tensor.name, file, tensor.kind, tensor.shape, tensor.begin, tensor.nbytes)
    if tensor.name in _OUTSIDE:
        yield entry.renamed(_OUTSIDE[tensor.name], **_undone(architecture, settings, entry, tensor.name))
        return
    match = _LAYER.fullmatch(tensor.name)
    if match is None:
        raise ModelError(tensor.name, list(tensor.shape), f"unknown tensor in {file.name}")
    base, rest = f"model.layers.{match[1]}.", match[2]
    if int(match[1]) >= layers_of(settings):  # guesses further tokens
        return
    experts, known = list(_of_experts(architecture, entry, rest, base)), architecture.layer_names()
    if experts:
        yield from experts
        return
    if rest in known:
        yield entry.renamed(base + known[rest], **_undone(architecture, settings, entry, rest))
        return
    module, _, kind = rest.rpartition(".")
    if module not in known or kind not in ("weight", "bias"):
        raise ModelError(tensor.name, list(tensor.shape), f"unknown tensor in {file.name}")
    yield entry.renamed(f"{base}{known[module]}.{kind}", **_undone(architecture, settings, entry, module))


def _of_experts(architecture: Architecture, entry: TensorEntry, rest: str, base: str) -> Iterator[TensorEntry]:
    """Those that a tensor of a layer holds; none where it is another one."""
    if (single := _EXPERT.fullmatch(rest)) and single[1] in architecture.experts:
        name = architecture.experts[single[1]].format(expert=int(single[2]))
        yield entry.renamed(f"{base}{name}.weight")
    if (several := _EXPERTS.fullmatch(rest)) and several[1] in architecture.experts and len(entry.shape) > 1:
        for expert in range(entry.shape[0]):
            name = architecture.experts[several[1]].format(expert=expert)
            yield entry.of_stack((expert, entry.shape[0])).renamed(f"{base}{name}.{several[2]}")
    if rest == _GATES_AND_UPS and architecture.experts and len(entry.shape) == 3 and entry.shape[1] % 2 == 0:
        count, rows, width = entry.shape
        halves = entry.renamed(entry.name, shape=(2 * count, rows // 2, width))
        for part in range(2 * count):
            name = architecture.experts[("ffn_gate", "ffn_up")[part % 2]].format(expert=part // 2)
            yield halves.of_stack((part, 2 * count)).renamed(f"{base}{name}.weight")


def _undone(architecture: Architecture, settings: Settings, entry: TensorEntry, name: str) -> dict[str, Any]:
    """What is to be changed of an entry so that it is what the checkpoint has."""
    if architecture.turned and name in ("attn_q", "attn_k"):
        return {"heads": settings.heads(keys=name == "attn_k")}
    if name == "ssm_a":
        return {"logarithm": True, "shape": entry.shape[:1]}
    if name in ("ssm_d", "ssm_norm"):  # of a column, or of groups
        return {"shape": (math.prod(entry.shape),)}
    if name in ("ssm_conv1d", "shortconv.conv") and len(entry.shape) == 2:
        return {"shape": (entry.shape[0], 1, entry.shape[1])}
    if name == "ffn_gate_inp_shexp" and len(entry.shape) == 1:
        return {"shape": (1, *entry.shape)}
    return {"shift": -architecture.norm_offset} if "norm" in name else {}
