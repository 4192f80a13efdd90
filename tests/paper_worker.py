"""A worker on paper: executes StepPlans on pages that hold tokens instead of keys and values.

It checks what a real worker cannot: that every page a request reads holds exactly that request's tokens. Its "model"
is a hash of the whole context, so any wrong page, order or length changes the output. A recurrent one also has a state
for each slot, of all tokens that passed in their order, and hashes that.
"""

from array import array
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from common.codec import decode, encode
from common.fields import IntArray
from common.logprobs import LogprobRows, Logprobs
from common.messages import History, StepPlan, StepResult, ints
from common.sampling_params import DrawParams

VOCAB = 50


def next_token(context: list[int]) -> int:
    return blake2b(array("i", context).tobytes(), digest_size=4).digest()[0] % VOCAB


def logprob_of(context: list[int], token: int) -> float:
    """A number that depends on the whole context, exact in float32."""
    return -next_token([*context, token, 7]) / 8


def entry(context: list[int], token: int, top: int) -> Logprobs:
    """The only entry for a token after its context; its alternatives say nothing."""
    return Logprobs(
        ints(token),
        array("f", [logprob_of(context, token)]),
        ints(1),
        ints(top),
        ints(*range(top)),
        array("f", top * [-1]),
    )


def solo_output(prompt: list[int], max_tokens: int, stop: frozenset[int] = frozenset()) -> list[int]:
    """What a request generates when it is alone."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


class _Row(NamedTuple):
    slot: int
    tokens: list[int]
    samples: bool
    guesses: int  # of `tokens`, the last ones


@dataclass
class _Drawn:
    """What a step has drawn, as in StepResult; `logprobs` by place in `tokens`."""

    tokens: IntArray = field(default_factory=ints)
    failed: IntArray = field(default_factory=ints)
    accepted: IntArray = field(default_factory=ints)
    logprobs: dict[int, Logprobs] = field(default_factory=dict)


@dataclass
class Slot:
    length: int
    pages: list[int] = field(default_factory=list)
    last: int = -1
    draw: DrawParams = field(default_factory=DrawParams)
    history: History | None = None
    drawn: list[int] = field(default_factory=list)
    answer: list[int] | None = None  # what a grammar has seen of the answer, where there is one
    fails_after: int = -1  # tokens of the answer
    passed: list[int] = field(default_factory=list)  # the state of a recurrent model


class PaperWorker:
    """`num_pages` are on the device, further ones on the host, where nothing is computed. With `snapshots`, of which
    there may be none, the model is recurrent."""

    def __init__(self, page_size: int, num_pages: int | None = None, snapshots: int | None = None):
        self.page_size = page_size
        self.num_pages = num_pages
        self.recurrent = snapshots is not None
        self.snapshots: list[list[int] | None] = [None] * (snapshots or 0)
        self.slots: dict[int, Slot] = {}
        self.cells: dict[tuple[int, int], int] = {}  # (page, offset) -> token
        self.next_step = 0
        self.largest_frame = 0

    def replacement(self) -> "PaperWorker":
        """One like it that has forgotten everything."""
        return PaperWorker(self.page_size, self.num_pages, len(self.snapshots) if self.recurrent else None)

    def execute(self, plan: StepPlan) -> StepResult:
        frame = encode(plan)
        self.largest_frame = max(self.largest_frame, len(frame))
        plan = decode(frame, {StepPlan})
        assert plan.step_id == self.next_step
        self.next_step += 1
        self._enter(plan)
        self._load_states(plan)
        self._copy(plan)
        rows = self._rows(plan)
        begins = {row.slot: self.slots[row.slot].length for row in rows}
        self._write(rows)
        self._save_states(plan, begins)
        drawn = _Drawn()
        for row in rows:
            if row.samples:
                self._draw(row, drawn)
        return StepResult(
            plan.step_id,
            plan.epoch,
            plan.group,
            drawn.tokens,
            array("q", (1, 2, 3)),
            LogprobRows.of(drawn.logprobs),
            LogprobRows.of(self.score(plan)),
            failed=drawn.failed,
            problems=("a reason",) * len(drawn.failed),
            accepted=drawn.accepted,
        )

    def _enter(self, plan: StepPlan) -> None:
        """Slots leave and enter, and get their pages."""
        for slot in plan.leave:
            del self.slots[slot]
        for slot, length, draw in zip(plan.enter_slots, plan.enter_lens, plan.enter_draw, strict=True):
            assert slot not in self.slots, "a slot is entered twice"
            self.slots[slot] = Slot(length, draw=draw)
        for history in plan.histories:
            assert history.slot in plan.enter_slots
            self.slots[history.slot].history = history
        for entered in plan.enter_grammars:  # the "grammar" is how many tokens it can be followed
            state = self.slots[entered.slot]
            state.answer, state.fails_after = list(entered.generated), int(entered.grammar.text or -1)
        at = 0
        for slot, count in zip(plan.page_slots, plan.page_counts, strict=True):
            self.slots[slot].pages += plan.pages[at : at + count]
            at += count
        if self.num_pages is not None:
            assert all(page < self.num_pages for page in plan.pages), "a request computes in a host page"

    def _load_states(self, plan: StepPlan) -> None:
        loads = dict(zip(plan.state_loads[::2], plan.state_loads[1::2], strict=True))
        assert 2 * len(loads) == len(plan.state_loads) and loads.keys() <= set(plan.enter_slots)
        for slot in plan.enter_slots:
            state = self.slots[slot]
            assert (slot in loads) == (self.recurrent and state.length > 0), "a state is missing, or one too many"
            if slot in loads:
                snapshot = self.snapshots[loads[slot]]
                assert snapshot is not None and len(snapshot) == state.length, "a snapshot of another length"
                state.passed = list(snapshot)

    def _save_states(self, plan: StepPlan, begins: dict[int, int]) -> None:
        columns = [plan.state_saves[i::3] for i in range(3)]
        assert len(set(columns[2])) == len(columns[2]), "a snapshot is taken twice in a step"
        for slot, length, number in zip(*columns, strict=True):
            state = self.slots[slot]
            assert slot in begins and begins[slot] < length <= state.length and not length % self.page_size
            self.snapshots[number] = state.passed[:length]

    def _copy(self, plan: StepPlan) -> None:
        for source, target in zip(plan.copies[::2], plan.copies[1::2], strict=True):
            if self.num_pages is not None:
                assert min(source, target) < self.num_pages, "a copy from host to host"
            assert source != target, "a page is copied to itself"
            for offset in range(self.page_size):
                self.cells[target, offset] = self.cells.get((source, offset), -1)

    def _rows(self, plan: StepPlan) -> list[_Row]:
        """Chunks, then decodes."""
        rows: list[_Row] = []
        at = 0
        drafts = plan.chunk_drafts or ints(*[0] * len(plan.chunk_slots))
        columns = (plan.chunk_slots, plan.chunk_lens, plan.chunk_samples, drafts)
        for slot, length, samples, guesses in zip(*columns, strict=True):
            tokens = list(plan.chunk_tokens[at : at + length])
            assert not guesses or self.slots[slot].last in (-1, tokens[-1 - guesses]), "guesses after another token"
            rows.append(_Row(slot, tokens, bool(samples), guesses))
            at += length
        decoding = [s for s in range(len(plan.decode) * 8) if plan.decode[s // 8] >> (s % 8) & 1]
        return rows + [_Row(slot, [self.slots[slot].last], True, 0) for slot in decoding]

    def _write(self, rows: list[_Row]) -> None:
        """All writes of a step come before all reads, as in a layer's attention."""
        written: set[tuple[int, int]] = set()
        for row in rows:
            state = self.slots[row.slot]
            for token in row.tokens:
                cell = (state.pages[state.length // self.page_size], state.length % self.page_size)
                assert cell not in written, "two rows write one cell"
                written.add(cell)
                self.cells[cell] = token
                state.length += 1
                if self.recurrent:
                    state.passed.append(token)

    def _draw(self, row: _Row, drawn: _Drawn) -> None:
        """The row's next token, and one more for each guess that was right."""
        state, context = self.slots[row.slot], self.read(row.slot)
        if self.recurrent:
            assert state.passed == context, "a state of other tokens than those in the cache"
        known, right = len(context) - row.guesses, 0
        while True:
            now = context[: known + right]
            state.last = next_token(now)
            if state.draw.logprobs is not None:
                drawn.logprobs[len(drawn.tokens)] = entry(now, state.last, state.draw.logprobs)
            self.check_history(state, now)
            drawn.failed.extend([len(drawn.tokens)] * self.follow(state, now))
            drawn.tokens.append(state.last)
            if right == row.guesses or state.last != context[known + right]:
                break
            right += 1
        state.length -= row.guesses - right
        if row.guesses:
            drawn.accepted.append(right)

    def check_history(self, state: Slot, context: list[int]) -> None:
        """What a worker knows of a slot's tokens must be all of them."""
        if state.draw.needs_history:
            assert state.history is not None
            assert [*state.history.tokens, *state.drawn] == context
            assert 0 < state.history.prompt_len <= len(state.history.tokens)
            state.drawn.append(state.last)
        else:
            assert state.history is None

    def follow(self, state: Slot, context: list[int]) -> bool:
        """A slot's next token is drawn; whether its grammar cannot be followed any more."""
        if state.answer is None:
            return False
        assert context[len(context) - len(state.answer) :] == state.answer, "a grammar has seen another answer"
        state.answer.append(state.last)
        return len(state.answer) == state.fails_after

    def score(self, plan: StepPlan) -> dict[int, Logprobs]:
        found = {}
        for i, scoring in enumerate(plan.scorings):
            slot, length = plan.chunk_slots[scoring.chunk], plan.chunk_lens[scoring.chunk]
            state = self.slots[slot]
            assert state.draw.prompt_logprobs is not None and scoring.begin + len(scoring.targets) <= length
            entries, context = Logprobs.empty(), self.read(slot)
            for at, target in enumerate(scoring.targets, state.length - length + scoring.begin):
                entries.extend(entry(context[: at + 1], target, state.draw.prompt_logprobs))
            found[i] = entries
        return found

    def read(self, slot: int) -> list[int]:
        """The tokens whose keys and values the slot's page table leads to."""
        state = self.slots[slot]
        return [self.cells[state.pages[i // self.page_size], i % self.page_size] for i in range(state.length)]
