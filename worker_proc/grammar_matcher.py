"""Grammars on the worker's side: which tokens may come next, request by request, and that the others do not.

One matcher per slot with a grammar, on rank 0 alone. Their masks are computed in a thread of their own (the library
lets go of Python's lock) while the model computes the logits. A batch without grammars costs one look at a dictionary.

A matcher that cannot go on, because its grammar needs more work than LIMITS allow, fails by itself: its row is drawn
without a mask and reported, and everybody else goes on.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer
from torch import Tensor

from common.grammars import LIMITS, GrammarError, to_llguidance
from common.messages import EnterGrammar
from common.sampling_params import MAX_BAD_WORDS, MAX_ENDS, Grammar
from worker_proc.cpu.machine import num_cpus
from worker_proc.staging import Staging

log = logging.getLogger(__name__)

MAX_COMPILED = 64  # grammars kept for requests to come
_MAX_ELEMENTS = 2**24  # bits of masks that are unpacked on a GPU at once
_MAX_THREADS = 8
_MAX_PROBLEM_CHARS = 1000
_MOST_EXCLUDED = MAX_ENDS + 2 * MAX_BAD_WORDS  # tokens of a row, together, where it may get all others


class GrammarFailure(Exception):
    """A grammar cannot be followed. The text says why."""


def load_vocabulary(model: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """The bytes of every token of a model. Raises an exception whose text says why that cannot be had."""
    file = model / "tokenizer.json"
    if not file.is_file():
        raise GrammarFailure("the model has no tokenizer.json")
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return make_vocabulary(tokenizer, vocab_size, eos_token_ids)


def make_vocabulary(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """The bytes of a tokenizer's tokens, and of nothing up to `vocab_size`. Raises ValueError where the library does
    not know its kind."""
    size = max(vocab_size, tokenizer.get_vocab_size(with_added_tokens=True))
    found = LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=list(eos_token_ids))
    added = tokenizer.get_added_tokens_decoder().items()
    text = {i for i, token in added if not token.special and i not in eos_token_ids and found.is_special_token(i)}
    if not text:
        return found
    return LLTokenizer(TokenizerWrapper(_AsText(found, text)), n_vocab=size, eos_token=list(eos_token_ids))


class _AsText:
    """A vocabulary in the form that the library takes, in which the tokens `text` are the text that they look like.

    By itself the library takes every added token in angle brackets for a special one, which is in no text. Then the
    <think> and <tool_call> of Qwen's models could not come, and where they must, they were refused when they came.
    """

    bos_token_id = None

    def __init__(self, found: LLTokenizer, text: set[int]) -> None:
        self._found = found
        self.eos_token_id = found.eos_token
        self.tokens = [found.decode_bytes([i]) for i in range(found.vocab_size)]
        self.special_token_ids = [i for i in range(found.vocab_size) if i not in text and found.is_special_token(i)]

    def __call__(self, text: bytes) -> list[int]:
        return self._found.tokenize_bytes(text)


@dataclass(frozen=True, slots=True)
class Failure:
    """The token of row `row` is not to be used."""

    row: int
    problem: str


class SlotMatcher:
    """The state of one answer. Used by the masks' thread while a step is computed, by the worker's own before and
    after."""

    def __init__(self, entered: EnterGrammar) -> None:
        self._entered = entered
        self._matcher: LLMatcher | None = None
        self.problem = ""
        self.over = False  # the end was drawn, or the problem reported: what comes is for nobody

    @property
    def ends_late(self) -> bool:
        """The end-of-sequence token may come only where nothing else can."""
        return self._entered.ignore_eos and not self.matcher.is_stopped()

    @property
    def matcher(self) -> LLMatcher:
        assert self._matcher is not None
        return self._matcher

    def begin(self, compile: Callable[[Grammar], LLMatcher]) -> None:
        """Before the first mask: the grammar's beginning, then what was generated before this slot was entered."""
        if self._matcher is not None:
            return
        try:
            self._matcher = compile(self._entered.grammar)
        except GrammarFailure as failure:
            self.problem = str(failure)
            return
        generated = self._entered.generated.tolist()
        if generated and not self._matcher.consume_tokens(generated):
            self.fail()

    def fail(self) -> None:
        problem = self.matcher.get_error() if self._matcher is not None else ""
        words = " ".join(problem.split())[:_MAX_PROBLEM_CHARS]
        self.problem = f"the grammar cannot be followed any further: {words or 'no reason given'}"


@dataclass(slots=True)
class Masks:
    """The masks of a step, perhaps still being computed. Bit t of `bits[i]` says that row `rows[i]` may get token t."""

    rows: list[int]  # ascending
    matchers: list[SlotMatcher]
    bits: Tensor  # int32 [R, words], host; pinned where a GPU will fetch them
    computed: "Future[None]" = field(init=False)
    forbidden: Tensor | None = None  # bool [R, 32 * words], unpacked already where the logits are on the host
    narrow: Tensor | None = None  # of masks that allow few tokens, int64 [3, N], host: which of them, row, token


class GrammarMatchers:
    """The matchers of all slots. `load` makes the library's vocabulary; when it fails, so does every grammar."""

    def __init__(self, load: Callable[[], LLTokenizer], vocab_size: int, device: torch.device | str = "cpu") -> None:
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._slots: dict[int, SlotMatcher] = {}
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._executor = LLExecutor(max(1, min(_MAX_THREADS, num_cpus() // 2)))
        self._vocabulary = self._thread.submit(load)
        self._numbers = torch.arange(8, dtype=torch.uint8, device=self._device)

    def wait_ready(self) -> None:
        """Until the vocabulary is loaded, or cannot be."""
        error = self._vocabulary.exception()
        if error is not None:
            log.warning("grammars cannot be used with this model: %s", error)

    def reset(self) -> None:
        """Free every slot."""
        self._slots.clear()

    def leave(self, slots: Iterable[int]) -> None:
        if self._slots:
            for slot in slots:
                self._slots.pop(slot, None)

    def enter(self, entered: Sequence[EnterGrammar]) -> None:
        """Slots are taken by requests with a grammar. Compiling begins now, beside the prompt's forward pass."""
        for entry in entered:
            slot = SlotMatcher(entry)
            self._slots[entry.slot] = slot
            self._thread.submit(self._begin, slot)

    def start(self, slots: Tensor) -> Masks | None:
        """Start on the masks of the rows of `slots` (int64 `[S]`, host) that are about to be drawn; None where no row
        has a grammar to follow."""
        if not self._slots:
            return None
        found = [(row, self._slots.get(slot)) for row, slot in enumerate(slots.tolist())]
        active = [(row, matcher) for row, matcher in found if matcher is not None and not matcher.over]
        if not active:
            return None
        rows, matchers = [row for row, _ in active], [matcher for _, matcher in active]
        on_gpu = self._device.type == "cuda"
        masks = Masks(rows, matchers, torch.empty(len(rows), self._words, dtype=torch.int32, pin_memory=on_gpu))
        masks.computed = self._thread.submit(self._compute, masks)
        return masks

    def apply(self, masks: Masks, logits: Tensor, restricted: Sequence[int] = ()) -> None:
        """Exclude all other tokens in `logits` (float32 `[S, vocab]`, device): to be done last before the draw.
        `restricted` are the rows in which any number of tokens may have been excluded before.

        A row in which everything that may come was excluded before (by `min_tokens`, for instance) gets one of those
        tokens all the same: the grammar has the last word.
        """
        masks.computed.result()
        if masks.narrow is not None:
            self._keep_one(masks.narrow, len(masks.rows), logits)
        vocab, whole = logits.shape[1], masks.forbidden
        bits = masks.bits if whole is not None else masks.bits.to(self._device, non_blocking=True)
        for first, begin, end in _runs(masks.rows, max(1, _MAX_ELEMENTS // vocab)):
            forbidden = (whole[begin:end] if whole is not None else self._unpacked(bits[begin:end]))[:, :vocab]
            here = logits[first : first + end - begin]
            for i in range(end - begin) if restricted else ():
                if first + i in restricted:
                    allowed = here[i].masked_fill(forbidden[i], -torch.inf)
                    here[i].masked_fill_((allowed == -torch.inf).all(), 0.0)
            here.masked_fill_(forbidden, -torch.inf)

    def _unpacked(self, bits: Tensor) -> Tensor:
        """Masks int32 `[R, words]` as bool `[R, 32 * words]`, true where a token may not come."""
        return ((bits.view(torch.uint8)[:, :, None] >> self._numbers) & 1 == 0).view(len(bits), -1)

    def _keep_one(self, narrow: Tensor, count: int, logits: Tensor) -> None:
        """Where all that one of `count` masks allows is excluded, it no longer is."""
        staging = Staging(self._device)
        staged = staging.put(narrow)
        staging.send()
        which, rows, tokens = staged.tensor
        allowed = logits[rows, tokens]
        best = allowed.new_full((count,), -torch.inf).scatter_reduce_(0, which, allowed, "amax")
        logits[rows, tokens] = allowed.masked_fill(best[which] == -torch.inf, 0.0)

    def advance(self, masks: Masks, tokens: Sequence[int]) -> list[Failure]:
        """Follow the drawn tokens, one per row of the step; the rows whose grammar failed, now or before the draw."""
        failures = []
        for row, slot in zip(masks.rows, masks.matchers, strict=True):
            if not slot.problem:
                slot.over = tokens[row] in self._eos
                if not slot.over and not slot.matcher.consume_token(tokens[row]):
                    slot.fail()
            if slot.problem:
                slot.over = True
                failures.append(Failure(row, slot.problem))
        return failures

    @property
    def _words(self) -> int:
        """Of a mask. A tokenizer may have more tokens than the model."""
        failed = self._vocabulary.exception() is not None
        tokens = self._vocab_size if failed else max(self._vocab_size, self._vocabulary.result().vocab_size)
        return -(-tokens // 32)

    @property
    def _eos(self) -> list[int]:
        tokens: list[int] = self._vocabulary.result().eos_tokens
        return tokens

    def _begin(self, slot: SlotMatcher) -> None:
        try:
            slot.begin(self._copy_of)
        except Exception as error:  # nobody waits for this future: what is not noted here would be lost
            log.exception("a grammar cannot be used")
            slot.problem = f"the grammar cannot be used: {type(error).__name__}"

    def _copy_of(self, grammar: Grammar) -> LLMatcher:
        """A matcher at the grammar's beginning. Raises GrammarFailure."""
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._compile(grammar)
            self._compiled[grammar] = compiled
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return compiled.deep_copy()

    def _compile(self, grammar: Grammar) -> LLMatcher:
        try:
            vocabulary = self._vocabulary.result()
            compiled = LLMatcher(vocabulary, to_llguidance(grammar), log_level=0, limits=LLParserLimits(**LIMITS))
        except GrammarError as error:
            raise GrammarFailure(str(error)) from None
        except Exception as error:  # the vocabulary could not be loaded
            raise GrammarFailure(f"grammars cannot be used with this model: {error}") from None
        if compiled.is_error():
            raise GrammarFailure(" ".join(compiled.get_error().split())[:_MAX_PROBLEM_CHARS])
        compiled.compute_bitmask()  # what it learns of its beginning, its copies know
        return compiled

    @torch.inference_mode()  # of this thread: the tensors are from a step's
    def _compute(self, masks: Masks) -> None:
        ready = [(slot.matcher, row) for row, slot in enumerate(masks.matchers) if not slot.problem]
        if ready:
            bits = masks.bits
            self._executor.unsafe_compute_mask_ptr(ready, bits.data_ptr(), bits.shape[1] * 4, len(bits))
        for mask, slot in zip(masks.bits, masks.matchers, strict=True):
            if not slot.problem and slot.matcher.is_error():
                slot.fail()
            if slot.problem:
                mask.fill_(-1)
            elif slot.ends_late:
                self._without_eos(mask)
        forbidden = np.unpackbits(~masks.bits.numpy().view(np.uint8), axis=1, bitorder="little").view(np.bool_)
        few: list[np.ndarray] = []
        for i, row in enumerate(forbidden):
            if len(row) - np.count_nonzero(row) <= _MOST_EXCLUDED:
                tokens = np.flatnonzero(~row[: self._vocab_size])
                few.append(np.stack((np.full_like(tokens, i), np.full_like(tokens, masks.rows[i]), tokens)))
        if few:
            masks.narrow = torch.from_numpy(np.concatenate(few, axis=1))
        if self._device.type == "cpu":
            masks.forbidden = torch.from_numpy(forbidden)

    def _without_eos(self, mask: Tensor) -> None:
        """Exclude the ends of a sequence from a mask (int32 `[words]`) that allows something else."""
        without = mask.clone()
        for token in self._eos:
            without[token // 32] &= ~(1 << (token % 32)) if token % 32 < 31 else 2**31 - 1
        if bool(without.any()):
            mask.copy_(without)


def _runs(rows: list[int], most: int) -> Iterator[tuple[int, int, int]]:
    """Runs of up to `most` consecutive numbers in an ascending list: the first number, and where the run begins and
    ends."""
    begin = 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or rows[end] != rows[end - 1] + 1 or end - begin == most:
            yield rows[begin], begin, end
            begin = end
