"""The radix tree of everything that is cached: a path-compressed tree over pages of tokens, exact to the token.

After RadixAttention (Zheng et al., SGLang, 2024). Inner edges are whole pages; only the last page of a leaf may be
partly filled. Children are found by their first page. When a match ends inside a page, the child whose first page
shares the most tokens lends that page for a copy (copy-on-write); in sorted order it is a neighbour of where the
wanted page would stand, so the search costs O(log children). Tokens are int32 as bytes, so that comparing a long edge
is one memory comparison. Namespaces (`cache_salt`) have a root each and share nothing.

A lock protects a node and its ancestors from eviction, so unlocked nodes hang together at the bottom, and evicting
leaf after leaf can free all of them. Unlocked leaves wait in a heap ordered by last access. Its entries are repaired
lazily: a popped entry whose leaf was used since goes back with the new time, one that is no leaf any more is dropped.
When a heap has doubled, entries of nodes that moved between device and host since, or that are gone, are removed.

With a host tier (host_tier.py), evicted pages go to the host as long as there is room, and their node stays. A node is
on the device or on the host as a whole; nodes on the host hang below those on the device, never above one. So the
leaves of the device are nodes whose children, if any, are on the host, and leaves of the host make room there.

Of recurrent models, nodes have snapshots (snapshots.py), which stay with their pages.
"""

import heapq
import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator

from scheduler_proc.block_pool import BlockPool
from scheduler_proc.host_tier import HostTier
from scheduler_proc.radix_node import TOKEN_BYTES, Heap, Match, Node, common_prefix, walk
from scheduler_proc.snapshots import Snapshots

_FEW_ENTRIES = 64  # not worth tidying


class RadixTree:
    """Owns one reference of `pool` for each page in it, or of the pool of `tier` for those on the host."""

    def __init__(
        self, pool: BlockPool, page_size: int, tier: HostTier | None = None, snapshots: Snapshots | None = None
    ):
        self._pool = pool
        self._tier = tier
        self._snapshots = snapshots
        self._page_bytes = page_size * TOKEN_BYTES
        self._roots: dict[bytes, Node] = {}
        self.num_pages = 0  # on the device, as the next two
        self.evictable = 0  # pages in unlocked nodes
        self.evicted = 0  # pages, since the start
        self.version = 0  # changes whenever a match could give another answer
        self._clock = itertools.count(1)
        self._tie = itertools.count()
        self._leaves: Heap = []
        self._host_leaves: Heap = []
        self._most_entries = _FEW_ENTRIES  # of a heap, before it is tidied

    def emptied(self, pool: BlockPool, tier: HostTier | None = None, snapshots: Snapshots | None = None) -> "RadixTree":
        """A tree over other pools that knows nothing, with counters that go on."""
        tree = RadixTree(pool, self._page_bytes // TOKEN_BYTES, tier, snapshots)
        tree.evicted, tree.version = self.evicted, self.version + 1
        return tree

    def match(self, tokens: bytes, most: int, salt: str = "") -> Match:
        """The longest cached prefix of `tokens`, at most `most` tokens, in the namespace `salt`.

        An edge that matches in part is split at the last whole page, so that the node ends where the pages end.
        """
        end = min(len(tokens), most * TOKEN_BYTES)
        node, pages, hosted = self._descend(self._root(salt), tokens, end)
        from_host = sum(len(n.key) for n in hosted)
        position = len(pages) * self._page_bytes + from_host
        lender, shared = self._neighbour(node, tokens[position : min(end, position + self._page_bytes)])
        from_host //= TOKEN_BYTES
        if lender is None:
            return Match(node, pages, hosted=tuple(hosted), from_host=from_host)
        lender.last_access = next(self._clock)
        if self._tier is None or not lender.on_host:
            return Match(node, pages, lender.pages[0], shared, tuple(hosted), None, from_host)
        source = self._tier.first + lender.pages[0]
        return Match(node, pages, source, shared, tuple(hosted), lender, from_host + shared)

    def peek(self, tokens: bytes, most: int, salt: str = "", *, on_device: bool = False) -> int:
        """How many tokens `match` would find, without touching access times or splitting anything. `on_device` leaves
        out what would have to be loaded."""
        node, position, end = self._root(salt), 0, min(len(tokens), most * TOKEN_BYTES)
        while (child := node.children.get(tokens[position : position + self._page_bytes])) is not None:
            if on_device and child.on_host:
                return position // TOKEN_BYTES
            common = len(common_prefix(child.key, tokens[position : min(end, position + len(child.key))]))
            position += common // TOKEN_BYTES * TOKEN_BYTES
            if common < len(child.key):
                return position // TOKEN_BYTES
            node = child
        _, shared = self._neighbour(node, tokens[position : min(end, position + self._page_bytes)])
        return position // TOKEN_BYTES + shared

    def walk(self, tokens: bytes, salt: str = "") -> Iterator[tuple[Node, int, int]]:
        """The way of the whole pages of `tokens`, as radix_node.walk; nothing is touched or split."""
        return walk(self._root(salt), tokens, self._page_bytes)

    def insert(self, tokens: bytes, pages: list[int], salt: str = "", own: Node | None = None) -> tuple[Node, int]:
        """Make `pages`, which hold the KV of `tokens` (the last one perhaps in part), known to all.

        Returns the node at their end and how many leading pages were already there: those stay the tree's own, and
        the caller keeps (or frees) its duplicates. The tree takes a reference of each page that is new to it, and of
        each one that it has on the host alone: those come back without a copy.

        `own` is the node that the caller has locked, once. A leaf that is locked by nobody but the caller
        grows in place, so that a sequence that is inserted bit by bit stays one edge.
        """
        if not 0 <= len(pages) * self._page_bytes - len(tokens) < self._page_bytes:
            raise ValueError(f"{len(tokens)} bytes of tokens do not fill {len(pages)} pages")
        node, known, hosted = self._descend(self._root(salt, keep=bool(tokens)), tokens, len(tokens))
        present = at = len(known)
        for lower in hosted:
            duplicates = pages[at : at + len(lower.pages)]
            at += len(duplicates)
            self._pool.share(duplicates)
            self._release(lower, lower.pages)
            self._bring(lower, duplicates)
        rest = tokens[at * self._page_bytes :]
        if not rest:
            return node, present
        near, shared = self._neighbour(node, rest[: self._page_bytes])
        if shared * TOKEN_BYTES == len(rest):
            return node, present + len(pages) - at  # a page that begins with these tokens is there
        fresh = pages[at:]
        self._pool.share(fresh)
        if self._may_grow(node, own):
            node.key += rest
            node.pages += fresh
            self.num_pages += len(fresh)
            if not node.locks:
                self.evictable += len(fresh)
            self.version += 1
            return node, present
        child = Node(rest, fresh, node)
        child.last_access = next(self._clock)
        self._adopt(node, child)
        node.live += 1
        self.num_pages += len(fresh)
        self.evictable += len(fresh)
        if near is not None and shared * TOKEN_BYTES == len(near.key) and not near.locks:
            self._drop(near)  # a partly filled page that the new one begins with
        self.version += 1
        self._offer(child)
        return child, present

    def lock(self, node: Node) -> None:
        """Protect `node` and its ancestors from eviction until `unlock`."""
        while node.parent is not None:
            if node.locks == 0 and not node.on_host:
                self.evictable -= len(node.pages)
            node.locks += 1
            node = node.parent

    def unlock(self, node: Node) -> None:
        while node.parent is not None:
            if node.locks < 1:
                raise ValueError("a node is unlocked more often than it was locked")
            node.locks -= 1
            if node.locks == 0:
                if not node.on_host:
                    self.evictable += len(node.pages)
                self._offer(node)
            node = node.parent

    def load(self, node: Node, pages: list[int]) -> None:
        """Have the pages of a locked node copied from the host to `pages`, whose one reference the tree takes over. Its
        parent must be on the device."""
        assert self._tier is not None and node.on_host and node.locks and node.parent is not None
        assert not node.parent.on_host
        self._tier.load(node.pages, pages)
        self._bring(node, pages)

    def evict(self, count: int) -> int:
        """Free up to `count` device pages, least recently used leaves first, each from its end. Returns how many."""
        freed = 0
        while freed < count and (node := self._pop(self._leaves)) is not None:
            take = min(count - freed, len(node.pages))
            freed += take
            if self._tier is None:
                self._shrink(node, take)
            else:
                self._offload(node, take, self._tier)
        self.evicted += freed
        self.version += 1
        return freed

    def leaves(self, *, on_host: bool) -> set[Node]:
        """Those that can be found for eviction, for checks."""
        heap = self._host_leaves if on_host else self._leaves
        return {node for _, _, node in heap if node.heap is heap}

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents first."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _root(self, salt: str, *, keep: bool = False) -> Node:
        key = salt.encode()
        root = self._roots.get(key)
        if root is None:
            root = Node(key, [], None)
            if keep:
                self._roots[key] = root
        return root

    def _descend(self, node: Node, tokens: bytes, end: int) -> tuple[Node, list[int], list[Node]]:
        """Follow whole pages of `tokens[:end]`, splitting the edge on which the way ends. Returns the last node, the
        pages on the device, and the nodes on the host, which come after those."""
        now = next(self._clock)
        pages: list[int] = []
        hosted: list[Node] = []
        position = 0
        while position + self._page_bytes <= end:
            child = node.children.get(tokens[position : position + self._page_bytes])
            if child is None:
                break
            common = common_prefix(child.key, tokens[position : min(end, position + len(child.key))])
            whole = len(common) // self._page_bytes
            if whole < len(child.pages):
                child = self._split(child, whole)
            child.last_access = now
            if child.on_host:
                hosted.append(child)
            else:
                pages += child.pages
            position += len(child.key)
            node = child
        return node, pages, hosted

    def _neighbour(self, node: Node, page: bytes) -> tuple[Node | None, int]:
        """The child whose first page shares the most leading tokens with `page`, and how many; None when none."""
        best, most = None, 0
        at = bisect_left(node.order, page)
        for key in node.order[max(0, at - 1) : at + 1]:
            shared = len(common_prefix(key, page)) // TOKEN_BYTES
            if shared > most:
                best, most = node.children[key], shared
        return best, most

    def _may_grow(self, node: Node, own: Node | None) -> bool:
        """Whether nobody could tell that more pages follow on `node`'s edge: no child, no foreign lock, no root."""
        return node.parent is not None and not node.children and node.locks == (node is own)

    def _adopt(self, parent: Node, child: Node) -> None:
        first = child.key[: self._page_bytes]
        if first not in parent.children:
            insort(parent.order, first)
        parent.children[first] = child

    def _pop(self, heap: Heap) -> Node | None:
        """The least recently used leaf of the device or of the host, which is in no heap then."""
        while heap:
            accessed, _, node = heapq.heappop(heap)
            if node.heap is not heap:
                continue  # it has moved between device and host
            node.heap = None
            if not self._is_leaf(node):
                continue  # offered again when it becomes an unlocked leaf again
            if node.last_access > accessed:
                self._offer(node)
                continue
            return node
        return None

    def _is_leaf(self, node: Node) -> bool:
        """Whether nothing hangs below an unlocked node that is where it is itself."""
        return node.parent is not None and not node.locks and not (node.children if node.on_host else node.live)

    def _offer(self, node: Node) -> None:
        heap = self._host_leaves if node.on_host else self._leaves
        if node.heap is not heap and self._is_leaf(node):
            node.heap = heap
            heapq.heappush(heap, (node.last_access, next(self._tie), node))
            if len(heap) > self._most_entries:
                self._tidy(self._leaves)
                self._tidy(self._host_leaves)
                self._most_entries = 2 * max(len(self._leaves), len(self._host_leaves), _FEW_ENTRIES)

    def _tidy(self, heap: Heap) -> None:
        """Keep one entry, the newest, of each node of the tree that is still in `heap`."""
        newest = {id(node): entry for entry in sorted(heap) if (node := entry[2]).heap is heap and node.parent}
        heap[:] = newest.values()
        heapq.heapify(heap)

    def _offload(self, node: Node, take: int, tier: HostTier) -> None:
        """Move the last `take` pages of a leaf of the device to the host, as many of them as find room there."""
        if take < len(node.pages):
            self._split(node, len(node.pages) - take)
        while tier.pool.free < take and (victim := self._pop(self._host_leaves)) is not None:
            count = min(take - tier.pool.free, len(victim.pages))
            tier.dropped += count
            self._shrink(victim, count)
        if tier.pool.free < take:  # all that was on the host is gone, this node's own descendants too
            lost = take - tier.pool.free
            tier.dropped += lost
            self._shrink(node, lost)
            if node.parent is None:
                return
        parent = node.parent
        assert parent is not None
        pages, node.pages = node.pages, tier.offload(node.pages)
        self._pool.release(pages)
        self.num_pages -= len(pages)
        self.evictable -= len(pages)
        node.on_host = True
        parent.live -= 1
        self._absorb(node)
        self._offer(node)
        self._offer(parent)

    def _absorb(self, node: Node) -> None:
        """Make one of a node on the host and its only child, so that what is evicted bit by bit stays one edge."""
        if len(node.children) != 1:
            return
        (child,) = node.children.values()
        node.key += child.key
        node.pages += child.pages
        node.children, node.order = child.children, child.order
        for lower in node.children.values():
            lower.parent = node
        child.parent = None

    def _bring(self, node: Node, pages: list[int]) -> None:
        """A node of the host is on the device now, in `pages`."""
        assert node.parent is not None
        node.pages = pages
        node.on_host = False
        node.parent.live += 1
        self.num_pages += len(pages)
        if not node.locks:
            self.evictable += len(pages)
        self._offer(node)

    def _shrink(self, node: Node, take: int) -> None:
        """Forget the last `take` pages of an unlocked node without children."""
        keep = len(node.pages) - take
        if not keep:
            self._drop(node)
            return
        assert not node.children and not node.locks
        self._release(node, node.pages[keep:])
        if not node.on_host:
            self.num_pages -= take
            self.evictable -= take
        del node.pages[keep:]
        node.key = node.key[: keep * self._page_bytes]
        if node.states and self._snapshots is not None:
            self._snapshots.cut(node, keep)
        self._offer(node)

    def _drop(self, node: Node) -> None:
        """Remove an unlocked node without children and free its pages."""
        parent = node.parent
        assert parent is not None and not node.children and not node.locks
        self._release(node, node.pages)
        if not node.on_host:
            self.num_pages -= len(node.pages)
            self.evictable -= len(node.pages)
            parent.live -= 1
        first = node.key[: self._page_bytes]
        del parent.children[first]
        del parent.order[bisect_left(parent.order, first)]
        node.parent = None
        if node.states and self._snapshots is not None:
            self._snapshots.cut(node, 0)
        if parent.parent is None and not parent.children:
            self._roots.pop(parent.key, None)
        self._offer(parent)

    def _release(self, node: Node, pages: list[int]) -> None:
        """The tree's references of `pages` of a node."""
        pool = self._tier.pool if self._tier is not None and node.on_host else self._pool
        pool.release(pages)

    def _split(self, node: Node, at: int) -> Node:
        """Cut `node` after `at` pages; the new upper part is returned, `node` keeps the lower one."""
        assert node.parent is not None and 0 < at < len(node.pages)
        cut = at * self._page_bytes
        upper = Node(node.key[:cut], node.pages[:at], node.parent)
        upper.locks = node.locks
        upper.last_access = node.last_access
        upper.on_host, upper.live = node.on_host, int(not node.on_host)
        self._adopt(node.parent, upper)
        node.key = node.key[cut:]
        node.pages = node.pages[at:]
        node.parent = upper
        self._adopt(upper, node)
        if node.states and self._snapshots is not None:
            self._snapshots.split(upper, node)
        return upper
