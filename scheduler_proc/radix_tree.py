"""The radix tree of everything that is cached: a path-compressed tree over pages of tokens.

After RadixAttention (Zheng et al., SGLang, 2024). Edges are whole pages, children are found by their first page.
Tokens are int32 as bytes, so that comparing a long edge is one memory comparison.

A lock protects a node and its ancestors from eviction, so unlocked nodes hang together at the bottom, and evicting
leaf after leaf can free all of them. Unlocked leaves wait in a heap ordered by last access. Its entries are repaired
lazily: a popped entry whose leaf was used since goes back with the new time, one that is no leaf any more is dropped.
"""

import heapq
import itertools
from collections.abc import Iterator

from scheduler_proc.block_pool import BlockPool

TOKEN_BYTES = 4


class Node:
    """One edge: `key` holds the tokens of `pages`. The root has none."""

    __slots__ = ("children", "in_heap", "key", "last_access", "locks", "pages", "parent")

    def __init__(self, key: bytes, pages: list[int], parent: "Node | None"):
        self.key = key
        self.pages = pages
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        self.last_access = 0
        self.in_heap = False


class RadixTree:
    """Owns one reference of `pool` for each page in it."""

    def __init__(self, pool: BlockPool, page_size: int):
        self._pool = pool
        self._page_bytes = page_size * TOKEN_BYTES
        self.root = Node(b"", [], None)
        self.root.locks = 1
        self.num_pages = 0
        self.evictable = 0  # pages in unlocked nodes
        self.evicted = 0  # pages, since the start
        self._clock = itertools.count(1)
        self._tie = itertools.count()
        self._leaves: list[tuple[int, int, Node]] = []

    def match(self, tokens: bytes, max_pages: int) -> tuple[Node, list[int]]:
        """The longest cached prefix of whole pages, at most `max_pages`: its deepest node and its pages.

        An edge that matches in part is split, so that the node ends where the match ends.
        """
        now = next(self._clock)
        node, pages = self.root, list[int]()
        end = min(len(tokens) // self._page_bytes, max_pages) * self._page_bytes
        position = 0
        while position < end:
            child = node.children.get(tokens[position : position + self._page_bytes])
            if child is None:
                break
            common = self._common_pages(child.key, tokens[position : min(end, position + len(child.key))])
            if common < len(child.pages):
                child = self._split(child, common)
            child.last_access = now
            pages += child.pages
            position += len(child.key)
            node = child
        return node, pages

    def insert(self, tokens: bytes, pages: list[int]) -> tuple[Node, int]:
        """Make `pages`, which hold the KV of `tokens` (whole pages), known to all.

        Returns the node at their end and how many leading pages were already there: those stay the tree's own, and
        the caller keeps (or frees) its duplicates. The tree takes a reference of each page that is new to it.
        """
        if len(tokens) != len(pages) * self._page_bytes:
            raise ValueError(f"{len(pages)} pages need {len(pages) * self._page_bytes} bytes, got {len(tokens)}")
        node, known = self.match(tokens, len(pages))
        present = len(known)
        if present < len(pages):
            fresh = pages[present:]
            self._pool.share(fresh)
            child = Node(tokens[present * self._page_bytes :], fresh, node)
            child.last_access = next(self._clock)
            node.children[child.key[: self._page_bytes]] = child
            self.num_pages += len(fresh)
            self.evictable += len(fresh)
            self._offer(child)
            node = child
        return node, present

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
            self._pool.release(node.pages[keep:])
            freed += take
            if keep:
                del node.pages[keep:]
                node.key = node.key[: keep * self._page_bytes]
                self._offer(node)
            else:
                parent = node.parent
                del parent.children[node.key[: self._page_bytes]]
                node.parent = None
                self._offer(parent)
        self.num_pages -= freed
        self.evictable -= freed
        self.evicted += freed
        return freed

    def clear(self) -> None:
        """Forget everything that is not locked."""
        self.evict(self.evictable)

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

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
        node.parent.children[upper.key[: self._page_bytes]] = upper
        node.key = node.key[cut:]
        node.pages = node.pages[at:]
        node.parent = upper
        upper.children[node.key[: self._page_bytes]] = node
        return upper

    def _common_pages(self, a: bytes, b: bytes) -> int:
        """How many leading pages are equal; by halving, so that the work is one comparison of the shorter."""
        size = self._page_bytes
        low, high = 0, min(len(a), len(b)) // size
        if a[: high * size] == b[: high * size]:
            return high
        while high - low > 1:  # pages [0, low) are equal, page high - 1 or an earlier one differs
            middle = (low + high) // 2
            if a[low * size : middle * size] == b[low * size : middle * size]:
                low = middle
            else:
                high = middle
        return low
