"""The request ledger: every live request with all that is needed to continue it elsewhere."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from common.fields import IntArray
from common.messages import MAX_RID, Generate
from common.sampling_params import SamplingParams

Owner = bytes  # the identity of a client's connection


@dataclass(slots=True, eq=False)
class Entry:
    """A live request. `prompt` is None until it is tokenized; then `max_tokens` is what the answer may have.

    Prompt, parameters with `seed`, and the tokens `emitted` so far determine every further token.
    """

    rid: int
    owner: Owner
    client_rid: int
    params: SamplingParams
    stream: bool
    seed: int
    prompt: IntArray | None = None
    max_tokens: int = 0
    emitted: IntArray = field(default_factory=lambda: array("i"))
    cached: int = 0
    aborting: bool = False  # the scheduler has been told to end it
    texts: list[str] = field(default_factory=list)  # the answer so far, where it is sent in one row at the end

    @property
    def admitted(self) -> bool:
        return self.prompt is not None


class Ledger:
    """Live requests by their id in the cluster, by owner, and by the owner's own id."""

    def __init__(self, new_seed: Callable[[], int]):
        self._new_seed = new_seed
        self._next_rid = 0
        self._entries: dict[int, Entry] = {}
        self._owners: dict[Owner, dict[int, Entry]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def owners(self) -> list[Owner]:
        return list(self._owners)

    def open(self, owner: Owner, msg: Generate) -> Entry:
        """Take in a request, whose id must not be in use by the same owner (see `find`)."""
        own = self._owners.setdefault(owner, {})
        if msg.rid in own:
            raise ValueError(f"request id {msg.rid} is in use")
        seed = msg.params.seed if msg.params.seed is not None else self._new_seed()
        entry = Entry(self._unused_rid(), owner, msg.rid, msg.params, msg.stream, seed)
        self._entries[entry.rid] = own[msg.rid] = entry
        return entry

    def get(self, rid: int) -> Entry | None:
        return self._entries.get(rid)

    def find(self, owner: Owner, client_rid: int) -> Entry | None:
        return self._owners.get(owner, {}).get(client_rid)

    def close(self, entry: Entry) -> None:
        """Forget a live request."""
        del self._entries[entry.rid]
        own = self._owners[entry.owner]
        del own[entry.client_rid]
        if not own:
            del self._owners[entry.owner]

    def close_all_of(self, owner: Owner) -> list[Entry]:
        """Forget and return all live requests of a client."""
        own = self._owners.pop(owner, {})
        for entry in own.values():
            del self._entries[entry.rid]
        return list(own.values())

    def _unused_rid(self) -> int:
        while True:
            rid = self._next_rid
            self._next_rid = (rid + 1) & MAX_RID
            if rid not in self._entries:
                return rid
