"""The request ledger: every live request with all that is needed to continue it elsewhere."""

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.fields import IntArray
from common.messages import MAX_RID, Generate
from common.sampling_params import SamplingParams
from tokenizer_proc.rows import Scores, TextRow
from tokenizer_proc.shared_scores import SharedScores

if TYPE_CHECKING:
    from tokenizer_proc.beams import Beams

Owner = bytes  # the identity of a client's connection
SEEDS = 2**63


@dataclass(slots=True, eq=False)
class Entry:
    """A live request of a client. `prompt` is None until it is tokenized; then `max_tokens` is what each answer may
    have."""

    owner: Owner
    client_rid: int
    params: SamplingParams
    stream: bool
    cache_salt: str
    priority: int
    deadline_ms: int
    arrival: int  # ns
    choices: list["Choice"] = field(default_factory=list)  # those that have not ended
    over: list["Choice"] = field(default_factory=list)  # those that have
    failure: tuple[str, str] | None = None  # code and problem of the error that ended it
    bad_words: tuple[IntArray, ...] = ()  # those of `params` as tokens
    prompt: IntArray | None = None
    max_tokens: int = 0
    aborting: bool = False  # the scheduler has been told to end it
    beams: "Beams | None" = None  # its beam search, where it is one
    shared: SharedScores | None = None  # the prompt's log probabilities, where several choices want them

    @property
    def begun(self) -> list["Choice"]:
        """The live choices that detokenizer and scheduler know, of an admitted request."""
        if self.shared is None or self.shared.complete:
            return self.choices
        return [choice for choice in self.choices if choice.index == 0]

    @property
    def admitted(self) -> bool:
        return self.prompt is not None

    def time_left(self, now: int) -> int:
        """Until its deadline, which it must have (ns); not positive when it has passed."""
        return self.arrival + self.deadline_ms * 10**6 - now


@dataclass(slots=True, eq=False)
class Choice:
    """One of the answers of a request, under an id of its own in the cluster.

    Prompt and parameters of the request, `seed`, and the tokens `emitted` so far determine every further token.
    """

    rid: int
    entry: Entry
    index: int  # among the choices of the request
    seed: int
    emitted: IntArray = field(default_factory=lambda: array("i"))
    cached: int = 0
    scored: int = 0  # how many prompt tokens have come with what they predict
    started_ns: int = 0  # when its prompt began to be computed
    first_ns: int = 0  # when its first tokens came
    last_ns: int = 0  # when its latest ones came
    finish: int = 0  # how it ended
    sent: int = 0  # how many of the emitted tokens the client has been sent
    # what of the rest has come with them, where the answer is not streamed
    texts: list[str] = field(default_factory=list)
    scores: Scores = field(default_factory=Scores)
    token_bytes: dict[int, bytes] = field(default_factory=dict)

    def hold(self, row: TextRow, token_bytes: Mapping[int, bytes]) -> None:
        """Keep what came with a row, whose tokens are in `emitted`, for later."""
        self.texts.append(row.text)
        self.scores.extend(row.scores)
        for token in row.scores.named:  # a batch has those of all other rows, too
            self.token_bytes[token] = token_bytes[token]

    def release(self) -> tuple[IntArray, str, Scores, dict[int, bytes]]:
        """All that has not been sent: tokens, text, log probabilities and the bytes of the tokens in them."""
        held = self.emitted[self.sent :], "".join(self.texts), self.scores, self.token_bytes
        self.sent, self.texts, self.scores, self.token_bytes = len(self.emitted), [], Scores(), {}
        return held


class Ledger:
    """Live requests by owner and by the owner's own id, their choices by id in the cluster. `ended` is told of each
    request that is forgotten."""

    def __init__(self, new_seed: Callable[[], int], ended: Callable[[Entry], None] = lambda entry: None):
        self._new_seed = new_seed
        self._ended = ended
        self._next_rid = 0
        self._choices: dict[int, Choice] = {}
        self._owners: dict[Owner, dict[int, Entry]] = {}

    def __len__(self) -> int:
        """Live requests."""
        return sum(map(len, self._owners.values()))

    @property
    def choices(self) -> int:
        """Live choices of all requests."""
        return len(self._choices)

    @property
    def owners(self) -> list[Owner]:
        return list(self._owners)

    @property
    def admitted(self) -> list[Entry]:
        """Live requests that detokenizer and scheduler were told of, in the order of their arrival."""
        entries = [entry for own in self._owners.values() for entry in own.values() if entry.admitted]
        return sorted(entries, key=lambda entry: entry.arrival)

    def open(self, owner: Owner, msg: Generate, now: int) -> Entry:
        """Take in a request that arrived `now` (ns), whose id must not be in use by the same owner (see `find`)."""
        own = self._owners.setdefault(owner, {})
        if msg.rid in own:
            raise ValueError(f"request id {msg.rid} is in use")
        entry = Entry(
            owner, msg.rid, msg.params, msg.stream, msg.cache_salt, msg.priority, msg.deadline_ms, arrival=now
        )
        seed = msg.params.seed if msg.params.seed is not None else self._new_seed()
        for index in range(msg.n):
            choice = Choice(self._unused_rid(), entry, index, (seed + index) % SEEDS)
            entry.choices.append(choice)
            self._choices[choice.rid] = choice
        own[msg.rid] = entry
        return entry

    def get(self, rid: int) -> Choice | None:
        return self._choices.get(rid)

    def find(self, owner: Owner, client_rid: int) -> Entry | None:
        return self._owners.get(owner, {}).get(client_rid)

    def holds(self, entry: Entry) -> bool:
        """Whether a request is still live."""
        return self.find(entry.owner, entry.client_rid) is entry

    def end(self, choice: Choice) -> None:
        """Forget a live choice, and with the last one its request."""
        entry = choice.entry
        del self._choices[choice.rid]
        entry.choices.remove(choice)
        entry.over.append(choice)
        if not entry.choices:
            self._forget(entry)

    def close(self, entry: Entry, failure: tuple[str, str] | None = None) -> None:
        """Forget a live request, which a `failure` (code and problem) has ended. Its `choices` are those that were
        live."""
        entry.failure = failure
        for choice in entry.choices:
            del self._choices[choice.rid]
        self._forget(entry)

    def close_all_of(self, owner: Owner, failure: tuple[str, str]) -> list[Entry]:
        """Forget and return all live requests of a client, which a failure has ended."""
        entries = list(self._owners.get(owner, {}).values())
        for entry in entries:
            self.close(entry, failure)
        return entries

    def _forget(self, entry: Entry) -> None:
        own = self._owners[entry.owner]
        del own[entry.client_rid]
        if not own:
            del self._owners[entry.owner]
        self._ended(entry)

    def _unused_rid(self) -> int:
        while True:
            rid = self._next_rid
            self._next_rid = (rid + 1) & MAX_RID
            if rid not in self._choices:
                return rid
