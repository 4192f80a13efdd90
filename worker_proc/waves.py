"""What recurrent layers compute together, and where states are copied in between."""

from collections.abc import Callable

from worker_proc.attention.interface import ForwardBatch
from worker_proc.recurrent import RecurrentStates, StateRows

Segments = list[tuple[int, int, int]]
Copies = list[tuple[int, int]]


def waves(batch: ForwardBatch, states: RecurrentStates) -> list[tuple[Segments, Copies]]:
    """What is computed together, one after another: parts of rows (state row, first token, tokens), then the copies of
    states that are saved there. A row that is saved on its way is cut into several waves."""
    where = batch.states or StateRows([states.scratch] * len(batch.q_lens))
    found: list[tuple[Segments, Copies]] = [([], [])]
    begin = 0
    for row, (state, tokens) in enumerate(zip(where.rows, batch.q_lens, strict=True)):
        done = wave = 0
        saves = [(save.tokens, save.target) for save in where.saves if save.row == row] if where.saves else []
        for length, target in [*saves, (tokens, None)]:
            if length > done:
                wave += done > 0
                if wave == len(found):
                    found.append(([], []))
                found[wave][0].append((state, begin + done, length - done))
                done = length
            if target is not None:
                found[wave][1].append((state, target))
        begin += tokens
    return found


def saves_at_ends(batch: ForwardBatch) -> bool:
    """Whether no row is saved on its way: what is saved is what rows have after the step."""
    return batch.states is None or all(save.tokens == batch.q_lens[save.row] for save in batch.states.saves)


def in_waves(batch: ForwardBatch, states: RecurrentStates, layer: int, compute: Callable[[Segments], None]) -> None:
    """Have a layer compute a batch wave by wave, and its states copied to where they are saved."""
    for segments, copies in waves(batch, states):
        compute(segments)
        for source, target in copies:
            states.copy(source, target, layer)
