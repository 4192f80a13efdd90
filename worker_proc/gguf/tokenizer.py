"""The tokenizer and chat template of a GGUF file: a byte-level BPE, or SentencePiece's with fallback to bytes, by
llama.cpp's rules (src/llama-vocab.cpp). transformers reads them too, but its releases differ in how they split text,
which tokens begin it, and which are found in it as they are.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from common.harmony import CALL, END, RETURN
from worker_proc.errors import ModelError
from worker_proc.gguf.header import Header, read_header
from worker_proc.gguf.splits import MERGED, Splits, splits_of

_SPECIAL = {2: True, 3: True, 4: False}  # by type, of tokens that are found in texts as they are: unknown, control, own
_KEEP_SPACES = ("<unk>", "<s>", "<|endoftext|>")  # Phi-3's other tokens take those behind them
_SHORT = {"padding": "pad", "unknown": "unk"}
_SPACE = "\u2581"  # as SentencePiece writes it
# Tokens that end a turn, as llama.cpp has them: files name one or two of a model's
_ENDS = (
    "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<end_of_turn>",
    "<turn|>", "<|tool_response>", "<eos>",
    CALL, RETURN,
)  # fmt: skip


def write_tokenizer(file: Path, directory: Path) -> set[int]:
    """Writes tokenizer.json, its settings and the chat template. Returns the ids of tokens that end an answer by their
    names. Raises ModelError for a vocabulary that is none."""
    header = read_header(file, vocabulary=True)
    try:
        return _write(header, directory)
    except (ModelError, OSError):
        raise
    except Exception as error:  # what tokenizers raises has no type of its own
        raise ModelError("tokenizer.ggml.tokens", file.name, f"not a tokenizer: {error}") from None


def _write(header: Header, directory: Path) -> set[int]:
    splits = splits_of(header)
    tokens, kinds = (_list(header, name) for name in ("tokens", "token_type"))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        raise ModelError("tokenizer.ggml.tokens", len(tokens), f"only {len(vocabulary)} of them differ")
    tokenizer = _sentencepiece(header, vocabulary) if splits is None else _byte_level(header, vocabulary, splits)
    _set_ends(tokenizer, header, splits is None or splits.bos)
    whole = [(token, _SPECIAL[kind]) for token, kind in zip(tokens, kinds, strict=False) if kind in _SPECIAL]
    strips = splits is None and header.settings.get("general.architecture") == "phi3"
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=special, rstrip=strips and token not in _KEEP_SPACES)
            for token, special in whole
        ]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name in ("bos", "eos", "padding", "unknown"):
        if (token := _named(header, name)) is not None:
            settings[f"{_SHORT.get(name, name)}_token"] = token
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    template = header.settings.get("tokenizer.chat_template")
    if isinstance(template, str):
        (directory / "chat_template.jinja").write_text(template)
    ends = {token for token, _ in whole if token in _ENDS}
    if {CALL, RETURN} <= ends:
        ends.discard(END)  # there it ends a message of an answer
    return {vocabulary[token] for token in ends}


def _list(header: Header, name: str) -> list[Any]:
    values = header.settings.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list):
        raise ModelError(f"tokenizer.ggml.{name}", values, "the file lacks this part of its tokenizer")
    return values


def _named(header: Header, name: str) -> str | None:
    """The token that the file names so, where it does."""
    index, tokens = header.settings.get(f"tokenizer.ggml.{name}_token_id"), _list(header, "tokens")
    return tokens[index] if isinstance(index, int) and 0 <= index < len(tokens) else None


def _byte_level(header: Header, vocabulary: dict[str, int], splits: Splits) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocabulary, _merges(header), ignore_merges=splits.ignore_merges))
    steps: list[pre_tokenizers.PreTokenizer] = []
    if splits.words:
        steps.append(pre_tokenizers.Split(Regex(splits.words), behavior="isolated"))
    if splits.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not splits.words))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(header: Header, vocabulary: dict[str, int]) -> Tokenizer:
    """Two tokens are merged as the file says, or where theirs is one, those with the highest score first."""
    listed = header.settings.get("tokenizer.ggml.model") == MERGED
    pairs = _merges(header) if listed else _merges_by_score(header, vocabulary)
    unknown = _named(header, "unknown")
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, byte_fallback=True, fuse_unk=True, unk_token=unknown))
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    back: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if header.settings.get("tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend(_SPACE))
        back.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(back)
    return tokenizer


def _merges(header: Header) -> list[Any]:
    """Pairs, as the file lists them."""
    return [tuple(merge.split(" ", 1)) for merge in _list(header, "merges")]


def _merges_by_score(header: Header, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    scores = _list(header, "scores")
    merges = []
    for token, index in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((-scores[index], vocabulary[left], vocabulary[right], left, right))
    merges.sort()
    return [(left, right) for *_, left, right in merges]


def _set_ends(tokenizer: Tokenizer, header: Header, bos: bool) -> None:
    """Tokens that begin and end every text, as the file asks for them, or is meant to where it does not say."""
    template = ["$A"]
    tokens = {}
    for name, default in (("bos", bos), ("eos", False)):
        token = _named(header, name)
        if token is None or not header.settings.get(f"tokenizer.ggml.add_{name}_token", default):
            continue
        tokens[token] = tokenizer.token_to_id(token)
        template = [token, *template] if name == "bos" else [*template, token]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=list(tokens.items()))
