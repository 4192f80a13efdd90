"""The rows of TextBatches one by one, as clients see them. A pure part of every connection to a cluster."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from common.logprobs import TokenLogprobs
from common.messages import Finish, TextBatch, Timing

_FINISHES = {finish.value: finish for finish in Finish}


@dataclass(slots=True)  # not frozen: that makes a row, of which there is one for every token, four times as dear
class Row:
    """New output of one choice of a request (0 for the only one). `finish` is not NONE in the choice's last row.

    `times` is TextBatch.times (nanoseconds), `received_ns` the CLOCK_MONOTONIC time when the row arrived here.
    `logprobs` has an entry per token where the request asked for them. `prompt_logprobs` is in the first row of a
    choice where it asked for them: an entry per prompt token, None for the first, or for all before
    `prompt_logprobs_start`; fewer when it was aborted before.
    `stop_reason` is the stop token or stop string that ended the choice, None in other rows and at the model's own
    end-of-sequence token.
    `timing` is in the rows with a choice's first tokens and with its end, where they come from a cluster.
    `reasoning` is what the model thought, where somebody has told it from the `text`.
    `tokens_so_far` is for transports that count the request's tokens, those of all its choices together, without naming
    them (HTTP); None: count the ids.
    """

    rid: int
    choice: int
    text: str
    token_ids: Sequence[int]
    finish: Finish
    prompt_tokens: int
    cached_tokens: int
    times: Sequence[int]
    received_ns: int
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    stop_reason: int | str | None = None
    tokens_so_far: int | None = None
    timing: Timing | None = None
    reasoning: str = ""


class RowReader:
    """Reads TextBatches. Prompt log probabilities come in pieces, which it holds until their choice's first row."""

    def __init__(self) -> None:
        self._prompts: dict[int, dict[int, list[TokenLogprobs]]] = {}  # by request and choice

    def rows(self, batch: TextBatch, received_ns: int, live: Callable[[int, int], bool]) -> Iterator[Row]:
        """The batch's rows of choices for which `live(rid, choice)` holds when their turn comes."""
        logprobs = batch.logprobs.by_row() if batch.logprobs is not None else {}
        prompts = batch.prompt_logprobs.by_row() if batch.prompt_logprobs is not None else {}
        timings = {timing.row: timing for timing in batch.timings}
        reasons = {s.row: s.string if s.token is None else s.token for s in batch.stopped}
        start = 0
        for i, rid in enumerate(batch.rids):
            tokens = batch.token_ids[start : start + batch.counts[i]]
            start += batch.counts[i]
            choice = batch.choices[i]
            if not live(rid, choice):
                continue
            if i in prompts:
                held = self._prompts.setdefault(rid, {}).setdefault(choice, [])
                held += prompts[i].entries(batch.token_bytes)
                if not tokens and not batch.finish[i]:
                    continue
            yield Row(
                rid,
                choice,
                batch.texts[i],
                tokens,
                _FINISHES[batch.finish[i]],
                batch.prompt_tokens[i],
                batch.cached[i],
                batch.times,
                received_ns,
                tuple(logprobs[i].entries(batch.token_bytes)) if i in logprobs else None,
                self._take_prompt(rid, choice),
                reasons.get(i),
                timing=timings.get(i),
            )

    def forget(self, rid: int) -> None:
        """The request has ended with an error."""
        self._prompts.pop(rid, None)

    def _take_prompt(self, rid: int, choice: int) -> tuple[TokenLogprobs | None, ...] | None:
        of_request = self._prompts.get(rid)
        if of_request is None or choice not in of_request:
            return None
        entries = of_request.pop(choice)
        if not of_request:
            del self._prompts[rid]
        return (None, *entries)
