"""Whether a request's grammar can be used, before the request goes anywhere.

The library compiles it here, in threads beside the event loop, with a vocabulary of single bytes and the model's
special tokens. That is all that a grammar can name, at a fraction of the memory and time of the whole vocabulary, which
only the worker needs.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from common.fields import IntArray
from common.grammars import LIMITS, GrammarError, to_llguidance
from common.messages import ErrorCode
from common.sampling_params import MAX_GRAMMAR_CHARS, Grammar
from tokenizer_proc.ebnf import ebnf_to_lark
from tokenizer_proc.limits import RETRY_AFTER_S, Refused

if TYPE_CHECKING:
    from llguidance import LLTokenizer

log = logging.getLogger(__name__)

FIELD = "params.grammar"
TIME_LIMIT_S = 5.0  # the library's own limits are far below on any machine that is not overloaded
PATIENCE_S = 10.0  # until its turn comes
MAX_PENDING = 64  # grammars that wait for the library
MAX_CACHED = 1024  # verdicts
MAX_CACHED_CHARS = 2**23  # of their grammars
MAX_PROBLEM_CHARS = 1000


@dataclass(frozen=True, slots=True)
class _Verdict:
    """A grammar as workers take it, or the problem that it has."""

    grammar: Grammar
    problem: str = ""


@dataclass(frozen=True, slots=True)
class _Job:
    """A grammar that is compiled, or waits until a thread has `begun` with it."""

    begun: "asyncio.Future[None]"
    verdict: "asyncio.Future[_Verdict]"


class GrammarCheck:
    """Checks grammars against a model's vocabulary. All methods run in the event loop's thread."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: IntArray, pool: Executor) -> None:
        self._tokenizer = tokenizer
        self._eos = list(eos_token_ids)
        self._pool = pool
        self._vocabulary: LLTokenizer | None = None
        self._verdicts: OrderedDict[Grammar, _Verdict] = OrderedDict()
        self._chars = 0
        self._pending: dict[Grammar, _Job] = {}

    async def check(self, grammar: Grammar) -> Grammar:
        """The grammar in a form that workers take. Raises Refused with the library's words when it cannot be used."""
        if not self._eos:
            raise _refused("this model has no end-of-sequence token that could end an answer")
        verdict = self._verdicts.get(grammar)
        if verdict is None:
            verdict = await self._compile(grammar)
        else:
            self._verdicts.move_to_end(grammar)
        if verdict.problem:
            raise _refused(verdict.problem)
        return verdict.grammar

    async def _compile(self, grammar: Grammar) -> _Verdict:
        """Equal grammars are compiled once."""
        job = self._pending.get(grammar)
        if job is None:
            if len(self._pending) >= MAX_PENDING:
                problem = f"{FIELD}: {MAX_PENDING} grammars are waiting to be compiled; try again later"
                raise Refused(ErrorCode.OVERLOADED, problem, FIELD, MAX_PENDING, RETRY_AFTER_S)
            job = self._pending[grammar] = self._begin(grammar)
        await asyncio.wait({job.begun}, timeout=PATIENCE_S)
        if not job.begun.done():
            problem = f"{FIELD}: other grammars are still being compiled; try again later"
            raise Refused(ErrorCode.OVERLOADED, problem, FIELD, 0, RETRY_AFTER_S)
        done, _ = await asyncio.wait({job.verdict}, timeout=TIME_LIMIT_S)
        if not done:
            raise _refused(f"could not be compiled within {TIME_LIMIT_S:g} s", int(TIME_LIMIT_S))
        return job.verdict.result()

    def _begin(self, grammar: Grammar) -> _Job:
        loop = asyncio.get_running_loop()
        begun: asyncio.Future[None] = loop.create_future()

        def work() -> _Verdict:
            loop.call_soon_threadsafe(begun.set_result, None)
            return self._verdict_on(grammar)

        verdict = loop.run_in_executor(self._pool, work)
        verdict.add_done_callback(lambda done: self._note(grammar, done))
        return _Job(begun, verdict)

    def _note(self, grammar: Grammar, done: "asyncio.Future[_Verdict]") -> None:
        del self._pending[grammar]
        if done.cancelled() or done.exception() is not None:
            return
        self._verdicts[grammar] = done.result()
        self._chars += len(grammar.text) + len(done.result().grammar.text)
        while len(self._verdicts) > MAX_CACHED or self._chars > MAX_CACHED_CHARS:
            oldest, verdict = self._verdicts.popitem(last=False)
            self._chars -= len(oldest.text) + len(verdict.grammar.text)

    def _verdict_on(self, grammar: Grammar) -> _Verdict:
        """Runs in the pool."""
        try:
            if grammar.kind == "ebnf":
                grammar = replace(grammar, kind="lark", text=_lark(grammar.text))
            source = to_llguidance(grammar)
        except GrammarError as error:
            return _Verdict(grammar, str(error)[:MAX_PROBLEM_CHARS])
        from llguidance import LLMatcher, LLParserLimits  # with the first grammar

        if self._vocabulary is None:
            self._vocabulary = _vocabulary(self._tokenizer, self._eos)
        limits = LLParserLimits(**LIMITS)
        wrong, words = LLMatcher.validate_grammar_with_warnings(source, self._vocabulary, limits=limits)
        problem = (words[0].strip() or "cannot be compiled")[:MAX_PROBLEM_CHARS] if wrong else ""
        return _Verdict(grammar, problem)


def _lark(ebnf: str) -> str:
    lark = ebnf_to_lark(ebnf)
    if len(lark) > MAX_GRAMMAR_CHARS:
        raise GrammarError(f"text: has more than {MAX_GRAMMAR_CHARS} characters in Lark's syntax")
    return lark


class _Bytes:
    """A vocabulary in the form that the library takes."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special_token_ids: Sequence[int], eos_token_id: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_id = eos_token_id

    def __call__(self, text: bytes) -> list[int]:
        first = len(self.tokens) - 256
        return [first + byte for byte in text]


def _vocabulary(tokenizer: Tokenizer, eos: list[int]) -> "LLTokenizer":
    """The special tokens at their ids, and every byte behind all ids."""
    from llguidance import LLTokenizer, TokenizerWrapper

    size = max(tokenizer.get_vocab_size(with_added_tokens=True), max(eos) + 1)
    tokens = [b""] * size + [bytes([byte]) for byte in range(256)]
    special = {i: t.content.encode() for i, t in tokenizer.get_added_tokens_decoder().items() if t.special and i < size}
    for token_id, content in special.items():
        tokens[token_id] = content
    wrapper = TokenizerWrapper(_Bytes(tokens, sorted(special), eos[0]))
    return LLTokenizer(wrapper, n_vocab=len(tokens), eos_token=eos)


def _refused(problem: str, limit: int = 0) -> Refused:
    return Refused(ErrorCode.INVALID, f"{FIELD}: {problem}", FIELD, limit)
