"""Small real tokenizers of the kinds that models use, made with the tokenizers library."""

import json
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, isn't it?",
    "Grüße aus Köln! Ça va? 你好，世界。 こんにちは 🙂🙃 👩‍👩‍👧",
    "def decode(tokens: list[int]) -> str:\n    return ''.join(tokens)  # don't",
    "One, two, three and four; five six seven. What's the time?",
]
SPECIAL = AddedToken("<|end|>", special=True)
BEGIN = AddedToken("<|begin|>", special=True)
ADDED = [AddedToken("<tool>", special=False), AddedToken("ordinary née added 🙂", special=False)]
EOS = 0  # SPECIAL, in `straddling`
_STRUCTURED = [
    '{"name": "Ann", "age": 31, "tags": ["a", "b"]}',
    '{"a":{"b":[1,2,3],"c":null},"d":true}\n',
    '[{"x": -1.5e3}, {"x": "é🙂\\n"}]',
    '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
    "<think>\nhm\n</think>\n\nyes no maybe",
]


def byte_level(vocab_size: int = 400) -> Tokenizer:
    """GPT-2 and Llama-3 style: BPE over bytes; BEGIN is added in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SPECIAL, BEGIN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES * 3, trainer)
    tokenizer.add_tokens(ADDED)
    begin = tokenizer.token_to_id(BEGIN.content)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN.content} $A", special_tokens=[(BEGIN.content, begin)]
    )
    return tokenizer


@cache
def straddling() -> Tokenizer:
    """Byte-level BPE without a split into words, so that tokens such as `", "` and `": [` come about, which straddle
    the parts of JSON."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=[SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_STRUCTURED * 3, trainer)
    assert tokenizer.token_to_id('":Ġ"') is not None, "tokens straddle"
    return tokenizer


def sentence_piece(kind: str = "llama") -> Tokenizer:
    """Llama-2 style: BPE over characters with byte fallback. `kind`: llama, gemma (no strip) or metaspace."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    tokenizer.decoder = {
        "llama": decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
        "gemma": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
        "metaspace": decoders.Metaspace(prepend_scheme="first"),
        "fallback-metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
        "strip-each": decoders.Sequence([decoders.ByteFallback(), decoders.Strip("▁", 2, 0)]),
    }[kind]
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<unk>", SPECIAL, BEGIN, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES * 3, trainer)
    # As in real files the byte tokens belong to the vocabulary, not to the special tokens.
    values = json.loads(tokenizer.to_str())
    values["added_tokens"] = [t for t in values["added_tokens"] if not t["content"].startswith("<0x")]
    tokenizer = Tokenizer.from_str(json.dumps(values))
    tokenizer.add_tokens(ADDED)
    return tokenizer


def word_piece(cleanup: bool = True) -> Tokenizer:
    """BERT style."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=cleanup)
    trainer = trainers.WordPieceTrainer(vocab_size=250, special_tokens=["[UNK]", SPECIAL], show_progress=False)
    tokenizer.train_from_iterator(SENTENCES * 3, trainer)
    tokenizer.add_tokens([*ADDED, "do not", "n't", "'s", " ' "])
    return tokenizer


def without_decoder() -> Tokenizer:
    tokenizer = word_piece()
    tokenizer.decoder = None
    return tokenizer


ALL_KINDS = {
    "byte-level": byte_level,
    "llama": sentence_piece,
    "gemma": lambda: sentence_piece("gemma"),
    "metaspace": lambda: sentence_piece("metaspace"),
    "fallback-metaspace": lambda: sentence_piece("fallback-metaspace"),
    "strip-each": lambda: sentence_piece("strip-each"),
    "word-piece": word_piece,
    "word-piece-plain": lambda: word_piece(cleanup=False),
    "no-decoder": without_decoder,
}

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tokenizer(path: Path, tokenizer: Tokenizer, chat_template: str | None = CHATML) -> None:
    """The tokenizer files of a model directory."""
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text('{"bos_token": "<|begin|>", "eos_token": {"content": "<|end|>"}}')
    if chat_template is not None:
        (path / "chat_template.jinja").write_text(chat_template, encoding="utf-8")


UNSUPPORTED = {
    "CTC": decoders.CTC(),
    "BPEDecoder": decoders.BPEDecoder(),
    "Regex": decoders.Replace(Regex("a+"), "b"),
    '"String": ""': decoders.Replace("", "b"),
    "stop": decoders.Strip(" ", 1, 1),
    "after the tokens are fused": decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "b")]),
}
