"""Models by their id on the Hugging Face hub, such as Qwen/Qwen3-0.6B or Qwen/Qwen3-0.6B@main.

Only a model that is named this way, and is no directory here, is ever fetched: its weights as safetensors, its
configuration, tokenizer and chat template. Nothing that could hold code is. What was fetched before is taken from
huggingface_hub's cache, whose place, endpoint and token are its own settings (HF_HOME, HF_ENDPOINT, HF_TOKEN).
"""

import re
from pathlib import Path

FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_ID = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@([\w.-][\w./-]{0,127}))?")


class HubError(Exception):
    """A hub id whose model cannot be had, and why."""


def split_id(model: str) -> tuple[str, str | None] | None:
    """Repository and revision of a hub id; None where `model` is not one. A local directory is never taken for one."""
    match = _ID.fullmatch(model)
    return None if match is None or Path(model).exists() else (match[1], match[2])


def fetch(repo: str, revision: str | None) -> Path:
    """The directory of a model's snapshot, fetched with a progress bar where it is not cached. Raises HubError."""
    from huggingface_hub import snapshot_download  # takes half a second, for hub ids only
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        path = Path(snapshot_download(repo, revision=revision, allow_patterns=list(FILES), ignore_patterns=["*/*"]))
    except GatedRepoError:
        raise HubError("its owner asks for consent first: accept on its page and set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise HubError("there is no such model on the hub, or it is private and HF_TOKEN does not open it") from None
    except RevisionNotFoundError:
        raise HubError(f"it has no revision {revision}") from None
    except (HfHubHTTPError, OSError, ValueError) as error:
        problem = str(error).strip().split("\n")[0]
        raise HubError(f"not a directory here, and fetching it from the hub failed: {problem[:300]}") from None
    if not (path / "config.json").is_file():
        raise HubError("it holds no config.json")
    if not any(path.glob("*.safetensors")):
        raise HubError("it holds no weights as safetensors; other formats can run code and are never loaded")
    return path
