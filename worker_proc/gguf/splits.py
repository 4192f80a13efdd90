"""How byte-level BPEs split text before they merge, by their names in GGUF files (`tokenizer.ggml.pre`). The regular
expressions are those of the models' own tokenizers; which name means which follows llama.cpp (src/llama-vocab.cpp).
"""

from dataclasses import dataclass, replace

from worker_proc.errors import ModelError
from worker_proc.gguf.header import Header

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"


@dataclass(frozen=True, slots=True)
class Splits:
    """`words` is a regular expression of what is merged by itself, "" is GPT-2's. With `digits`, each digit is alone
    before it. Files without `tokenizer.ggml.add_bos_token` mean `bos`."""

    words: str = ""
    digits: bool = False
    ignore_merges: bool = False
    bos: bool = False


_GPT2 = Splits()
_QWEN2 = Splits(rf"{_CONTRACTIONS}|{_BEFORE}\p{{L}}+|\p{{N}}|{_REST}")
_QWEN35 = Splits(rf"{_CONTRACTIONS}|{_BEFORE}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}")
_LLAMA3 = Splits(rf"{_CONTRACTIONS}|{_BEFORE}\p{{L}}+|\p{{N}}{{1,3}}|{_REST}", ignore_merges=True, bos=True)
_TEKKEN = Splits(
    rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
    ignore_merges=True, bos=True,
)  # fmt: skip
_LLAMA3_PLAIN = replace(_LLAMA3, ignore_merges=False, bos=False)
_GPT4O = Splits(
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_BEFORE}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_DIGITS = Splits(digits=True)
SPLITS = {
    "gpt-2": _GPT2, "olmo": _GPT2, "smollm": _DIGITS, "refact": _DIGITS, "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2,
    "qwen35": _QWEN35,
    "llama3": _LLAMA3, "llama-v3": _LLAMA3, "llama-bpe": _LLAMA3, "falcon3": _LLAMA3, "lfm2": _LLAMA3,
    "dbrx": _LLAMA3_PLAIN,
    "smaug-bpe": _LLAMA3_PLAIN, "tekken": _TEKKEN, "gpt-4o": _GPT4O,
}  # fmt: skip

MERGED = "gemma4"  # SentencePiece's BPE with a list of merges in place of scores


def splits_of(header: Header) -> Splits | None:
    """None for SentencePiece, which does not split. Raises ModelError for other tokenizers, and unknown ways."""
    model = header.settings.get("tokenizer.ggml.model")
    if model in ("llama", MERGED):
        return None
    if model != "gpt2":
        reason = "the tokenizer must be a byte-level BPE (gpt2) or SentencePiece's BPE (llama, gemma4)"
        raise ModelError("tokenizer.ggml.model", model, reason)
    name = header.settings.get("tokenizer.ggml.pre", "default")
    if name == "default" and str(header.settings.get("general.architecture")).startswith("qwen"):
        return _QWEN2  # older files do not say so, and these models have one way
    if name not in SPLITS:
        reason = f"how its tokenizer splits text must be one of {', '.join(SPLITS)}"
        raise ModelError("tokenizer.ggml.pre", name, reason)
    return SPLITS[name]
