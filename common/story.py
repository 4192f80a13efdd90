"""What became of one request, for its line in the log, the metrics and its trace. Plain data.

The gateway tells the stories of HTTP requests, the tokenizer those of requests that come over its own socket.
"""

import re
import secrets
import time
from dataclasses import dataclass, field

from common.messages import Finish
from common.rows import Row

GATEWAY = b"gateway-"  # how identities of gateways at the tokenizer begin: they tell their stories themselves
IPC = "IPC"  # the method of requests that come over the tokenizer's own socket
SANE_ID = r"[A-Za-z0-9._:/@+=-]{1,128}"


def request_id(given: str | None) -> str:
    """The client's own id where it is sane, else a new one."""
    return given if given is not None and re.fullmatch(SANE_ID, given) else secrets.token_hex(16)


@dataclass(slots=True)
class _Answer:
    """One choice of one prompt. Times as in Story."""

    tokens: int = 0
    first_ns: int = 0
    last_ns: int = 0


@dataclass(slots=True)
class Story:
    """Filled in as the request goes on. Times are CLOCK_MONOTONIC nanoseconds, 0 for what has not happened."""

    id: str
    method: str = ""
    route: str = ""  # the path of the endpoint, or "unknown"
    key: str = "-"
    status: int = 0
    model: str = "-"
    user: str = "-"
    stream: bool = False
    generates: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finish: dict[str, int] = field(default_factory=dict)  # how many choices ended so
    error: str = ""  # the code of an error
    problem: str = ""  # its message
    ignored: list[str] = field(default_factory=list)
    traceparent: str = ""  # the header of that name, as it came
    trace_id: str = ""
    arrival_ns: int = field(default_factory=time.monotonic_ns)
    started_ns: int = 0  # when the first step of a prompt was planned
    first_ns: int = 0  # when the first token left the cluster
    last_ns: int = 0  # when the latest tokens did
    _answers: dict[tuple[int, int], _Answer] = field(default_factory=dict)

    def row(self, prompt: int, row: Row) -> None:
        """Take note of a row of the answer to prompt number `prompt`."""
        self.output_tokens += len(row.token_ids)
        if row.finish is not Finish.NONE:
            name = row.finish.name.lower()
            self.finish[name] = self.finish.get(name, 0) + 1
        answer = self._answers.get((prompt, row.choice))
        if answer is None:
            answer = self._answers[prompt, row.choice] = _Answer()
        answer.tokens += len(row.token_ids)
        if row.timing is not None:
            self.started_ns = _earlier(self.started_ns, row.timing.started)
            self.first_ns = _earlier(self.first_ns, row.timing.first)
            answer.first_ns = row.timing.first
        if row.token_ids and row.times:
            answer.last_ns = row.times[-1]
            self.last_ns = max(self.last_ns, answer.last_ns)

    def answer(self, choice: int, tokens: int, first_ns: int, last_ns: int, finish: Finish) -> None:
        """Take note of a whole answer, where its rows are not seen."""
        self.output_tokens += tokens
        if finish is not Finish.NONE:
            name = finish.name.lower()
            self.finish[name] = self.finish.get(name, 0) + 1
        self._answers[0, choice] = _Answer(tokens, first_ns, last_ns)
        self.first_ns = _earlier(self.first_ns, first_ns)
        self.last_ns = max(self.last_ns, last_ns)

    def fail(self, code: str, problem: str) -> None:
        self.error, self.problem = code, problem

    @property
    def itl_ns(self) -> float:
        """Mean time between tokens of one answer, 0 where none has two."""
        timed = [a for a in self._answers.values() if a.first_ns and a.tokens > 1]
        gaps = sum(a.tokens - 1 for a in timed)
        return sum(a.last_ns - a.first_ns for a in timed) / gaps if gaps else 0.0

    @property
    def outcome(self) -> str:
        """How the choices ended, such as `stop` or `length,stop*3`; empty where none has."""
        return ",".join(f"{name}*{count}" if count > 1 else name for name, count in sorted(self.finish.items()))

    def line(self, now_ns: int) -> str:
        """The one line that tells the whole story, as words `name=value`."""
        told: dict[str, object] = {
            "id": self.id, "key": self.key, "method": self.method, "route": self.route,
            "status": self.status or "-",
        }  # fmt: skip
        if self.generates:
            told |= {
                "model": self.model, "user": self.user, "stream": int(self.stream),
                "prompt": self.prompt_tokens, "cached": self.cached_tokens, "output": self.output_tokens,
                "finish": self.outcome or "-",
                "queue_ms": self._ms(self.started_ns), "ttft_ms": self._ms(self.first_ns),
                "itl_ms": f"{self.itl_ns / 1e6:.2f}" if self.itl_ns else "-",
            }  # fmt: skip
        told["e2e_ms"] = self._ms(now_ns)
        if self.trace_id:
            told["trace"] = self.trace_id
        if self.ignored:
            told["ignored"] = ",".join(self.ignored)
        if self.error:
            told |= {"error": self.error, "problem": repr(self.problem)}
        return " ".join(["request", *(f"{name}={value}" for name, value in told.items())])

    def _ms(self, at_ns: int) -> str:
        return f"{(at_ns - self.arrival_ns) / 1e6:.1f}" if at_ns else "-"


def _earlier(known: int, new: int) -> int:
    return min(known, new) if known and new else known or new


def shown(text: str, most: int = 64) -> str:
    """A client's text as one word of a log line."""
    return re.sub(r"[^A-Za-z0-9._:/@+=-]", "_", text[:most]) or "-"
