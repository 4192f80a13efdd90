"""What a model directory says about its tokenizer: tokenizer.json, tokenizer_config.json, its chat template."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, processors

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
PROCESSOR_TEMPLATE_FILE = "chat_template.json"
MISTRAL_FILE = "tekken.json"  # all that some of Mistral's models have
_MISTRAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


class TokenizerFilesError(RuntimeError):
    """The directory has no tokenizer that can be used."""


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a model directory, without the truncation and padding that its file may ask for.

    Without a tokenizer.json, transformers builds one from the older formats (it is imported only then). Code from the
    directory is never run.
    """
    if (path / TOKENIZER_FILE).is_file():
        try:
            tokenizer = Tokenizer.from_file(str(path / TOKENIZER_FILE))
        except Exception as error:  # the library raises plain Exception
            raise TokenizerFilesError(f"{path / TOKENIZER_FILE} cannot be read: {error}") from None
    else:
        tokenizer = _convert(path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _convert(path: Path) -> Tokenizer:
    if not path.is_dir():
        raise TokenizerFilesError(f"{path} is not a model directory")
    from transformers import AutoTokenizer

    try:
        slow = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        return _begun(slow.backend_tokenizer) if (path / MISTRAL_FILE).is_file() else slow.backend_tokenizer
    except Exception as error:
        problem = f"{path} has no {TOKENIZER_FILE}, and transformers cannot build one"
        raise TokenizerFilesError(f"{problem}: {error}") from None


def _begun(tokenizer: Tokenizer) -> Tokenizer:
    """Mistral's tokenizer with its first token before every text, as its models were trained with it and the
    tokenizer.json of their others says; transformers leaves it out."""
    first = _MISTRAL_TOKENS["bos_token"]
    number = tokenizer.token_to_id(first)
    if number is not None and tokenizer.encode("").ids != [number]:
        before, both = tokenizer.post_processor, f"{first}:0 $A:0 {first}:1 $B:1"
        template = processors.TemplateProcessing(f"{first} $A", both, [(first, number)])
        tokenizer.post_processor = template if before is None else processors.Sequence([before, template])
    return tokenizer


def longest_token(tokenizer: Tokenizer) -> int:
    """The number of characters of the longest token."""
    return max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=1)


def load_chat_template(path: Path) -> str | None:
    """The text of chat_template.jinja, else of tokenizer_config.json's `chat_template`: that one, or of several named
    ones the one named default; else that of chat_template.json, where models that also see had it. None when there is
    none."""
    file = path / TEMPLATE_FILE
    if file.is_file():
        return file.read_text(encoding="utf-8")
    for name in (CONFIG_FILE, PROCESSOR_TEMPLATE_FILE):
        template = _read_json(path / name).get("chat_template")
        if isinstance(template, list):
            named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
            template = named.get("default")
        if isinstance(template, str):
            return template
    return None


def load_special_tokens(path: Path) -> dict[str, str]:
    """The special tokens by the names that templates use: bos_token, eos_token and so on."""
    tokens: dict[str, str] = {}
    if (path / MISTRAL_FILE).is_file() and not (path / TOKENIZER_FILE).is_file():
        tokens |= _MISTRAL_TOKENS
    for name in ("special_tokens_map.json", CONFIG_FILE):
        values = _read_json(path / name)
        extra = values.get("extra_special_tokens")
        for key, value in [*values.items(), *(extra.items() if isinstance(extra, dict) else ())]:
            content = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(content, str):
                tokens[key] = content
    return tokens


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerFilesError(f"{file} cannot be read: {error}") from None
    return values if isinstance(values, dict) else {}
