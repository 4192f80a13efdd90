"""Tokens that must not come: all but those that a request allows, and those that would complete a bad word.

What a batch needs of it is laid out when its rows change and stays on the device. A step then sends one number for each
bad word of several tokens, and compares these words with the last tokens of their rows on the device, where those are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.fields import IntArray
from common.sampling_params import LogitEdits
from worker_proc.known_tokens import KnownTokens
from worker_proc.staging import Staged, Staging


@dataclass(frozen=True, slots=True)
class Allowed:
    """The rows of a batch that may get some tokens alone."""

    rows: Staged  # int64 [R]
    pairs: Staged  # int64 [2, N]: row, allowed token

    def read(self, logits: Tensor) -> Tensor:
        """The logits of the allowed tokens, `[N]`."""
        rows, tokens = self.pairs.tensor
        return logits[rows, tokens]

    def restrict(self, logits: Tensor, before: Tensor) -> None:
        """Exclude all other tokens. Where no allowed token is left, all of them come back as they were `before`."""
        rows, tokens = self.pairs.tensor
        left = logits[rows, tokens]
        counts = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
        counts.index_add_(0, rows, (left != -torch.inf).int())
        logits.index_fill_(0, self.rows.tensor, -torch.inf)
        logits[rows, tokens] = torch.where(counts[rows] > 0, left, before)


@dataclass(frozen=True, slots=True)
class Words:
    """The bad words of several tokens of a batch, M of them: a beginning with which the output may end, and the token
    that must not follow it."""

    rows: Tensor  # int64 [M], host
    index: Staged  # int64 [5, M]: row, slot, last token, tokens before that one, tokens of the prompt
    beginnings: Staged  # int64 [M, P], each followed by any tokens

    def exclude(self, logits: Tensor, known: Tensor, lengths: Tensor) -> None:
        """Exclude what would complete a word. `known` (int32 `[slots, columns]`) holds the tokens of each slot, and the
        words' rows have `lengths` (int64 `[M]`) of them before the one to be drawn."""
        rows, slots, last, sizes, prompts = self.index.tensor
        beginnings = self.beginnings.tensor
        places = torch.arange(beginnings.shape[1], device=logits.device)
        columns = (lengths - sizes)[:, None] + places
        columns = columns.clamp_(0, known.shape[1] - 1)  # of words that are longer than the output
        same = (known[slots[:, None], columns] == beginnings) | (places >= sizes[:, None])
        found = same.all(1) & (lengths - prompts >= sizes)
        # added, because several words of a row may end with the same token
        excluded = torch.where(found, -torch.inf, 0.0).to(logits.dtype)
        logits.index_put_((rows, last), excluded, accumulate=True)


@dataclass(frozen=True, slots=True)
class Excluded:
    """What must not come in a batch; it holds while the rows are the same."""

    allowed: Allowed | None
    tokens: Staged | None  # int64 [2, N]: row, token that is a bad word by itself
    words: Words | None

    def lengths(self, lengths: Tensor, staging: Staging) -> Staged | None:
        """What a step sends for `words`, whose rows have `lengths` (int64 `[S]`, host) known tokens."""
        return staging.put(lengths[self.words.rows]) if self.words is not None else None

    def apply(self, logits: Tensor, known: KnownTokens, lengths: Staged | None) -> None:
        """Exclude bad words in `logits` `[S, vocab]`. `lengths` are from the method above."""
        if self.tokens is not None:
            rows, tokens = self.tokens.tensor
            logits[rows, tokens] = -torch.inf
        if self.words is not None and lengths is not None:
            self.words.exclude(logits, known.table, lengths.tensor)


def lay_out(
    slots: Sequence[int], edits: Mapping[int, LogitEdits], prompts: Mapping[int, int], staging: Staging
) -> Excluded:
    """For the batch whose rows are of `slots`. `edits` are those of slots that have some, `prompts` the tokens of the
    prompt of those that have a history."""
    rows = [(row, slot, edits[slot]) for row, slot in enumerate(slots) if slot in edits]
    single = [(row, word[0]) for row, _, edit in rows for word in edit.bad_words if len(word) == 1]
    several = [(row, slot, word, prompts[slot]) for row, slot, edit in rows for word in edit.bad_words if len(word) > 1]
    return Excluded(
        _allowed([(row, edit.allowed) for row, _, edit in rows if edit.allowed], staging),
        staging.put(torch.tensor(single, dtype=torch.int64).T.contiguous()) if single else None,
        _words(several, staging) if several else None,
    )


def _allowed(rows: Sequence[tuple[int, IntArray]], staging: Staging) -> Allowed | None:
    if not rows:
        return None
    numbers = torch.tensor([row for row, _ in rows], dtype=torch.int64)
    tokens = [torch.tensor(allowed, dtype=torch.int64) for _, allowed in rows]
    counts = torch.tensor([len(part) for part in tokens])
    return Allowed(
        staging.put(numbers), staging.put(torch.stack((numbers.repeat_interleave(counts), torch.cat(tokens))))
    )


def _words(words: Sequence[tuple[int, int, IntArray, int]], staging: Staging) -> Words:
    index = torch.tensor(
        [(row, slot, word[-1], len(word) - 1, prompt) for row, slot, word, prompt in words], dtype=torch.int64
    ).T.contiguous()
    beginnings = torch.zeros(len(words), int(index[3].max()), dtype=torch.int64)
    for place, (_, _, word, _) in zip(beginnings, words, strict=True):
        place[: len(word) - 1] = torch.tensor(word[:-1], dtype=torch.int64)
    return Words(index[0].clone(), staging.put(index), staging.put(beginnings))
