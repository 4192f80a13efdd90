"""Writes StepPlans by hand: slots, pages and lengths as a scheduler keeps them, without any policy."""

import random
from dataclasses import dataclass, field, replace

from common.messages import StepPlan, ints
from common.sampling_params import DrawParams

GREEDY = DrawParams(temperature=0.0)


def empty_plan(step_id: int = 0, epoch: int = 0, group: str = "0") -> StepPlan:
    return StepPlan(step_id, epoch, group)


def bitmap(slots: list[int]) -> bytes:
    """The `decode` column for these slots."""
    octets = bytearray(max(slots, default=-1) // 8 + 1)
    for slot in slots:
        octets[slot // 8] |= 1 << slot % 8
    return bytes(octets)


@dataclass
class SlotState:
    length: int
    pages: list[int] = field(default_factory=list)


class PlanWriter:
    """Each call of `plan` is the next step; pages are appended as needed and come from a shuffled pool."""

    def __init__(self, num_pages: int, page_size: int, *, seed: int = 0, epoch: int = 0, step_id: int = 0) -> None:
        self.page_size = page_size
        self.free = list(range(num_pages))
        random.Random(seed).shuffle(self.free)
        self.epoch = epoch
        self.step_id = step_id
        self.slots: dict[int, SlotState] = {}

    def plan(
        self,
        *,
        leave: tuple[int, ...] = (),
        enter: dict[int, DrawParams] | None = None,
        prefix: dict[int, tuple[int, list[int]]] | None = None,
        copies: tuple[int, ...] = (),
        chunks: tuple[tuple[int, list[int], bool], ...] = (),
        decode: tuple[int, ...] = (),
        drafts: dict[int, int] | None = None,
    ) -> StepPlan:
        """`prefix` gives entering slots tokens that are cached already, as a number and the pages that hold them;
        `chunks` are slot, tokens, samples; the last `drafts[slot]` tokens of its chunk are guesses (see `trim`)."""
        page_slots, page_counts, new_pages = ints(), ints(), ints()
        for slot in leave:
            self.free += self.slots.pop(slot).pages
        enter, prefix = enter or {}, prefix or {}
        for slot in enter:
            length, pages = prefix.get(slot, (0, []))
            self.slots[slot] = SlotState(length, list(pages))
        lengths = ints(*(self.slots[slot].length for slot in enter))
        for slot, count in [*((slot, len(tokens)) for slot, tokens, _ in chunks), *((slot, 1) for slot in decode)]:
            state = self.slots[slot]
            state.length += count
            missing = -(-state.length // self.page_size) - len(state.pages)
            state.pages += [self.free.pop() for _ in range(missing)]
            new = state.pages if slot in enter else state.pages[len(state.pages) - missing :]
            if new:
                page_slots.append(slot)
                page_counts.append(len(new))
                new_pages.extend(new)
        self.step_id += 1
        return replace(
            empty_plan(self.step_id - 1, self.epoch),
            leave=ints(*leave),
            enter_slots=ints(*enter),
            enter_lens=lengths,
            enter_draw=tuple(enter.values()),
            page_slots=page_slots,
            page_counts=page_counts,
            pages=new_pages,
            copies=ints(*copies),
            chunk_slots=ints(*(slot for slot, _, _ in chunks)),
            chunk_lens=ints(*(len(tokens) for _, tokens, _ in chunks)),
            chunk_samples=ints(*(int(samples) for _, _, samples in chunks)),
            chunk_tokens=ints(*(token for _, tokens, _ in chunks for token in tokens)),
            decode=bitmap(list(decode)) if decode else b"",
            chunk_drafts=ints(*(drafts.get(slot, 0) for slot, _, _ in chunks)) if drafts else ints(),
        )

    def trim(self, slot: int, wrong: int) -> None:
        """So many guesses of the slot's last chunk were wrong; its pages stay."""
        self.slots[slot].length -= wrong
