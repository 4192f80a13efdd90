"""The radix tree of everything that is cached: a path-compressed tree over pages of tokens, exact to the token.

After RadixAttention (Zheng et al., SGLang, 2024). Inner edges are whole pages; only the last page of a leaf may be
partly filled. Children are found by their first page. When a match ends inside a page, the child whose first page
shares the most tokens lends that page for a copy (copy-on-write); in sorted order it is a neighbour of where the
wanted page would stand, so the search costs O(log children). Tokens are int32 as bytes, so that comparing a long edge
is one memory comparison. Namespaces (`cache_salt`) have a root each and share nothing.

A lock protects a node and its ancestors from eviction, so unlocked nodes hang together at the bottom, and evicting
leaf after leaf can free all of them. Unlocked leaves wait in a heap ordered by last access. Its entries are repaired
lazily: a popped entry whose leaf was used since goes back with the new time, one that is no leaf any more is dropped.
"""

import heapq
import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

from scheduler_proc.block_pool import BlockPool

TOKEN_BYTES = 4


class Node:
    """One edge: `key` holds the tokens of `pages`. A root has no pages; its key is its namespace."""

    __slots__ = ("children", "in_heap", "key", "last_access", "locks", "order", "pages", "parent")

    def __init__(self, key: bytes, pages: list[int], parent: "Node | None"):
        self.key = key
        self.pages = pages
        self.parent = parent
        self.children: dict[bytes, Node] = {}  # by first page
        self.order: list[bytes] = []  # the keys of `children`, sorted
        self.locks = 0
        self.last_access = 0
        self.in_heap = False


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix: whole pages down to `node`, then `partial` tokens of page `source`, to be copied."""

    node: Node
    pages: list[int]
    source: int = -1
    partial: int = 0


class RadixTree:
    """Owns one reference of `pool` for each page in it."""

    def __init__(self, pool: BlockPool, page_size: int):
        self._pool = pool
        self._page_bytes = page_size * TOKEN_BYTES
        self._roots: dict[bytes, Node] = {}
        self.num_pages = 0
        self.evictable = 0  # pages in unlocked nodes
        self.evicted = 0  # pages, since the start
        self.version = 0  # changes whenever a match could give another answer
        self._clock = itertools.count(1)
        self._tie = itertools.count()
        self._leaves: list[tuple[int, int, Node]] = []

    def emptied(self, pool: BlockPool) -> "RadixTree":
        """A tree over another pool that knows nothing, with counters that go on."""
        tree = RadixTree(pool, self._page_bytes // TOKEN_BYTES)
        tree.evicted, tree.version = self.evicted, self.version + 1
        return tree

    def match(self, tokens: bytes, most: int, salt: str = "") -> Match:
        """The longest cached prefix of `tokens`, at most `most` tokens, in the namespace `salt`.

        An edge that matches in part is split at the last whole page, so that the node ends where the pages end.
        """
        end = min(len(tokens), most * TOKEN_BYTES)
        node, pages = self._descend(self._root(salt), tokens, end)
        position = len(pages) * self._page_bytes
        lender, shared = self._neighbour(node, tokens[position : min(end, position + self._page_bytes)])
        if lender is None:
            return Match(node, pages)
        lender.last_access = next(self._clock)
        return Match(node, pages, lender.pages[0], shared)

    def peek(self, tokens: bytes, most: int, salt: str = "") -> int:
        """How many tokens `match` would find, without touching access times or splitting anything."""
        node, position, end = self._root(salt), 0, min(len(tokens), most * TOKEN_BYTES)
        while (child := node.children.get(tokens[position : position + self._page_bytes])) is not None:
            if position + self._page_bytes > end:
                break
            common = len(common_prefix(child.key, tokens[position : min(end, position + len(child.key))]))
            position += common // TOKEN_BYTES * TOKEN_BYTES
            if common < len(child.key):
                return position // TOKEN_BYTES
            node = child
        _, shared = self._neighbour(node, tokens[position : min(end, position + self._page_bytes)])
        return position // TOKEN_BYTES + shared

    def insert(self, tokens: bytes, pages: list[int], salt: str = "", own: Node | None = None) -> tuple[Node, int]:
        """Make `pages`, which hold the KV of `tokens` (the last one perhaps in part), known to all.

        Returns the node at their end and how many leading pages were already there: those stay the tree's own, and
        the caller keeps (or frees) its duplicates. The tree takes a reference of each page that is new to it.

        `own` is the node that the caller has locked, once. A leaf that is full and locked by nobody but the caller
        grows in place, so that a sequence that is inserted bit by bit stays one edge.
        """
        if not 0 <= len(pages) * self._page_bytes - len(tokens) < self._page_bytes:
            raise ValueError(f"{len(tokens)} bytes of tokens do not fill {len(pages)} pages")
        node, known = self._descend(self._root(salt, keep=bool(tokens)), tokens, len(tokens))
        present = len(known)
        rest = tokens[present * self._page_bytes :]
        if not rest:
            return node, present
        near, shared = self._neighbour(node, rest[: self._page_bytes])
        if near is not None and shared * TOKEN_BYTES == len(rest):
            return node, present + 1  # a page that begins with these tokens is there
        fresh = pages[present:]
        self._pool.share(fresh)
        if self._may_grow(node, own):
            node.key += rest
            node.pages = node.pages + fresh  # a new list: earlier matches may still look at the old one
            self.num_pages += len(fresh)
            if not node.locks:
                self.evictable += len(fresh)
                self._offer(node)
            self.version += 1
            return node, present
        child = Node(rest, fresh, node)
        child.last_access = next(self._clock)
        self._adopt(node, child)
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
            if node.locks == 0:
                self.evictable -= len(node.pages)
            node.locks += 1
            node = node.parent

    def unlock(self, node: Node) -> None:
        while node.parent is not None:
            if node.locks < 1:
                raise ValueError("a node is unlocked more often than it was locked")
            node.locks -= 1
            if node.locks == 0:
                self.evictable += len(node.pages)
                self._offer(node)
            node = node.parent

    def evict(self, count: int) -> int:
        """Free up to `count` pages, least recently used leaves first, each from its end. Returns how many."""
        freed = 0
        while freed < count and self._leaves:
            accessed, _, node = heapq.heappop(self._leaves)
            node.in_heap = False
            if node.children or node.locks or node.parent is None:
                continue  # offered again when it becomes an unlocked leaf again
            if node.last_access > accessed:
                self._offer(node)
                continue
            take = min(count - freed, len(node.pages))
            keep = len(node.pages) - take
            freed += take
            if keep:
                self._pool.release(node.pages[keep:])
                del node.pages[keep:]
                node.key = node.key[: keep * self._page_bytes]
                self.num_pages -= take
                self.evictable -= take
                self._offer(node)
            else:
                self._drop(node)
        self.evicted += freed
        self.version += 1
        return freed

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

    def _descend(self, node: Node, tokens: bytes, end: int) -> tuple[Node, list[int]]:
        """Follow whole pages of `tokens[:end]`, splitting the edge on which the way ends."""
        now = next(self._clock)
        pages: list[int] = []
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
            pages += child.pages
            position += len(child.key)
            node = child
        return node, pages

    def _neighbour(self, node: Node, page: bytes) -> tuple[Node | None, int]:
        """The child whose first page shares the most leading tokens with `page`, and how many; None when none."""
        best, most = None, 0
        if not page or not node.order:
            return best, most
        at = bisect_left(node.order, page)
        for key in node.order[max(0, at - 1) : at + 1]:
            shared = len(common_prefix(key, page)) // TOKEN_BYTES
            if shared > most:
                best, most = node.children[key], shared
        return best, most

    def _may_grow(self, node: Node, own: Node | None) -> bool:
        """Whether nobody could tell that more pages follow on `node`'s edge: no child, no foreign lock, no root."""
        full = len(node.key) == len(node.pages) * self._page_bytes
        return node.parent is not None and not node.children and full and node.locks == (node is own)

    def _adopt(self, parent: Node, child: Node) -> None:
        first = child.key[: self._page_bytes]
        if first not in parent.children:
            insort(parent.order, first)
        parent.children[first] = child

    def _drop(self, node: Node) -> None:
        """Remove an unlocked leaf and free its pages."""
        parent = node.parent
        assert parent is not None and not node.children and not node.locks
        self._pool.release(node.pages)
        self.num_pages -= len(node.pages)
        self.evictable -= len(node.pages)
        first = node.key[: self._page_bytes]
        del parent.children[first]
        del parent.order[bisect_left(parent.order, first)]
        node.parent = None
        self.version += 1
        if parent.parent is None and not parent.children:
            self._roots.pop(parent.key, None)
        self._offer(parent)

    def _offer(self, node: Node) -> None:
        if node.parent is not None and not node.children and not node.locks and not node.in_heap:
            node.in_heap = True
            heapq.heappush(self._leaves, (node.last_access, next(self._tie), node))

    def _split(self, node: Node, at: int) -> Node:
        """Cut `node` after `at` pages; the new upper part is returned, `node` keeps the lower one."""
        assert node.parent is not None and 0 < at < len(node.pages)
        cut = at * self._page_bytes
        upper = Node(node.key[:cut], node.pages[:at], node.parent)
        upper.locks = node.locks
        upper.last_access = node.last_access
        self._adopt(node.parent, upper)
        node.key = node.key[cut:]
        node.pages = node.pages[at:]
        node.parent = upper
        self._adopt(upper, node)
        return upper


def common_prefix(a: bytes, b: bytes) -> bytes:
    """The common prefix; by halving, so that the work is about one comparison of the shorter one."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return a[:length]
    low, high = 0, length  # a[:low] == b[:low] and a[:high] != b[:high]
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return a[:low]
