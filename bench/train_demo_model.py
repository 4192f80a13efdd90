"""Train the demo model: a small Llama on Python's own documentation, on a CPU in about an hour.

    python -m bench.train_demo_model --out demo_model

The corpus comes from the running interpreter (see bench/demo_corpus.py), so nothing is downloaded. The same seed,
Python and library versions follow the same procedure; the last bits of the weights also depend on the number of
threads and on the processor. Writes a Hugging Face checkpoint: the weights with the best held-out loss, in bfloat16.
"""

import json
import math
import platform
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from tqdm import tqdm

from bench.demo_corpus import CHAT_TEMPLATE, END_OF_TEXT, SPECIAL_TOKENS, TURN_END, Corpus, build_corpus

hf: Any = transformers  # typed in part, and differently from version to version
VOCAB_SIZE = 3072
CONTEXT = 1024
SHORT_CONTEXT = 128  # most steps, because attention is then cheap and most docstrings fit
FULL_CONTEXT_EVERY = 8  # every eighth step trains all positions
CHECKPOINT_MB = 10
SAMPLE_PROMPTS = ("Return a copy of the string", "The with statement is used to", "Raise ValueError if")


def train_tokenizer(documents: Sequence[str]) -> Tokenizer:
    """Byte-level BPE: any bytes round-trip, and the special tokens have ids 0, 1, 2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pieces = (piece for document in documents for piece in _without_special_tokens(document))
    tokenizer.train_from_iterator(pieces, trainer)
    return tokenizer


def _without_special_tokens(document: str) -> list[str]:
    for token in SPECIAL_TOKENS:
        document = document.replace(token, "\0")
    return document.split("\0")


def save_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    """tokenizer.json and the settings transformers reads beside it."""
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "bos_token": None,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def build_model(tokenizer: Tokenizer) -> Any:
    """A LlamaForCausalLM of 2.7 million parameters; query and KV heads divide by two for tensor parallelism."""
    config = hf.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(END_OF_TEXT),
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
    )
    model = hf.LlamaForCausalLM(config)
    end_ids = [tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(TURN_END)]
    model.generation_config = hf.GenerationConfig(bos_token_id=None, eos_token_id=end_ids, pad_token_id=end_ids[0])
    return model


def add_dropout(model: nn.Module, probability: float) -> None:
    """Dropout on the embeddings and on what each block adds to the residual stream; Llama itself has none."""

    def drop(module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        return F.dropout(output, probability, training=module.training)

    for name, module in model.named_modules():
        if name.endswith(("embed_tokens", "o_proj", "down_proj")):
            module.register_forward_hook(drop)


def encode(tokenizer: Tokenizer, documents: Sequence[str]) -> list[Tensor]:
    """One int64 tensor [length] of token ids per document."""
    return [torch.tensor(e.ids) for e in tokenizer.encode_batch(list(documents), add_special_tokens=False)]


def token_stream(documents: Sequence[Tensor], generator: torch.Generator) -> Iterator[Tensor]:
    """Every document once per epoch, each epoch in a new order, without end."""
    while True:
        for index in torch.randperm(len(documents), generator=generator).tolist():
            yield documents[index]


def batches(documents: Sequence[Tensor], batch_tokens: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Token ids [rows, length + 1]: consecutive rows of the packed stream; the last column is only a target."""
    stream = token_stream(documents, generator)
    rest = torch.empty(0, dtype=torch.int64)
    step = 0
    while True:
        length = SHORT_CONTEXT if step % FULL_CONTEXT_EVERY else CONTEXT
        parts, have, need = [rest], len(rest), batch_tokens + 1
        while have < need:
            parts.append(next(stream))
            have += len(parts[-1])
        packed = torch.cat(parts)
        yield packed[:need].unfold(0, length + 1, length)
        rest = packed[batch_tokens:]
        step += 1


def loss_sum(model: nn.Module, rows: Tensor) -> Tensor:
    """Summed negative log-likelihood in nats of rows [n, length + 1]."""
    logits: Tensor = model(input_ids=rows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")


@torch.inference_mode()
def held_out_nats(model: nn.Module, documents: Sequence[Tensor]) -> tuple[float, int]:
    """Summed nats over the packed documents and the number of predicted tokens, in windows of the full context."""
    model.eval()
    packed = torch.cat([torch.tensor([0]), *documents])  # the first token is predicted from <|endoftext|>
    total = sum(
        loss_sum(model, packed[start : start + CONTEXT + 1][None]).item()
        for start in range(0, len(packed) - 1, CONTEXT)
    )
    model.train()
    return total, len(packed) - 1


def learning_rate_factor(step: int, steps: int, warm_up: int) -> float:
    """Linear warm-up, then a cosine from 1 to 0.05."""
    if step < warm_up:
        return (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress))


def save_model(model: Any, out: Path) -> None:
    """bfloat16 safetensors and the two configs; raises click.ClickException if the weights outgrow the repository."""
    rounded = hf.LlamaForCausalLM(model.config)
    rounded.load_state_dict(model.state_dict())
    rounded.generation_config = model.generation_config
    rounded.to(torch.bfloat16).save_pretrained(out)
    weights = out / "model.safetensors"
    weights.chmod(0o644)  # safetensors leaves it private
    size = weights.stat().st_size
    if size > CHECKPOINT_MB * 1_000_000:
        raise click.ClickException(f"model.safetensors has {size} bytes, the limit is {CHECKPOINT_MB} MB")


def report(out: Path, tokenizer: Tokenizer, corpus: Corpus) -> None:
    """Print the held-out numbers and a few completions of the checkpoint as saved."""
    model = hf.LlamaForCausalLM.from_pretrained(out, dtype=torch.float32)
    click.echo(f"parameters: {model.num_parameters():,}")
    for name, documents in (("documents", corpus.held_out), ("conversations", corpus.held_out_chat)):
        nats, tokens = held_out_nats(model, encode(tokenizer, documents))
        n_bytes = sum(len(piece.encode()) for d in documents for piece in _without_special_tokens(d))
        click.echo(
            f"held-out {name}: {tokens:,} tokens, {n_bytes:,} bytes, "
            f"perplexity {math.exp(nats / tokens):.2f} per token, {math.exp(nats / n_bytes):.3f} per byte"
        )
    model.eval()
    for prompt in SAMPLE_PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt).ids])
        completion = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)
        click.echo(f"--- {tokenizer.decode(completion[0].tolist())}")


@click.command()
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=Path("demo_model"), show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--steps", type=click.IntRange(min=1), default=2200, show_default=True)
@click.option("--batch-tokens", type=click.IntRange(min=CONTEXT), default=4096, show_default=True)
@click.option("--learning-rate", default=3e-3, show_default=True)
@click.option("--weight-decay", default=0.1, show_default=True)
@click.option("--dropout", default=0.0, show_default=True)
@click.option("--eval-every", type=click.IntRange(min=1), default=200, show_default=True)
@click.option("--compile/--no-compile", "compiled", default=False, help="torch.compile: faster, needs a C++ compiler.")
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True)
def main(
    out: Path, seed: int, steps: int, batch_tokens: int, learning_rate: float, weight_decay: float, dropout: float,
    eval_every: int, compiled: bool, threads: int,
) -> None:  # fmt: skip
    """Train the demo model and write its checkpoint to OUT."""
    if batch_tokens % CONTEXT:
        raise click.BadParameter(f"must be a multiple of {CONTEXT}, got {batch_tokens}", param_hint="--batch-tokens")
    hf.utils.logging.disable_progress_bar()
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    out.mkdir(parents=True, exist_ok=True)

    corpus = build_corpus()
    tokenizer = train_tokenizer(corpus.train)
    save_tokenizer(tokenizer, out)
    train_documents = encode(tokenizer, corpus.train)
    held_out_documents = encode(tokenizer, corpus.held_out)
    train_tokens = sum(len(d) for d in train_documents)
    click.echo(
        f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"tokenizers {tokenizers.__version__}, {threads} threads\n"
        f"{len(train_documents):,} documents, {train_tokens:,} tokens, {steps * batch_tokens / train_tokens:.1f} epochs"
    )

    model = build_model(tokenizer)
    add_dropout(model, dropout)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=learning_rate, betas=(0.9, 0.95), fused=True,
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, steps, warm_up=min(200, max(1, steps // 10)))
    )

    training_loss = torch.compile(loss_sum) if compiled else loss_sum
    started = time.monotonic()
    best = math.inf
    stream = batches(train_documents, batch_tokens, torch.Generator().manual_seed(seed))
    progress = tqdm(range(1, steps + 1), unit="step", mininterval=5)
    model.train()
    for step in progress:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = training_loss(model, next(stream)) / batch_tokens
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % eval_every == 0 or step == steps:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                nats, tokens = held_out_nats(model, held_out_documents)
            held_out = nats / tokens
            tqdm.write(f"step {step}: train {loss.item():.3f}, held out {held_out:.3f} nats per token")
            if held_out < best:
                best = held_out
                save_model(model, out)
    click.echo(f"trained in {(time.monotonic() - started) / 60:.1f} minutes")
    report(out, tokenizer, corpus)


if __name__ == "__main__":
    main()
