"""Drafts of a step and what becomes of them: exact verification of guessed tokens.

A row with guesses computes its last known token and all guesses at once, and a token is drawn at each of these
positions from that position's own logits and random number. So the token drawn after a right guess is the one that a
step of its own would have drawn, and what stays is the longest run of guesses that equal the drawn tokens, with the
token drawn after it (Leviathan, Kalman, Matias, "Fast inference from transformers via speculative decoding", ICML 2023,
for drafts without probabilities; here every draw is fixed by seed and position, so that equality is the whole test).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from common.logprobs import LogprobRows


@dataclass(frozen=True, slots=True)
class DraftRow:
    """A row of a step that verifies guesses. Drawn position `first + i` of the step follows `drafts[:i]`."""

    slot: int
    first: int
    drafts: list[int]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which of the drawn positions stay, ascending (all others follow a wrong guess), which of them is the last of each
    row, and how many guesses of each draft row were right."""

    kept: list[int]
    last: list[int]
    accepted: list[int]

    def tokens(self, drawn: Sequence[int]) -> list[int]:
        """The tokens that stay, of all that were drawn."""
        return [drawn[position] for position in self.kept]

    def logprobs(self, rows: LogprobRows | None) -> LogprobRows | None:
        """The log probabilities of the tokens that stay, numbered like `tokens`."""
        if rows is None:
            return None
        found = rows.by_row()
        return LogprobRows.of({number: found[p] for number, p in enumerate(self.kept) if p in found})

    def numbers(self) -> dict[int, int]:
        """The number among the tokens that stay, by drawn position."""
        return {position: number for number, position in enumerate(self.kept)}


def verify(rows: Sequence[DraftRow], drawn: Sequence[int]) -> Verdict:
    """`drawn` are the tokens of all drawn positions of a step; `rows` its draft rows, in the same order."""
    kept: list[int] = []
    last: list[int] = []
    accepted: list[int] = []
    begin = 0
    for row in rows:
        kept += range(begin, row.first)
        last += range(begin, row.first)
        right = 0
        while right < len(row.drafts) and drawn[row.first + right] == row.drafts[right]:
            right += 1
        kept += range(row.first, row.first + right + 1)
        last.append(row.first + right)
        accepted.append(right)
        begin = row.first + len(row.drafts) + 1
    kept += range(begin, len(drawn))
    last += range(begin, len(drawn))
    return Verdict(kept, last, accepted)
