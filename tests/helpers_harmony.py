"""A tiny model with random weights that has the special tokens and a chat template of OpenAI's harmony format."""

import json
from functools import cache
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from common.harmony import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START
from tests.helpers_models import make_checkpoint, make_tokenizer
from tests.helpers_templates import HARMONY

MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, RETURN, CALL)
ENDS = (RETURN, CALL)


@cache
def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)}, replace_extra_special_tokens=False)
    tokenizer.chat_template = HARMONY
    return tokenizer


def token_id(mark: str) -> int:
    """The token of one of `MARKS`."""
    return int(_tokenizer().convert_tokens_to_ids(mark))


def make_harmony_checkpoint(path: Path, *, seed: int = 0) -> Path:
    """Write a checkpoint of gpt-oss's architecture whose answers end with the tokens of `ENDS`."""
    make_checkpoint("gpt-oss", path, seed=seed, max_position_embeddings=2048)
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(path)
    ends = [tokenizer.eos_token_id, *map(token_id, ENDS)]
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return path
