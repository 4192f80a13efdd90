"""Questions of clients about the cluster's numbers: asked on in the scheduler, answered with the tokenizer's own."""

from collections.abc import Callable, Mapping

from common.codec import Message
from common.messages import MAX_RID, GetStats, Stats
from tokenizer_proc.ledger import Owner

MAX_QUERIES = 1024  # questions on their way


class StatsQuestions:
    """Passes questions on by `send_scheduler`, and answers by `send(owner, message)`."""

    def __init__(self, send_scheduler: Callable[[Message], None], send: Callable[[Owner, Message], None]):
        self._send_scheduler = send_scheduler
        self._send = send
        self._queries: dict[int, tuple[Owner, int]] = {}
        self._next = 0

    def ask(self, owner: Owner, query: int) -> bool:
        """Pass a question on, unless too many are on their way."""
        if len(self._queries) >= MAX_QUERIES:
            return False
        number = self._next
        self._next = (number + 1) & MAX_RID
        self._queries[number] = (owner, query)
        self._send_scheduler(GetStats(number))
        return True

    def again(self) -> None:
        """Ask a new scheduler what the old one did not answer."""
        for number in self._queries:
            self._send_scheduler(GetStats(number))

    def answer(self, stats: Stats, own: Mapping[str, int]) -> None:
        """The scheduler's answer, to which the tokenizer's `own` numbers are added."""
        asked = self._queries.pop(stats.query, None)
        if asked is not None:
            owner, query = asked
            self._send(owner, Stats(query, {**stats.values, **own}))
