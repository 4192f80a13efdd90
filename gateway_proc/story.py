"""What became of one HTTP request, for its line in the log and for the metrics. Plain data."""

import re
import secrets
import time
from dataclasses import dataclass, field

from common.messages import Finish
from common.rows import Row

_SANE_ID = re.compile(r"[A-Za-z0-9._:/@+=-]{1,128}")


def request_id(given: str | None) -> str:
    """The client's own id where it is sane, else a new one."""
    return given if given is not None and _SANE_ID.fullmatch(given) else secrets.token_hex(16)


@dataclass(slots=True)
class Story:
    """Filled in as the request goes on. Times are CLOCK_MONOTONIC nanoseconds."""

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
    problem: str = ""
    ignored: list[str] = field(default_factory=list)
    arrival_ns: int = field(default_factory=time.monotonic_ns)
    planned_ns: int = 0  # when the step of the first token was planned
    first_ns: int = 0

    def row(self, row: Row, streamed: bool) -> None:
        """Take note of an answer's row; the time of its first token shows only when it is `streamed`."""
        if row.token_ids and not self.first_ns and streamed:
            self.first_ns = row.received_ns
            self.planned_ns = row.times[0] if row.times else 0
        self.output_tokens += len(row.token_ids)
        if row.finish is not Finish.NONE:
            name = row.finish.name.lower()
            self.finish[name] = self.finish.get(name, 0) + 1

    def line(self, now_ns: int) -> str:
        """The one line that tells the whole story."""
        finish = ",".join(f"{name}*{count}" if count > 1 else name for name, count in self.finish.items()) or "-"
        parts = [
            f"request id={self.id} key={self.key} {self.method} {self.route} status={self.status}",
            f"e2e_ms={self._ms(now_ns)}",
        ]
        if self.generates:
            parts.insert(
                1,
                f"model={self.model} user={self.user} stream={int(self.stream)} prompt={self.prompt_tokens} "
                f"cached={self.cached_tokens} output={self.output_tokens} finish={finish} "
                f"queue_ms={self._ms(self.planned_ns)} ttft_ms={self._ms(self.first_ns)}",
            )
        if self.ignored:
            parts.append(f"ignored={','.join(self.ignored)}")
        if self.problem:
            parts.append(f"problem={self.problem!r}")
        return " ".join(parts)

    def _ms(self, at_ns: int) -> str:
        return f"{(at_ns - self.arrival_ns) / 1e6:.1f}" if at_ns else "-"


def shown(text: str, most: int = 64) -> str:
    """A client's text as one word of a log line."""
    return re.sub(r"[^A-Za-z0-9._:/@+=-]", "_", text[:most]) or "-"
