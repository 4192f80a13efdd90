"""Requests on their way to detokenizer and scheduler: the first time, and again after a loss."""

from collections.abc import Callable
from dataclasses import replace

from common.codec import Message
from common.fields import IntArray
from common.messages import MAX_MS, AddRequest, OpenStream
from tokenizer_proc.answers import expired
from tokenizer_proc.beams import Beams
from tokenizer_proc.ledger import Choice, Entry
from tokenizer_proc.limits import Limits
from tokenizer_proc.measures import Measures
from tokenizer_proc.sampling_checks import check_beam_logprobs, check_prompt_logprobs, ends_of, excluded_at_first
from tokenizer_proc.shared_scores import SharedScores

Send = Callable[[Message], None]


class Handover:
    """Hands tokenized requests over through `send_scheduler` and `send_detokenizer`, which never wait."""

    def __init__(
        self,
        limits: Limits,
        eos_token_ids: IntArray,
        measures: Measures,
        send_scheduler: Send,
        send_detokenizer: Send,
        clock: Callable[[], int],
    ):
        self._limits = limits
        self._eos = eos_token_ids
        self._measures = measures
        self._send_scheduler = send_scheduler
        self._send_detokenizer = send_detokenizer
        self._clock = clock

    def admit(self, entry: Entry, prompt: IntArray) -> None:
        """Hand over a tokenized request: the first of its choices computes the prompt, the others share it. Raises
        Refused when its deadline has passed or its prompt is not what it may be."""
        params = entry.params
        left_ms = self.left_ms(entry)
        entry.max_tokens = self._limits.answer_tokens(len(prompt), params.max_tokens)
        check_prompt_logprobs(params, len(prompt))
        if params.use_beam_search:
            check_beam_logprobs(params, len(entry.choices), entry.max_tokens)
        entry.prompt = prompt
        self._measures.admitted(len(prompt))
        if params.use_beam_search and len(entry.choices) > 1:
            entry.beams = Beams(entry, ends_of(params, self._eos), self._send_scheduler, self._send_detokenizer)
            entry.beams.step(left_ms)
            return
        wanted = len(prompt) - 1 - params.unscored(len(prompt))
        if params.prompt_logprobs is not None and len(entry.choices) > 1 and wanted:
            entry.shared = SharedScores(wanted)
        for choice in entry.begun:
            self._submit(choice, prompt, left_ms)

    def begin_others(self, entry: Entry) -> None:
        """Hand over all but the first choice of a request, whose shared scores are complete. Raises Refused when its
        deadline has passed."""
        assert entry.prompt is not None
        left_ms = self.left_ms(entry)
        for choice in entry.choices:
            if choice.index:
                self._submit(choice, entry.prompt, left_ms, self.waited_ms(entry))

    def again(self, entry: Entry) -> None:
        """Hand an admitted request over to processes that know nothing of it, each choice from the last token that its
        client was sent. Raises Refused when its deadline has passed."""
        assert entry.prompt is not None
        left_ms = self.left_ms(entry)
        if entry.beams is not None:
            entry.beams.resume(left_ms, self.waited_ms(entry))
            return
        for choice in entry.begun:
            self._submit(choice, entry.prompt, left_ms, self.waited_ms(entry), counted=True)

    def left_ms(self, entry: Entry) -> int:
        """Until the request's deadline, or 0 where it has none. Raises Refused when it has passed."""
        if not entry.deadline_ms:
            return 0
        left = entry.time_left(self._clock())
        if left <= 0:
            raise expired(entry)
        return max(1, left // 10**6)

    def waited_ms(self, entry: Entry) -> int:
        """Since the request came, for handing it in again: at least 1."""
        return min(MAX_MS, max(1, (self._clock() - entry.arrival) // 10**6))

    def _submit(
        self, choice: Choice, prompt: IntArray, left_ms: int, waited_ms: int = 0, *, counted: bool = False
    ) -> None:
        """Hand a choice over to detokenizer and scheduler, from where its client is."""
        entry, params, emitted = choice.entry, choice.entry.params, choice.emitted
        if params.use_beam_search:
            params = replace(params, temperature=0.0)  # one beam is a greedy search, as in transformers
        draw = params.draw(choice.seed, len(prompt), excluded_at_first(params, self._eos), entry.bad_words)
        scored = params.unscored(len(prompt)) + choice.scored
        if entry.shared is not None and choice.index:
            draw, scored = replace(draw, prompt_logprobs=None), 0
        self._send_detokenizer(
            OpenStream(
                choice.rid, params.stop, params.skip_special_tokens, params.min_tokens, emitted,
                params.include_stop_str_in_output,
            )
        )  # fmt: skip
        self._send_scheduler(
            AddRequest(
                choice.rid, prompt + emitted, entry.max_tokens, ends_of(params, self._eos), draw, entry.cache_salt,
                entry.priority, left_ms, len(emitted), scored, waited_ms, params.grammar,
                params.grammar is not None and params.ignore_eos, counted,
            )
        )  # fmt: skip
