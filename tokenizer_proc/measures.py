"""What the tokenizer process measures of requests: latencies as seen where answers leave, and how requests end."""

from collections import Counter

from common.messages import ErrorCode, Finish
from common.metrics import histogram
from tokenizer_proc.ledger import Choice, Entry


class Measures:
    """Histograms and counters by name. Times are nanoseconds of one clock."""

    def __init__(self) -> None:
        names = (
            "ttft", "itl", "e2e", "prefill", "decode", "inference", "token_time", "prompt_tokens", "output_tokens",
            "longest_answer", "max_tokens", "computed_tokens", "choices",
        )  # fmt: skip
        self._histograms = {name: histogram(f"tokenizer.{name}") for name in names}
        self._counters: Counter[str] = Counter(
            {f"finished_{f.name.lower()}": 0 for f in Finish if f is not Finish.NONE}
            | {f"errors_{code.name.lower()}": 0 for code in ErrorCode}
        )

    def tokens(self, choice: Choice, count: int, now: int) -> None:
        """New tokens of a choice have arrived."""
        if not count:
            return
        if not choice.first_ns:
            choice.first_ns = now
            self._histograms["ttft"].observe((now - choice.entry.arrival) / 1e9)
            if choice.started_ns:
                self._histograms["prefill"].observe((now - choice.started_ns) / 1e9)
        else:
            self._histograms["itl"].observe((now - choice.last_ns) / 1e9 / count, count)
        choice.last_ns = now

    def ended(self, choice: Choice, finish: int, now: int) -> None:
        """A choice has its terminal row."""
        self._counters[f"finished_{Finish(finish).name.lower()}"] += 1
        self._histograms["e2e"].observe((now - choice.entry.arrival) / 1e9)
        self._histograms["output_tokens"].observe(len(choice.emitted))
        if choice.first_ns:
            self._histograms["decode"].observe((now - choice.first_ns) / 1e9)
            self._histograms["token_time"].observe(
                (choice.last_ns - choice.first_ns) / 1e9 / max(1, len(choice.emitted) - 1)
            )
            if choice.started_ns:
                self._histograms["inference"].observe((choice.last_ns - choice.started_ns) / 1e9)
        entry = choice.entry
        if entry.prompt is not None:
            self._histograms["max_tokens"].observe(entry.max_tokens)
            self._histograms["computed_tokens"].observe(len(entry.prompt) - max(0, choice.cached))

    def over(self, entry: Entry) -> None:
        """All choices of a request have their terminal rows."""
        choices = [*entry.over, *entry.choices]
        self._histograms["choices"].observe(len(choices))
        self._histograms["longest_answer"].observe(max(len(choice.emitted) for choice in choices))

    def admitted(self, prompt_tokens: int) -> None:
        """A prompt is tokenized and goes to the scheduler."""
        self._histograms["prompt_tokens"].observe(prompt_tokens)

    def refused(self, code: int) -> None:
        """A request ended with an error."""
        self._counters[f"errors_{ErrorCode(code).name.lower()}"] += 1

    def flat(self) -> dict[str, int]:
        """All of it as counters."""
        values = {f"tokenizer.{name}": count for name, count in self._counters.items()}
        for name, measured in self._histograms.items():
            values |= measured.flat(f"tokenizer.{name}")
        return values
