"""Snapshots of recurrent states: who has which, where requests can start from them, and where new ones are taken.

Some models have layers that keep one state of fixed size of all that a request has computed, updated in place by every
token, instead of keys and values for each. Of such a prompt a prefix can be used only where somebody kept the state
that was there; the pages of the prefix are no use without it. A state has megabytes, so there are few snapshots, each
at a place of the radix tree that is a whole number of pages from its root: a node, and pages of its edge.

A prompt leaves a snapshot where it parts from what is in the tree, if that goes on otherwise (others are likely to part
there as well), and at the last whole page before its last tokens, for those that go on from it or ask the same again:
what a chat template puts before an answer that is to come it often puts otherwise in the next turn. Marconi
(Pan et al., MLSys 2025) admits states at branches and ends, too, and weighs what they save; in SGLang's
MambaRadixCache, the deepest node with a state is where a request starts.

An answer leaves one, too, for the next turn of its conversation. Where it ends is known only afterwards, so one
snapshot goes along with it (Track) and comes to the tree when the request lets go of its pages.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from common.messages.types import MAX_STATE_SAVES
from scheduler_proc.radix_node import TOKEN_BYTES, Node

_ANSWERS = 4  # an answer's snapshot is worth a part of what it would save: perhaps nobody goes on there
_REWRITTEN = 4  # last tokens of a prompt that chat templates write otherwise later, as `<think>\n\n</think>\n\n`
MOST_POINTS = 8  # snapshots that a prompt leaves at most: others would lose as many


@dataclass(slots=True, eq=False)
class Track:
    """The newest state of a request that decodes: snapshot `number` (-1: none) has that of its first `length` tokens.
    Without it, others could start at `start`."""

    start: int
    number: int = -1
    length: int = 0


class Snapshots:
    """Their numbers, 0 to `total` - 1: each is free, at one place, or with one request that decodes.

    When none is free, the one that is worth least gives way, and among equals the one used longest ago. At each use it
    is worth the tokens that starting from it saves; whenever one gives way, all others lose what that one was still
    worth, so that nothing stays for ever (GreedyDual, Young 1994). A new one that is worth less than all of them is not
    taken, unless somebody waits for it, and they lose its worth. So the end of a short question does not take the place
    of a long text before it.

    Whether a conversation goes on where its answer ends, nobody knows: an answer's snapshot takes none that is worth
    anything, and until it is used it is worth a quarter. Of a conversation's snapshots the newest is needed: where a
    prompt goes on from one and nobody went elsewhere there, that one and those before it are superseded, worth nothing
    until they are used again, and the new one is worth what they were.
    """

    def __init__(self, total: int):
        self.total = min(total, MAX_STATE_SAVES)  # a plan can save each of them, but only once
        self._free = list(range(self.total))[::-1]
        self._owners: dict[int, Node | Track] = {}  # by number, the one used longest ago first
        self._worth = [0] * self.total  # tokens that starting from it saves, by number
        self._until = [0] * self.total  # what it is worth now, plus `_lost`
        self._lost = 0  # by all, since the start
        self._least = 0  # no more than the least of `_until`
        self.saved = 0  # since the start
        self.loaded = 0

    def emptied(self) -> "Snapshots":
        """As many that hold nothing, with counters that go on."""
        snapshots = Snapshots(self.total)
        snapshots.saved, snapshots.loaded = self.saved, self.loaded
        return snapshots

    @property
    def used(self) -> int:
        return len(self._owners)

    def free_numbers(self) -> list[int]:
        """For checks."""
        return list(self._free)

    def owners(self) -> dict[int, Node | Track]:
        """Of each number that is not free, for checks."""
        return dict(self._owners)

    def load(self, number: int) -> None:
        """A request starts from it."""
        self.loaded += 1
        self._touch(number)

    def save(self, node: Node, pages: int, worth: int, busy: Collection[int], *, awaited: bool = False) -> int | None:
        """The number that takes the state after `pages` pages of a node's edge, which saves `worth` tokens. None when
        there is one already, when all others are worth more and nobody waits for it, or when all are `busy`: those that
        the plan under construction saves already."""
        if node.states is not None and pages in node.states:
            self._touch(node.states[pages])
            return None
        number = self._take(worth, busy, awaited)
        if number is not None:
            self._put(number, node, pages, worth, worth)
        return number

    def follow(self, track: Track, length: int, least_gain: int, busy: Collection[int]) -> int | None:
        """The number that takes the state of a request that decodes after `length` tokens, in place of the one before.
        None when that is less than `least_gain` further, or when none can be had (as in `save`)."""
        if length - max(track.start, track.length) < least_gain:
            return None
        if track.number < 0:
            number = self._spare(busy)
            if number is None:
                return None
            track.number = number
        track.length = length
        worth = length - track.start
        self._own(track.number, track, worth, worth // _ANSWERS)
        return track.number

    def supersede(self, numbers: Iterable[int]) -> None:
        """They are worth nothing until they are used again."""
        for number in numbers:
            self._until[number] = self._lost
            self._least = min(self._least, self._lost)

    def settle(self, track: Track, node: Node, pages: int, worth: int) -> None:
        """What went along with an answer is of the first `pages` pages of a node's edge."""
        if node.states is not None and pages in node.states:
            self._touch(node.states[pages])
            self.drop(track)
        else:
            self._put(track.number, node, pages, worth, worth // _ANSWERS)

    def drop(self, track: Track) -> None:
        """It is of no use."""
        del self._owners[track.number]
        self._free.append(track.number)

    def split(self, upper: Node, lower: Node) -> None:
        """`upper` took the first pages of `lower`'s edge, and takes what was saved there."""
        states, cut = lower.states or {}, len(upper.pages)
        upper.states = {pages: number for pages, number in states.items() if pages <= cut} or None
        lower.states = {pages - cut: number for pages, number in states.items() if pages > cut} or None
        for number in (upper.states or {}).values():
            self._owners[number] = upper

    def cut(self, node: Node, pages: int) -> None:
        """Only so many pages are left of a node's edge: what was saved behind them is free."""
        states = node.states or {}
        node.states = {at: number for at, number in states.items() if at <= pages} or None
        for at, number in states.items():
            if at > pages:
                del self._owners[number]
                self._free.append(number)

    def _put(self, number: int, node: Node, pages: int, worth: int, now: int) -> None:
        if node.states is None:
            node.states = {}
        node.states[pages] = number
        self._own(number, node, worth, now)
        self.saved += 1

    def _own(self, number: int, owner: Node | Track, worth: int, now: int) -> None:
        """It is used: worth `now` until the next time, and `worth` from then on."""
        self._owners.pop(number, None)
        self._owners[number] = owner
        self._worth[number] = worth
        self._until[number] = self._lost + now
        self._least = min(self._least, self._until[number])

    def _touch(self, number: int) -> None:
        worth = self._worth[number]
        self._own(number, self._owners[number], worth, worth)

    def _take(self, worth: int, busy: Collection[int], awaited: bool) -> int | None:
        if self._free:
            return self._free.pop()
        number = self._cheapest(busy)
        if number is None:
            return None
        if self._until[number] > self._lost + worth and not awaited:
            self._lost += worth
            return None
        self._lost = max(self._lost, self._until[number])
        return self._vacate(number)

    def _spare(self, busy: Collection[int]) -> int | None:
        """One that is free, or worth nothing."""
        if self._free:
            return self._free.pop()
        if self._least > self._lost:  # most often, and cheap
            return None
        number = self._cheapest(busy)
        if number is None or self._until[number] > self._lost:
            return None
        return self._vacate(number)

    def _cheapest(self, busy: Collection[int]) -> int | None:
        number = min((n for n in self._owners if n not in busy), key=self._until.__getitem__, default=None)
        if number is not None and not busy:
            self._least = self._until[number]
        return number

    def _vacate(self, number: int) -> int:
        owner = self._owners.pop(number)
        if isinstance(owner, Track):
            owner.number = -1
        else:
            assert owner.states is not None
            owner.states = {pages: other for pages, other in owner.states.items() if other != number} or None
        return number


@dataclass(frozen=True, slots=True)
class Found:
    """What the tree has of a prompt, in tokens: it starts from snapshot `number` at `start` (-1 and 0 where there is
    none), the deepest snapshot on its way is at `deepest`, and its whole pages end at `branch` where something else
    follows in the tree (0 where nothing does, as in the next turn of a conversation). What the prompt leaves can be
    kept up to `reach`."""

    start: int
    number: int
    deepest: int
    branch: int
    reach: int


def find(way: Iterable[tuple[Node, int, int]], page_size: int, limit: int, tokens: bytes) -> Found:
    """On the way of a prompt (RadixTree.walk), of whose tokens `limit` may come from the cache.

    Where somebody else uses the pages beyond the start, this prompt cannot put its own into the tree, nor what follows
    them (KVManager.publish)."""
    start, number, deepest, known, length = 0, -1, 0, 0, len(tokens) // TOKEN_BYTES
    used = 0  # tokens whose pages somebody else has locked
    last: tuple[Node, int] | None = None
    for node, before, whole in way:
        known, last = (before + whole) * page_size, (node, whole)
        if node.locks:
            used = known
        for pages, own in (node.states or {}).items():
            at = (before + pages) * page_size
            if pages <= whole and at > deepest:
                deepest = at
            if pages <= whole and start < at <= limit:
                start, number = at, own
    if used > start:
        return Found(start, number, deepest, known, known)
    branches = last is not None and _goes_elsewhere(*last, page_size, tokens[known * TOKEN_BYTES :])
    return Found(start, number, deepest, known if branches else 0, length)


def _goes_elsewhere(node: Node, pages: int, page_size: int, rest: bytes) -> bool:
    """Whether something else than a beginning of `rest` follows so many pages of a node's edge."""
    at = pages * page_size * TOKEN_BYTES
    if at < len(node.key):
        return not rest.startswith(node.key[at:])
    return not all(map(rest.startswith, node.children))


@dataclass(frozen=True, slots=True)
class Place:
    """After so many pages of a node's edge. A snapshot there saves `worth` tokens: those beyond the one before it that
    it does not supersede."""

    node: Node
    pages: int
    worth: int
    superseded: list[int]


def place_of(way: Iterable[tuple[Node, int, int]], end: int, start: int, page_size: int) -> Place | None:
    """Where the way of a prompt (RadixTree.walk) has its first `end` pages; it has started after `start` of them. Where
    it has gone on, and nobody but it and at most one other, a snapshot is superseded."""
    last, superseded = 0, []
    for node, before, whole in way:
        for pages, number in sorted((node.states or {}).items()):
            at = before + pages
            if at > start or (pages == len(node.pages) and len(node.children) > 2):
                last = max(last, at) if at < end else last
            elif at < end:
                superseded.append(number)
        if before + whole == end:
            return Place(node, whole, (end - last) * page_size, superseded)
    return None


class Saving:
    """Where a prompt at work leaves snapshots: the `points`, in tokens, that it has not come to yet, none beyond
    `reach`. It has started at `start`. Somebody waits for those that are `awaited`."""

    def __init__(self, points: Iterable[int], reach: int, start: int = 0):
        self.points = sorted(points)
        self.reach = reach
        self.start = start
        self.awaited: set[int] = set()

    def wait(self, point: int) -> None:
        """Somebody waits for one there, ahead of what is planned."""
        self.awaited.add(point)
        at = bisect_left(self.points, point)
        if self.points[at : at + 1] != [point]:
            self.points.insert(at, point)

    def due(self, length: int) -> list[int]:
        """Those that the first `length` tokens come to, which are behind it then."""
        count = bisect_left(self.points, length + 1)
        due = self.points[:count]
        del self.points[:count]
        return due


def saving_of(found: Found, length: int, page_size: int, least_gain: int) -> Saving:
    """Where a prompt of `length` tokens parts from others, and the last whole page before its last tokens, which the
    next turn may have in another form. For less than `least_gain` tokens beyond the snapshot before it none is taken:
    it would take another one's place."""
    points = []
    last = found.deepest
    if found.branch - last >= least_gain:
        points.append(last := found.branch)
    end = max(0, length - 1 - _REWRITTEN) // page_size * page_size
    if end - last >= least_gain and end <= found.reach:
        points.append(end)
    return Saving(points, found.reach, found.start)
