"""Log probabilities of a prompt that several choices want: the first choice has it scored, the others wait until then.

They find the whole prompt in the prefix cache afterwards, so that it is computed once. Scoring cannot be shared in the
scheduler alone: whoever wants log probabilities takes nothing from the cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from common.logprobs import Logprobs
from tokenizer_proc.rows import Scores


@dataclass(slots=True, eq=False)
class SharedScores:
    """The entries that have come, of `missing` more to come, in pieces as large as a row may have them."""

    missing: int
    pieces: list[Logprobs] = field(default_factory=list)
    token_bytes: dict[int, bytes] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return self.missing <= 0

    def add(self, piece: Logprobs, token_bytes: Mapping[int, bytes]) -> None:
        """What a row of the first choice has; `token_bytes` are those of its batch."""
        self.missing -= len(piece)
        self.pieces.append(piece)
        for token in Scores(prompt=piece).named:
            self.token_bytes[token] = token_bytes[token]
