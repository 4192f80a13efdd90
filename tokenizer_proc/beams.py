"""Runs beam searches on a cluster that knows nothing of them.

Every beam of a step is a request for one token with the log probabilities of the likeliest ones. It finds all of its
tokens but the last in the prefix cache: whole pages are shared, and the page in which beams part is copied. The
request's choices lend their ids, a choice a beam; in the end each of them gets a hypothesis, which is sent through the
detokenizer like any other answer.
"""

from array import array
from collections.abc import Callable

from common.codec import Message
from common.fields import IntArray
from common.logprobs import LogprobRows, Logprobs
from common.messages import AddRequest, Finish, OpenStream, TokenBatch, ints
from common.sampling_params import DrawParams
from tokenizer_proc.beam_search import BeamSearch, Hypothesis
from tokenizer_proc.ledger import Choice, Entry
from tokenizer_proc.rows import TextRow

Send = Callable[[Message], None]


class Beams:
    """The beam search of one request, whose prompt and `max_tokens` must be known. `ends` are the tokens that end a
    sequence, `send_*` as in Frontend."""

    def __init__(self, entry: Entry, ends: IntArray, send_scheduler: Send, send_detokenizer: Send):
        self.entry = entry
        self.search = BeamSearch(
            len(entry.choices),
            entry.max_tokens,
            frozenset(ends),
            length_penalty=entry.params.length_penalty,
            early_stopping=entry.params.early_stopping,
            top=entry.params.logprobs,
        )
        self._ends = ends
        self._send_scheduler = send_scheduler
        self._send_detokenizer = send_detokenizer
        self._choices = list(entry.choices)  # a beam each, and in the end a hypothesis
        self._found: dict[int, list[tuple[int, float]]] = {}  # by id: what follows each beam

    def step(self, left_ms: int, waited_ms: int = 0) -> None:
        """Ask what follows each beam. Times as in AddRequest."""
        self._found.clear()
        entry = self.entry
        assert entry.prompt is not None
        alternatives = max(self.search.num_candidates, entry.params.logprobs or 0)
        draw = DrawParams(temperature=0.0, logprobs=alternatives)
        for choice, beam in zip(self._choices, self.search.beams, strict=False):
            tokens = entry.prompt + ints(*beam.tokens)
            self._send_detokenizer(OpenStream(choice.rid, (), entry.params.skip_special_tokens))
            self._send_scheduler(
                AddRequest(
                    choice.rid,
                    tokens,
                    1,
                    ints(),
                    draw,
                    entry.cache_salt,
                    entry.priority,
                    left_ms,
                    waited_ms=waited_ms,
                    counted=bool(beam.tokens),
                )
            )

    def resume(self, left_ms: int, waited_ms: int) -> None:
        """Do what was done last again: whoever should have answered is no more."""
        if self.search.done:
            self.finish(array("q"))
        else:
            self.step(left_ms, waited_ms)

    def take(self, choice: Choice, row: TextRow) -> bool:
        """The answer of one beam. Whether it was the last one of the step, so that the search has advanced."""
        if row.scores.tokens is None:
            return False
        scores = row.scores.tokens
        self._found[choice.rid] = list(zip(scores.top_ids, scores.top_logprobs, strict=True))
        if not self.search.beams[0].tokens:
            for each in self._choices:
                each.cached = row.cached
        asked = self._choices[: len(self.search.beams)]
        if len(self._found) < len(asked):
            return False
        self.search.advance([self._found[each.rid] for each in asked])
        return True

    def finish(self, times: IntArray) -> None:
        """Send the hypotheses on their way. `times` are those of the last step's TokenBatch."""
        for choice, hypothesis in zip(self._choices, self.search.hypotheses, strict=True):
            if choice not in self.entry.choices:
                continue  # it has arrived before
            tokens = ints(*hypothesis.tokens)
            finish = Finish.STOP if tokens[-1] in self._ends else Finish.LENGTH
            self._send_detokenizer(OpenStream(choice.rid, (), self.entry.params.skip_special_tokens))
            self._send_detokenizer(
                TokenBatch(
                    ints(choice.rid),
                    ints(len(tokens)),
                    tokens,
                    bytes([finish]),
                    ints(max(0, choice.cached)),
                    times[:],
                    self._logprobs(hypothesis),
                )
            )

    def _logprobs(self, hypothesis: Hypothesis) -> LogprobRows | None:
        """The log probabilities of a hypothesis' tokens, where they were asked for."""
        if hypothesis.path is None:
            return None
        entries = Logprobs.empty()
        for token, step in zip(hypothesis.tokens, hypothesis.path.steps(), strict=True):
            ids, values = ints(*(i for i, _ in step.top)), array("f", (value for _, value in step.top))
            entries.extend(
                Logprobs(ints(token), array("f", [step.logprob]), ints(step.rank), ints(len(ids)), ids, values)
            )
        return LogprobRows.of({0: entries})
