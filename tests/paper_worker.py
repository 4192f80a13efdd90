"""A worker on paper: executes StepPlans on pages that hold tokens instead of keys and values.

It checks what a real worker cannot: that every page a request reads holds exactly that request's tokens. Its "model"
is a hash of the whole context, so any wrong page, order or length changes the output.
"""

from array import array
from dataclasses import dataclass, field
from hashlib import blake2b

from common.codec import decode, encode
from common.messages import StepPlan, StepResult, ints

VOCAB = 50


def next_token(context: list[int]) -> int:
    return blake2b(array("i", context).tobytes(), digest_size=4).digest()[0] % VOCAB


def solo_output(prompt: list[int], max_tokens: int, stop: frozenset[int] = frozenset()) -> list[int]:
    """What a request generates when it is alone."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


@dataclass
class Slot:
    length: int
    pages: list[int] = field(default_factory=list)
    last: int = -1
    answer: list[int] | None = None  # what a grammar has seen of the answer, where there is one
    fails_after: int = -1  # tokens of the answer


class PaperWorker:
    def __init__(self, page_size: int):
        self.page_size = page_size
        self.slots: dict[int, Slot] = {}
        self.cells: dict[tuple[int, int], int] = {}  # (page, offset) -> token
        self.next_step = 0
        self.largest_frame = 0

    def execute(self, plan: StepPlan) -> StepResult:
        frame = encode(plan)
        self.largest_frame = max(self.largest_frame, len(frame))
        plan = decode(frame, {StepPlan})
        assert plan.step_id == self.next_step
        self.next_step += 1
        for slot in plan.leave:
            del self.slots[slot]
        for slot, length in zip(plan.enter_slots, plan.enter_lens, strict=True):
            assert slot not in self.slots, "a slot is entered twice"
            self.slots[slot] = Slot(length)
        for entered in plan.enter_grammars:  # the "grammar" is how many tokens it can be followed
            state = self.slots[entered.slot]
            state.answer, state.fails_after = list(entered.generated), int(entered.grammar.text or -1)
        at = 0
        for slot, count in zip(plan.page_slots, plan.page_counts, strict=True):
            self.slots[slot].pages += plan.pages[at : at + count]
            at += count
        for source, target in zip(plan.copies[::2], plan.copies[1::2], strict=True):
            for offset in range(self.page_size):
                self.cells[target, offset] = self.cells.get((source, offset), -1)
        rows: list[tuple[int, list[int], bool]] = []
        at = 0
        for slot, length, samples in zip(plan.chunk_slots, plan.chunk_lens, plan.chunk_samples, strict=True):
            rows.append((slot, list(plan.chunk_tokens[at : at + length]), bool(samples)))
            at += length
        decoding = [s for s in range(len(plan.decode) * 8) if plan.decode[s // 8] >> (s % 8) & 1]
        rows += [(slot, [self.slots[slot].last], True) for slot in decoding]
        written: set[tuple[int, int]] = set()
        for slot, tokens, _ in rows:  # all writes of a step come before all reads, as in a layer's attention
            state = self.slots[slot]
            for token in tokens:
                cell = (state.pages[state.length // self.page_size], state.length % self.page_size)
                assert cell not in written, "two rows write one cell"
                written.add(cell)
                self.cells[cell] = token
                state.length += 1
        sampled, failed = ints(), ints()
        for slot, _, samples in rows:
            if samples:
                failed.extend([len(sampled)] * self.follow(slot))
                sampled.append(self.slots[slot].last)
        problems = ("a reason",) * len(failed)
        times = array("q", (1, 2, 3))
        return StepResult(plan.step_id, plan.epoch, plan.group, sampled, times, failed=failed, problems=problems)

    def follow(self, slot: int) -> bool:
        """Draw a slot's next token; whether its grammar cannot be followed any more."""
        state, context = self.slots[slot], self.read(slot)
        state.last = next_token(context)
        if state.answer is None:
            return False
        assert context[len(context) - len(state.answer) :] == state.answer, "a grammar has seen another answer"
        state.answer.append(state.last)
        return len(state.answer) == state.fails_after

    def read(self, slot: int) -> list[int]:
        """The tokens whose keys and values the slot's page table leads to."""
        state = self.slots[slot]
        return [self.cells[state.pages[i // self.page_size], i % self.page_size] for i in range(state.length)]
