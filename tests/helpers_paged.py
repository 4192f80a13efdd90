"""Greedy generation through `LanguageModel.forward` over shuffled pages: a scheduler in a few lines, for tests."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from worker_proc.attention.interface import ForwardBatch
from worker_proc.kv_cache import KVCache
from worker_proc.models.interface import LanguageModel
from worker_proc.parallel import TensorParallel
from worker_proc.recurrent import StateRows
from worker_proc.staging import Staging

NEW_TOKENS = 24


def make_prompts(vocab_size: int) -> list[list[int]]:
    """Random prompts of mixed lengths, shorter and longer than a page and than a sliding window of 12."""
    rng = random.Random(1)
    return [[rng.randrange(3, vocab_size) for _ in range(length)] for length in (1, 2, 17, 33, 70)]


@dataclass
class Row:
    """A request: known tokens, how many of them are in the cache, and its pages in order."""

    tokens: list[int]
    pages: list[int]
    cached: int = 0
    output: list[int] = field(default_factory=list)


@contextmanager
def sent(device: torch.device | str = "cpu") -> Iterator[Staging]:
    """What is staged in the block happens at its end."""
    staging = Staging(device)
    yield staging
    staging.send()


def poison(cache: KVCache) -> None:
    """Fill every slot with NaN: what is read without having been written shows."""
    for numbers in (*cache.k_scales, *cache.v_scales) if cache.spec.int8 else (*cache.k, *cache.v):
        numbers.fill_(float("nan"))
    for states in cache.states.tensors.values() if cache.states is not None else ():
        states.fill_(float("nan"))


def fill(cache: KVCache) -> None:
    """Random numbers in every slot."""
    for pages in (*cache.k, *cache.v):
        pages.copy_(torch.randint(-127, 128, pages.shape)) if cache.spec.int8 else pages.normal_()
    for scales in (*cache.k_scales, *cache.v_scales):
        scales.uniform_(0.001, 0.02)


def copy_of(cache: KVCache, device: torch.device | str = "cpu") -> KVCache:
    """The same numbers on `device`."""
    made = KVCache(cache.spec, cache.num_pages, cache.page_size, device)
    for to, source in zip(made.page_tensors, cache.page_tensors, strict=True):
        to.copy_(source)
    return made


def make_batch(rows: list[Row], q_lens: list[int], page_size: int) -> ForwardBatch:
    """A step that computes the next `q_lens[i]` tokens of each row and asks for the logits of the last of them."""
    order = sorted(range(len(rows)), key=lambda i: q_lens[i] == 1)  # chunks first, then decodes
    rows, q_lens = [rows[i] for i in order], [q_lens[i] for i in order]
    token_ids, positions, slots, last = [], [], [], []
    for row, count in zip(rows, q_lens, strict=True):
        for position in range(row.cached, row.cached + count):
            token_ids.append(row.tokens[position])
            positions.append(position)
            slots.append(row.pages[position // page_size] * page_size + position % page_size)
        last.append(len(token_ids) - 1)
    kv_lens = [row.cached + count for row, count in zip(rows, q_lens, strict=True)]
    width = max(-(-length // page_size) for length in kv_lens)
    table = [(row.pages[:width] + [0] * width)[:width] for row in rows]
    return ForwardBatch(
        token_ids=torch.tensor(token_ids),
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(slots),
        page_table=torch.tensor(table),
        kv_lens=torch.tensor(kv_lens),
        q_lens=q_lens,
        kv_lens_host=kv_lens,
        num_prefill_rows=sum(count > 1 for count in q_lens),
        logit_rows=torch.tensor(last),
    )


def shuffled_batch(rows: list[tuple[int, int]], page_size: int) -> tuple[ForwardBatch, int]:
    """A batch of rows with so many new and so many tokens in all, whose pages are in a random order, and how many
    pages they have."""
    need = [-(-total // page_size) for _, total in rows]
    pages = list(range(sum(need)))
    random.Random(1).shuffle(pages)
    held = [
        Row([0] * total, [pages.pop() for _ in range(n)], total - new)
        for (new, total), n in zip(rows, need, strict=True)
    ]
    return make_batch(held, [new for new, _ in rows], page_size), sum(need)


def generate(
    model: LanguageModel,
    prompts: list[list[int]],
    new_tokens: int,
    *,
    page_size: int = 16,
    chunk: int = 10_000,
    seed: int = 0,
    poisoned: bool = True,
    int8: bool = False,
    tp: TensorParallel | None = None,
) -> list[list[int]]:
    """Greedy continuations of all prompts, run together: prefills in chunks of at most `chunk` tokens beside decodes.

    Pages are handed out in random order; with `poisoned`, every slot that was not written holds NaN. The cache is in
    the model's precision or in int8. With several ranks all of them call this alike, and follow the tokens of rank 0.
    """
    need = [-(-(len(prompt) + new_tokens) // page_size) for prompt in prompts]
    cache = KVCache(replace(model.kv_spec, int8=int8), sum(need) + 3, page_size, slots=len(prompts))
    if poisoned:
        poison(cache)
    if cache.states is not None:
        cache.states.clear(range(len(prompts)))
    free = list(range(cache.num_pages))
    random.Random(seed).shuffle(free)
    rows = [Row(list(prompt), [free.pop() for _ in range(n)]) for prompt, n in zip(prompts, need, strict=True)]
    while running := [row for row in rows if len(row.output) < new_tokens]:
        q_lens = [min(chunk, len(row.tokens) - row.cached) for row in running]
        batch = make_batch(running, q_lens, page_size)
        order = sorted(range(len(running)), key=lambda i: q_lens[i] == 1)
        if cache.states is not None:
            batch = replace(batch, states=StateRows([rows.index(running[i]) for i in order]))
        logits = model.forward(batch, cache)
        best = logits.argmax(-1) if logits.shape[0] else torch.zeros(len(order), dtype=torch.int64)
        best = tp.broadcast(best) if tp is not None else best
        for index, i in enumerate(order):
            row = running[i]
            row.cached += q_lens[i]
            if row.cached < len(row.tokens):
                continue
            token = int(best[index])
            row.tokens.append(token)
            row.output.append(token)
    return [row.output for row in rows]
