"""Whether a GGUF file means here what it means to llama.cpp: tokens of texts, and logits.

    python -m bench.gguf_check --llama-cpp VENV/bin/python FILE.gguf ...

VENV has llama-cpp-python and numpy. Exit code 1 where a token differs, or logits by more than 5 %: llama.cpp
rounds activations to 8 bits, and what multiplies bfloat16 to bfloat16.
"""

import json
import random
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import click
import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from bench.cpu_steps import PAGE_SIZE, make_step
from worker_proc.attention.reference import ReferenceAttention
from worker_proc.cpu.features import cpu_features
from worker_proc.cpu.library import load_library
from worker_proc.cpu.machine import num_cpus
from worker_proc.gguf.directory import directory_for
from worker_proc.kv_cache import KVCache
from worker_proc.models.registry import load_model
from worker_proc.parallel import TensorParallel

_ROOT = Path(__file__).resolve().parents[1]
_TOKENS = 64
_MOST_DIFFERENCE = 0.05
_WRITTEN = [
    "Hello world", "  two spaces", " lead", "é naïve 日本 \n\n\ttab", "def f(x):\n    return x+1234", "  ", "",
    "</s> hi</s>there <s>x", "word <unk> w", "<|im_start|>user\nhi<|im_end|>\n",
    "<bos><start_of_turn>user\nhi<end_of_turn>",
    "a" * 40, "1234567 12.5%", "I'm you'll DON'T\r\n\r\nx", "emoji 😀👍🏽 done", "camelCase HTMLParser",
]  # fmt: skip
_SIGNS = "aBcÉßñ 1٣२'\"\n\r\t .,-_/:@#日本語éक्षि🙂\u0301\u200d\u00a0ÀÈ"


def make_texts() -> list[str]:
    chance = random.Random(5)
    files = [*sorted((_ROOT / "docs").glob("*.md")), *sorted((_ROOT / "scheduler_proc").glob("*.py"))]
    lines = [line for file in files for line in file.read_text().splitlines(keepends=True)]
    some = ["".join(chance.sample(lines, 3)) for _ in range(60)]
    return [*_WRITTEN, *some, *("".join(chance.choices(_SIGNS, k=25)) for _ in range(120))]


def our_logits(directory: Path, ids: list[int]) -> Tensor:
    native = load_library(cpu_features().levels()[0])
    native.set_threads(num_cpus())
    model = load_model(
        directory, dtype=torch.bfloat16, device="cpu", tp=TensorParallel(), attention=ReferenceAttention(),
        native=native,
    )  # fmt: skip
    batch, pages = make_step(1, len(ids), len(ids), 0)
    batch = replace(batch, token_ids=torch.tensor(ids), logit_rows=torch.arange(len(ids)))
    return model.forward(batch, KVCache(model.kv_spec, pages, PAGE_SIZE))


@click.command(help=__doc__)
@click.option("--llama-cpp", "peer", required=True, help="A Python with llama-cpp-python.")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
def main(peer: str, files: tuple[Path, ...]) -> None:
    good = True
    texts = make_texts()
    for file in files:
        directory = directory_for(file)
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        size = json.loads((directory / "config.json").read_text())["vocab_size"]
        chance = random.Random(1)
        ids = [chance.randrange(8, min(size, 8000)) for _ in range(_TOKENS)]
        with tempfile.TemporaryDirectory() as temporary:
            names = ("texts.json", "tokens.json", "ids.json", "logits.npy")
            given, tokens, asked, logits = (Path(temporary) / name for name in names)
            given.write_text(json.dumps(texts))
            asked.write_text(json.dumps(ids))
            script = _ROOT / "bench" / "peers" / "llama_cpp_answers.py"
            subprocess.run([peer, script, file, given, tokens, asked, logits], check=True, stdin=subprocess.DEVNULL)
            theirs, want = json.loads(tokens.read_text()), torch.from_numpy(np.load(logits)).double()
        same = sum(tokenizer.encode(text).ids == wanted for text, wanted in zip(texts, theirs, strict=True))
        got = our_logits(directory, ids).double()
        difference = float((got - want).norm() / want.norm())
        first = int((got.argmax(1) == want.argmax(1)).sum())
        click.echo(
            f"{file.name}: tokens of {same} of {len(texts)} texts are the same, logits differ by {difference:.2%}, "
            f"the largest is the same for {first} of {_TOKENS}"
        )
        good = good and same == len(texts) and difference < _MOST_DIFFERENCE
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
