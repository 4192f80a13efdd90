"""Which tokens end an answer. Needs neither torch nor the tokenizer, only what its files say."""

from pathlib import Path
from typing import Any

from common.messages.types import MAX_END_TOKENS
from common.sampling_params import MAX_TOKEN_ID
from worker_proc.errors import ModelError
from worker_proc.models.config_fields import Config
from worker_proc.models.families import FAMILIES
from worker_proc.weights import read_json


def eos_token_ids(directory: Path, config: Config) -> tuple[int, ...]:
    """Those that generation_config.json names, which is what generation follows in transformers, else those of the
    older place, config.json, or of the family's configuration class; and the tokenizer's own, at which other servers
    stop as well (vLLM, SGLang). Raises ModelError for what is no token id."""
    value = _read(directory / "generation_config.json").get("eos_token_id")
    if value is None:
        family = FAMILIES.get(config["model_type"])
        value = config.get("eos_token_id", family.defaults.get("eos_token_id") if family is not None else None)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    own = _tokenizer_end(directory)
    found = ids if own is None or own in ids else [*ids, own]
    if not all(type(token) is int and 0 <= token <= MAX_TOKEN_ID for token in found):
        raise ModelError("eos_token_id", found, f"must be a token id up to {MAX_TOKEN_ID} or a list of them")
    if len(found) > MAX_END_TOKENS:
        raise ModelError("eos_token_id", found, f"{len(found)} tokens end an answer, at most {MAX_END_TOKENS} may")
    return tuple(found)


def _tokenizer_end(directory: Path) -> int | None:
    """None where the tokenizer has no end, and where only its vocabulary in another format knows the id."""
    config = _read(directory / "tokenizer_config.json")
    end = _content(config.get("eos_token")) or _content(_read(directory / "special_tokens_map.json").get("eos_token"))
    if end is None:
        return None
    added = config.get("added_tokens_decoder")  # first, since tokenizer.json can take a quarter of a second
    for token, entry in added.items() if isinstance(added, dict) else ():
        if _content(entry) == end and token.isdecimal():
            return int(token)
    tokenizer = _read(directory / "tokenizer.json")
    entries = tokenizer.get("added_tokens")
    for entry in entries if isinstance(entries, list) else ():
        if _content(entry) == end and isinstance(entry, dict) and isinstance(entry.get("id"), int):
            return int(entry["id"])
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    found = vocabulary.get(end) if isinstance(vocabulary, dict) else None  # Unigram has a list, and its end added
    return found if isinstance(found, int) else None


def _content(token: Any) -> str | None:
    """The text of a token that is given as it is or as an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _read(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}
