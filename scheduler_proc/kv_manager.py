"""Which pages a request holds: prefix match, growth, sharing through the radix tree, and release.

Who owns the pages of a request's table, by token:

    0 ................ shared_pages * page_size ................ len(pages) * page_size
    |  tree and request: locked in the tree  |  request alone: freed or given to the tree at its end  |
"""

from scheduler_proc.block_pool import BlockPool, PoolExhausted
from scheduler_proc.radix_tree import RadixTree
from scheduler_proc.request import Request


class KVManager:
    """Owns the block pool and the radix tree."""

    def __init__(self, num_pages: int, page_size: int, *, prefix_cache: bool = True):
        self.pool = BlockPool(num_pages)
        self.tree = RadixTree(self.pool, page_size)
        self.page_size = page_size
        self._prefix_cache = prefix_cache

    @property
    def available(self) -> int:
        """Pages that can be had: free, or cached and used by nobody."""
        return self.pool.free + self.tree.evictable

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def attach_prefix(self, request: Request) -> None:
        """Give `request`, which holds nothing, the longest cached prefix of its tokens, and lock it.

        At least one token is left to compute, because its logits are needed.
        """
        if not self._prefix_cache:
            return
        most = (len(request.tokens) - 1) // self.page_size
        node, pages = self.tree.match(request.tokens.tobytes(), most)
        self.tree.lock(node)
        self.pool.share(pages)
        request.node = node
        request.pages = pages
        request.shared_pages = len(pages)
        request.cached_len = len(pages) * self.page_size

    def grow(self, request: Request, tokens: int) -> list[int]:
        """Pages appended to the request's table so that it holds `tokens`; evicts when needed.

        Raises PoolExhausted when there are not enough, which admission rules out.
        """
        missing = self.pages_for(tokens) - len(request.pages)
        if missing <= 0:
            return []
        short = missing - self.pool.free
        if short > 0 and self.tree.evict(short) < short:
            raise PoolExhausted(f"request {request.rid} needs {missing} pages, {self.pool.free} are free")
        pages = self.pool.allocate(missing)
        request.pages += pages
        return pages

    def publish(self, request: Request) -> None:
        """Put the whole pages of a running request, all computed, into the tree so that others can share them.

        When another request was faster with the same tokens, this one keeps its duplicates to itself until it ends:
        locking the other's pages as well would take room that admission has promised to someone.
        """
        whole = min(request.cached_len, len(request.tokens)) // self.page_size
        if not self._prefix_cache or whole <= request.shared_pages:
            return
        tokens = request.tokens[: whole * self.page_size].tobytes()
        _, known = self.tree.match(tokens, whole)
        if len(known) > request.shared_pages:
            return
        node, _ = self.tree.insert(tokens, request.pages[:whole])
        self.tree.lock(node)
        if request.node is not None:
            self.tree.unlock(request.node)
        request.node = node
        request.shared_pages = whole

    def release(self, request: Request) -> None:
        """Take all pages back; what was computed stays in the tree, unlocked, until somebody needs the room."""
        if self._prefix_cache:
            whole = min(request.cached_len, len(request.tokens)) // self.page_size
            if whole > request.shared_pages:
                self.tree.insert(request.tokens[: whole * self.page_size].tobytes(), request.pages[:whole])
            if request.node is not None:
                self.tree.unlock(request.node)
        self.pool.release(request.pages)
        request.pages = []
        request.node = None
        request.shared_pages = 0
