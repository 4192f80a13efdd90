"""The rows that one batch of the detokenizer has for clients, as batches of their own."""

from common.fields import IntArray
from common.messages import Finish, ints
from tokenizer_proc.answers import Answers
from tokenizer_proc.ledger import Choice, Entry, Ledger, Owner
from tokenizer_proc.rows import Rows, Scores
from tokenizer_proc.shared_scores import SharedScores


class Outgoing:
    """`times` are those of the batches to send."""

    def __init__(self, ledger: Ledger, answers: Answers, times: IntArray):
        self._ledger = ledger
        self._answers = answers
        self._times = times
        self._rows: dict[Owner, Rows] = {}

    def rows_for(self, entry: Entry) -> Rows | None:
        """Where another row of a request goes, after sending those that fill a frame; None where these could not be
        sent, and the request has ended with that."""
        rows = self._rows.setdefault(entry.owner, Rows())
        if rows.full:
            live = self._ledger.holds(entry)
            self._answers.send_rows(entry.owner, rows.batch(self._times))
            rows = self._rows[entry.owner] = Rows()
            if live and not self._ledger.holds(entry):
                return None
        return rows

    def add_shared(self, shared: SharedScores, choice: Choice) -> bool:
        """What another choice has learned of the prompt, before the first row of this one. False where the request has
        ended with what was to be sent first."""
        entry = choice.entry
        for piece in shared.pieces:
            rows = self.rows_for(entry)
            if rows is None:
                return False
            choice.scored += len(piece)
            rows.add(entry.client_rid, choice.index, ints(), "", Finish.NONE, len(entry.prompt or ()), choice.cached)
            rows.add_scores(Scores(prompt=piece), shared.token_bytes.__getitem__)
        return True

    def send(self) -> None:
        for owner, rows in self._rows.items():
            if rows.rids:
                self._answers.send_rows(owner, rows.batch(self._times))
