"""The raw bytes that a token stands for, which need not be whole characters."""

import json
from functools import lru_cache

from tokenizers import Tokenizer

from common.messages import MAX_TOKEN_BYTES
from tokenizer_proc.decoder_stages import fallback_byte, to_bytes
from tokenizer_proc.text_decoder import TextDecoders


class TokenBytes:
    """Makes bytes of token ids: the bytes of a byte-level token, the one byte of a token such as <0xE2>, and the UTF-8
    text of others as it is after a prompt, special tokens included. Ids that the tokenizer does not know have none, and
    what a token has beyond MAX_TOKEN_BYTES is cut off."""

    def __init__(self, tokenizer: Tokenizer, decoders: TextDecoders):
        self._tokenizer = tokenizer
        self._decoders = decoders
        decoder = tokenizer.decoder
        kinds = _kinds(None if decoder is None else json.loads(decoder.__getstate__()))
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self.of = lru_cache(maxsize=2**15)(self._of)

    def _of(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            return to_bytes(token)[:MAX_TOKEN_BYTES]
        byte = fallback_byte(token) if self._byte_fallback else None
        if byte is not None:
            return bytes([byte])
        decoder = self._decoders.new(skip_special_tokens=False, continues=True)
        return (decoder.push(token_id) + decoder.flush()).encode()[:MAX_TOKEN_BYTES]


def _kinds(section: dict[str, object] | None) -> set[str]:
    """The types of all parts of a tokenizer.json's decoder."""
    if section is None:
        return set()
    parts = section.get("decoders", [])
    assert isinstance(parts, list)
    return {str(section["type"])}.union(*(_kinds(part) for part in parts))
