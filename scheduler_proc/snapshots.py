"""Snapshots of recurrent states: who has which, where requests can start from them, and where new ones are taken.

Some models have layers that keep one state of fixed size of all that a request has computed, updated in place by every
token, instead of keys and values for each. Of such a prompt a prefix can be used only where somebody kept the state
that was there; the pages of the prefix are no use without it. A state has megabytes, so there are few snapshots, each
at a place of the radix tree that is a whole number of pages from its root: a node, and pages of its edge.

A prompt leaves a snapshot where it parts from what is in the tree, if that goes on otherwise (others are likely to part
there as well), and at the last whole page before its end, for those that go on from it or ask the same again. Marconi
(Pan et al., MLSys 2025) admits states at branches and ends, too, and weighs what they save; in SGLang's
MambaRadixCache, the deepest node with a state is where a request starts.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from common.messages.types import MAX_STATE_SAVES
from scheduler_proc.radix_node import TOKEN_BYTES, Node

MOST_POINTS = 8  # snapshots that a prompt leaves at most: others would lose as many


class Snapshots:
    """Their numbers, 0 to `total` - 1: each is free or at one place.

    When none is free, the one that is worth least gives way, and among equals the one used longest ago. At each use it
    is worth the tokens that starting from it saves; whenever one gives way, all others lose what that one was still
    worth, so that nothing stays for ever (GreedyDual, Young 1994). A new one that is worth less than all of them is not
    taken, unless somebody waits for it, and they lose its worth. So the end of a short question does not take the place
    of a long text before it.
    """

    def __init__(self, total: int):
        self.total = min(total, MAX_STATE_SAVES)  # a plan can save each of them, but only once
        self._free = list(range(self.total))[::-1]
        self._nodes: dict[int, Node] = {}  # by number, the one used longest ago first
        self._worth = [0] * self.total  # tokens that starting from it saves, by number
        self._until = [0] * self.total  # what it is worth now, plus `_lost`
        self._lost = 0  # by all, since the start
        self.saved = 0  # since the start
        self.loaded = 0

    def emptied(self) -> "Snapshots":
        """As many that hold nothing, with counters that go on."""
        snapshots = Snapshots(self.total)
        snapshots.saved, snapshots.loaded = self.saved, self.loaded
        return snapshots

    @property
    def used(self) -> int:
        return len(self._nodes)

    def free_numbers(self) -> list[int]:
        """For checks."""
        return list(self._free)

    def places(self) -> dict[int, Node]:
        """The node of each number, for checks."""
        return dict(self._nodes)

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
        if number is None:
            return None
        if node.states is None:
            node.states = {}
        node.states[pages] = number
        self._nodes[number] = node
        self._worth[number] = worth
        self._until[number] = self._lost + worth
        self.saved += 1
        return number

    def split(self, upper: Node, lower: Node) -> None:
        """`upper` took the first pages of `lower`'s edge, and takes what was saved there."""
        states, cut = lower.states or {}, len(upper.pages)
        upper.states = {pages: number for pages, number in states.items() if pages <= cut} or None
        lower.states = {pages - cut: number for pages, number in states.items() if pages > cut} or None
        for number in (upper.states or {}).values():
            self._nodes[number] = upper

    def cut(self, node: Node, pages: int) -> None:
        """Only so many pages are left of a node's edge: what was saved behind them is free."""
        states = node.states or {}
        node.states = {at: number for at, number in states.items() if at <= pages} or None
        for at, number in states.items():
            if at > pages:
                del self._nodes[number]
                self._free.append(number)

    def _touch(self, number: int) -> None:
        self._nodes[number] = self._nodes.pop(number)
        self._until[number] = self._lost + self._worth[number]

    def _take(self, worth: int, busy: Collection[int], awaited: bool) -> int | None:
        if self._free:
            return self._free.pop()
        number = min((n for n in self._nodes if n not in busy), key=self._until.__getitem__, default=None)
        if number is None:
            return None
        if self._until[number] > self._lost + worth and not awaited:
            self._lost += worth
            return None
        self._lost = self._until[number]
        node = self._nodes.pop(number)
        assert node.states is not None
        node.states = {pages: other for pages, other in node.states.items() if other != number} or None
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


class Saving:
    """Where a prompt at work leaves snapshots: the `points`, in tokens, that it has not come to yet, none beyond
    `reach`. Somebody waits for those that are `awaited`."""

    def __init__(self, points: Iterable[int], reach: int):
        self.points = sorted(points)
        self.reach = reach
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
    """Where a prompt of `length` tokens parts from others, and the last whole page that leaves a token to compute. For
    less than `least_gain` tokens beyond the snapshot before it none is taken: it would take another one's place."""
    points = []
    last = found.deepest
    if found.branch - last >= least_gain:
        points.append(last := found.branch)
    end = (length - 1) // page_size * page_size
    if end - last >= least_gain and end <= found.reach:
        points.append(end)
    return Saving(points, found.reach)
