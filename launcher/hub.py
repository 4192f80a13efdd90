"""Models by their id on the Hugging Face hub, such as Qwen/Qwen3-0.6B or Qwen/Qwen3-0.6B@main, and GGUF files there by
what their names end with, such as Qwen/Qwen3-0.6B-GGUF:Q8_0 (as with llama.cpp, Ollama and vLLM).

Only a model that is named this way, and is no file or directory here, is ever fetched: its weights as safetensors, its
configuration, tokenizer and chat template, or the one GGUF file that is named. Nothing that could hold code is. What
was fetched before is taken from huggingface_hub's cache, whose place, endpoint and token are its own settings
(HF_HOME, HF_ENDPOINT, HF_TOKEN).
"""

import glob
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from launcher.gguf import is_gguf

FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_NAME = r"[A-Za-z0-9][\w.-]{0,95}"
_ID = re.compile(rf"({_NAME}/{_NAME})(?::([A-Za-z0-9][\w./-]{{0,159}}))?(?:@([\w.-][\w./-]{{0,127}}))?")
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}")
_LISTED = 20  # GGUF files that a message names


class HubError(Exception):
    """A hub id whose model cannot be had, and why."""


class HubId(NamedTuple):
    """`which` is a GGUF file of the repository, or how its name ends; None is its safetensors."""

    repo: str
    which: str | None = None
    revision: str | None = None

    @property
    def name(self) -> str:
        """Under which it is served."""
        return f"{self.repo}:{self.which}" if self.which else self.repo


def split_id(model: str) -> HubId | None:
    """The parts of a hub id; None where `model` is not one. What exists here is never taken for one."""
    match = _ID.fullmatch(model)
    return None if match is None or Path(model).exists() else HubId(*match.groups())


def fetch(model: HubId) -> Path:
    """The directory of a model's snapshot, or its GGUF file (the first of several), fetched with a progress bar where
    it is not cached. Raises HubError."""
    from huggingface_hub import snapshot_download  # takes half a second, for hub ids only

    with _told(model):
        if model.which is not None:
            files = choose_gguf(_names(model), model.which)
            patterns = [glob.escape(file) for file in files]
            return Path(snapshot_download(model.repo, revision=model.revision, allow_patterns=patterns)) / files[0]
        rest = ["*/*", "consolidated*"]  # what lies in folders is other formats', as are Mistral's own files
        path = Path(
            snapshot_download(model.repo, revision=model.revision, allow_patterns=list(FILES), ignore_patterns=rest)
        )
        if not any(path.glob("*.safetensors")):
            files = list(filter(_is_model, _names(model)))
            if files:
                raise HubError(f"it holds GGUF files: say which, such as {model.repo}:{_ending(files)}")
    if not (path / "config.json").is_file():
        raise HubError("it holds no config.json")
    if not any(path.glob("*.safetensors")):
        raise HubError("it holds no weights as safetensors; other formats can run code and are never loaded")
    return path


def choose_gguf(names: Sequence[str], which: str) -> list[str]:
    """Of a repository's files, the GGUF file (or all parts of it, the first one first) that `which` names, or whose
    name ends with it, whatever the case: of several, the shortest. Raises HubError that says what there is."""
    models: dict[str, list[str]] = {}
    for name in sorted(filter(_is_model, names)):
        models.setdefault(_stem(name), []).append(name)
    wanted = re.compile(rf"(?:.*[-_./])?{re.escape(_stem(which))}", re.IGNORECASE)
    found = [stem for stem in models if wanted.fullmatch(stem)]
    if not found:
        there = ", ".join(list(models)[:_LISTED]) + (", ..." if len(models) > _LISTED else "")
        raise HubError(f"it holds no GGUF file that is {which} or ends so; there are: {there or 'none'}")
    return models[min(found, key=len)]


def _is_model(name: str) -> bool:
    """Whether a file holds a language model: mmproj files hold what others need for images."""
    return is_gguf(name) and not Path(name).name.lower().startswith("mmproj")


def _stem(name: str) -> str:
    """Without suffix, and without which part it is."""
    stem = str(Path(name).with_suffix("")) if is_gguf(name) else name
    match = _SHARD.fullmatch(stem)
    return stem if match is None else match[1]


def _ending(files: Sequence[str]) -> str:
    """How somebody would name one of these GGUF files."""
    return re.split(r"[-./]", _stem(min(files, key=len)))[-1]


def _names(model: HubId) -> list[str]:
    """The files of a repository; where the hub cannot be reached, those that were fetched before."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        return [file.rfilename for file in HfApi().model_info(model.repo, revision=model.revision).siblings or ()]
    except (RepositoryNotFoundError, RevisionNotFoundError):
        raise
    except Exception as error:  # which kinds there are, depends on the library's versions
        nothing: list[str] = []  # but where files are that were fetched
        try:
            here = Path(
                snapshot_download(model.repo, revision=model.revision, allow_patterns=nothing, local_files_only=True)
            )
        except (OSError, ValueError):
            raise _not_fetched(error) from None
        return [str(file.relative_to(here)) for file in here.rglob("*") if file.is_file()]


@contextmanager
def _told(model: HubId) -> Iterator[None]:
    """Failures of the library in a user's words, as HubError."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        yield
    except GatedRepoError:
        raise HubError("its owner asks for consent first: accept on its page and set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise HubError("there is no such model on the hub, or it is private and HF_TOKEN does not open it") from None
    except RevisionNotFoundError:
        raise HubError(f"it has no revision {model.revision}") from None
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise _not_fetched(error) from None


def _not_fetched(error: Exception) -> HubError:
    problem = str(error).strip().split("\n")[0]
    return HubError(f"nothing of that name is here, and fetching it from the hub failed: {problem[:300]}")
