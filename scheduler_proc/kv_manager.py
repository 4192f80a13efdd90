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
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self.pool = BlockPool(num_pages)
        self.tree = RadixTree(self.pool, page_size)

    def forget(self) -> None:
        """The pages hold nothing any more: an empty pool and an empty tree. Requests must drop their pages, too."""
        self.pool = BlockPool(self.pool.num_pages)
        self.tree = self.tree.emptied(self.pool)

    @property
    def available(self) -> int:
        """Pages that can be had: free, or cached and used by nobody."""
        return self.pool.free + self.tree.evictable

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def cached(self, request: Request) -> int:
        """How many tokens of a waiting request are in the cache now."""
        if not self.prefix_cache:
            return 0
        return self.tree.peek(request.tokens.tobytes(), request.match_limit, request.salt)

    def lock_prefix(self, request: Request) -> tuple[int, int]:
        """Give `request`, which holds nothing, the longest cached prefix of its tokens, and lock it.

        Tokens whose logits are needed are left to compute, one at least. Returns the page in which the match ends
        and how many of its tokens match, which `take_room` copies; (-1, 0) when it ends between pages.
        """
        if not self.prefix_cache:
            return -1, 0
        match = self.tree.match(request.tokens.tobytes(), request.match_limit, request.salt)
        self.tree.lock(match.node)
        self.pool.share(match.pages)
        request.node = match.node
        request.pages = match.pages
        request.shared_pages = len(match.pages)
        request.cached_len = len(match.pages) * self.page_size
        return match.source, match.partial

    def unlock_prefix(self, request: Request) -> None:
        """Undo `lock_prefix`."""
        if request.node is not None:
            self.tree.unlock(request.node)
        self.pool.release(request.pages)
        request.pages, request.node, request.shared_pages, request.cached_len = [], None, 0, 0

    def take_room(self, request: Request, source: int, partial: int) -> tuple[int, int] | None:
        """Pages for all known tokens of a request whose prefix is locked, or PoolExhausted.

        Returns the copy (source, target) that the workers must make before the step, if the match ended inside a page.
        The source needs no lock: a page freed now can be written by the same plan at the earliest, after its copies.
        """
        own = self.grow(request, len(request.tokens))
        if partial == 0:
            return None
        request.cached_len += partial
        return (source, own[0]) if source != own[0] else None

    def pages_ahead(self, request: Request, tokens: int, more: int) -> int:
        """Pages that `more` tokens beyond `tokens` would take from the pool."""
        return max(0, self.pages_for(tokens + more) - max(len(request.pages), self.pages_for(tokens)))

    def grow(self, request: Request, tokens: int) -> list[int]:
        """Pages appended to the request's table so that it holds `tokens`; evicts when needed.

        Raises PoolExhausted, and takes nothing, when there are not enough.
        """
        missing = self.pages_for(tokens) - len(request.pages)
        if missing <= 0:
            return []
        if missing > self.available:
            raise PoolExhausted(f"request {request.rid} needs {missing} pages, {self.available} can be had")
        if missing > self.pool.free:
            self.tree.evict(missing - self.pool.free)
        pages = self.pool.allocate(missing)
        request.pages += pages
        return pages

    def publish(self, request: Request) -> None:
        """Put the whole pages of a running request, all computed, into the tree so that others can share them.

        When another request was faster with the same tokens, this one keeps its duplicates to itself until it ends:
        locking the other's pages as well would take room that admission has promised to someone.
        """
        whole = min(request.cached_len, len(request.tokens)) // self.page_size
        if not self.prefix_cache or whole <= request.shared_pages:
            return
        tokens = request.tokens[: whole * self.page_size].tobytes()
        if self.tree.peek(tokens, len(tokens), request.salt) // self.page_size > request.shared_pages:
            return
        node, _ = self.tree.insert(tokens, request.pages[:whole], request.salt, request.node)
        if node is not request.node:
            self.tree.lock(node)
            if request.node is not None:
                self.tree.unlock(request.node)
            request.node = node
        request.shared_pages = whole

    def release(self, request: Request) -> None:
        """Take all pages back; what was computed stays in the tree, unlocked, until somebody needs the room."""
        known = min(request.cached_len, len(request.tokens))
        if self.prefix_cache and known > request.shared_pages * self.page_size:
            pages = request.pages[: self.pages_for(known)]
            self.tree.insert(request.tokens[:known].tobytes(), pages, request.salt, request.node)
        self.unlock_prefix(request)
