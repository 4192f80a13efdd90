"""llama.cpp's own tokens and logits for a GGUF file, for bench/gguf_check.py, which runs this in an environment with
llama-cpp-python and numpy.

    python bench/peers/llama_cpp_answers.py FILE.gguf TEXTS.json TOKENS.json IDS.json LOGITS.npy
"""

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _quiet(level: int, text: bytes, user_data: ctypes.c_void_p) -> None:
    pass


def main(file: str, texts: str, tokens: str, ids: str, logits: str) -> None:
    llama_cpp.llama_log_set(_quiet, ctypes.c_void_p(0))
    params = llama_cpp.llama_model_default_params()
    params.use_extra_bufts = False  # weights as they are stored: with AMX, 0.3.36 crashes on others
    model = llama_cpp.llama_model_load_from_file(file.encode(), params)
    vocabulary = llama_cpp.llama_model_get_vocab(model)
    found = [_tokens(vocabulary, text.encode()) for text in json.loads(Path(texts).read_text())]
    Path(tokens).write_text(json.dumps(found))
    np.save(logits, _logits(model, llama_cpp.llama_vocab_n_tokens(vocabulary), json.loads(Path(ids).read_text())))


def _tokens(vocabulary: Any, text: bytes) -> list[int]:
    """With what begins a text, and special tokens where they stand in it."""
    room = len(text) + 8
    buffer = (llama_cpp.llama_token * room)()
    count = llama_cpp.llama_tokenize(vocabulary, text, len(text), buffer, room, True, True)
    return list(buffer[:count])


def _logits(model: Any, size: int, ids: list[int]) -> np.ndarray:
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = 512
    context = llama_cpp.llama_init_from_model(model, params)
    batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for i, token in enumerate(ids):
        batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, i, 1
        batch.seq_id[i][0], batch.logits[i] = 0, True
    if llama_cpp.llama_decode(context, batch):
        raise RuntimeError("llama_decode failed")
    rows = [llama_cpp.llama_get_logits_ith(context, i) for i in range(len(ids))]
    return np.stack([np.ctypeslib.as_array(row, (size,)).copy() for row in rows])


if __name__ == "__main__":
    main(*sys.argv[1:])
