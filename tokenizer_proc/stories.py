"""The stories of requests that come over the tokenizer's own socket: a line in the log and a span when they end.

Requests of a gateway come over it too, and have a story there already, so they are left out here.
"""

import logging
from collections.abc import Callable

from common.messages import ErrorCode, Finish, Generate
from common.story import GATEWAY, IPC, Story
from common.tracing import Traces
from tokenizer_proc.ledger import Entry, Owner
from tokenizer_proc.limits import Refused

log = logging.getLogger(__name__)


class Stories:
    """`model` is the name that is served, `clock` gives the nanoseconds of the ledger's times."""

    def __init__(self, model: str, clock: Callable[[], int], traces: Traces | None = None):
        self._model = model
        self._clock = clock
        self._traces = traces

    def refused(self, owner: Owner, msg: Generate, refusal: Refused) -> None:
        """A request was not even taken in."""
        if self._listens(owner):
            story = self._story(owner, msg.rid, msg.stream, self._clock())
            story.fail(*cause(refusal))
            self._tell(story)

    def ended(self, entry: Entry) -> None:
        """The last choice of a request has ended."""
        if not self._listens(entry.owner):
            return
        story = self._story(entry.owner, entry.client_rid, entry.stream, entry.arrival)
        choices = sorted([*entry.over, *entry.choices], key=lambda choice: choice.index)
        story.prompt_tokens = len(entry.prompt or ())
        story.cached_tokens = max(0, choices[0].cached)  # the first choice computes what the others share
        story.started_ns = min((c.started_ns for c in choices if c.started_ns), default=0)
        for c in choices:
            story.answer(c.index, len(c.emitted), c.first_ns, c.last_ns, Finish(c.finish))
        if entry.failure is not None:
            story.fail(*entry.failure)
        self._tell(story)

    def _listens(self, owner: Owner) -> bool:
        """Whether anybody wants to know of this client's requests from here."""
        return not owner.startswith(GATEWAY) and (self._traces is not None or log.isEnabledFor(logging.INFO))

    def _story(self, owner: Owner, rid: int, stream: bool, arrival_ns: int) -> Story:
        name = f"{owner.hex()}-{rid}"
        return Story(name, IPC, "generate", model=self._model, stream=stream, generates=True, arrival_ns=arrival_ns)

    def _tell(self, story: Story) -> None:
        if self._traces is not None:
            self._traces.told(story)
        log.info("%s", story.line(self._clock()))


def cause(refusal: Refused) -> tuple[str, str]:
    """Code and problem of a refusal, as stories tell them."""
    return ErrorCode(refusal.code).name.lower(), refusal.problem
