"""Which pages a request holds: prefix match, growth, sharing through the radix tree, and release.

Who owns the pages of a request's table, by token:

    0 ................ shared_pages * page_size ................ len(pages) * page_size
    |  tree and request: locked in the tree  |  request alone: freed or given to the tree at its end  |
"""

from collections.abc import Collection
from dataclasses import replace

from common.fields import IntArray
from common.messages import ints
from scheduler_proc.block_pool import BlockPool, PoolExhausted
from scheduler_proc.host_tier import HostTier
from scheduler_proc.radix_node import TOKEN_BYTES, Match, Node
from scheduler_proc.radix_tree import RadixTree
from scheduler_proc.request import Request
from scheduler_proc.snapshots import Found, Place, Snapshots, find, place_of

_FORGOTTEN_AHEAD, _MOVED_AHEAD = 256, 16  # pages evicted at once, at most; a step waits for those that go to the host
_AHEAD_SHARE = 64  # the part of those that could be evicted


class KVManager:
    """Owns the block pool, the radix tree and, with `host_pages`, the host tier below it.

    A `recurrent` model's requests start where there is one of `snapshots` snapshots of its state, and nowhere else.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        prefix_cache: bool = True,
        host_pages: int = 0,
        recurrent: bool = False,
        snapshots: int = 0,
    ):
        if host_pages and not prefix_cache:
            raise ValueError("a host tier holds pages of the prefix cache, which is off")
        if host_pages and recurrent:
            raise ValueError("the states of recurrent layers do not go to the host tier")
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self.copies = ints()  # pairs of source and target that the next plan has to make, in their order
        self.pool = BlockPool(num_pages)
        self.tier = HostTier(host_pages, num_pages, self.copies) if host_pages else None
        self.snapshots = Snapshots(snapshots) if recurrent else None
        self.tree = RadixTree(self.pool, page_size, self.tier, self.snapshots)

    def forget(self) -> None:
        """The pages hold nothing any more: empty pools and an empty tree. Requests must drop their pages, too."""
        self.copies = ints()
        self.pool = BlockPool(self.pool.num_pages)
        self.tier = self.tier.emptied(self.copies) if self.tier is not None else None
        self.snapshots = self.snapshots.emptied() if self.snapshots is not None else None
        self.tree = self.tree.emptied(self.pool, self.tier, self.snapshots)

    def take_copies(self) -> IntArray:
        """The copies since this was asked last."""
        taken = self.copies[:]
        del self.copies[:]
        return taken

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
        if self.snapshots is not None:
            return self._find(request).start
        return self.tree.peek(request.tokens.tobytes(), request.match_limit, request.salt)

    def _find(self, request: Request) -> Found:
        tokens = request.tokens.tobytes()
        way = self.tree.walk(tokens[:-TOKEN_BYTES], request.salt)  # the last one's logits are needed
        return find(way, self.page_size, request.match_limit, tokens)

    def lock_prefix(self, request: Request) -> Match | None:
        """Give `request`, which holds nothing, the longest cached prefix of its tokens that is on the device, and lock
        all of the longest cached prefix.

        Tokens whose logits are needed are left to compute, one at least. Returns what was found, for `take_room`, which
        takes references of its pages, or `unlock_prefix`.
        """
        if not self.prefix_cache:
            return None
        if self.snapshots is None:
            match = self.tree.match(request.tokens.tobytes(), request.match_limit, request.salt)
        else:
            found = self._find(request)
            match = self.tree.match(request.tokens[: found.start].tobytes(), found.start, request.salt)
            match = replace(match, found=found)
        self.tree.lock(match.node)
        if match.lender is not None:
            self.tree.lock(match.lender)  # the room that is made for this request is not to be made there
        request.node = match.node
        request.pages = match.pages
        request.shared_pages = len(match.pages)
        request.cached_len = len(match.pages) * self.page_size
        return match

    def unlock_prefix(self, request: Request, match: Match | None = None) -> None:
        """Undo `lock_prefix`, which has found `match` and was not followed by `take_room`."""
        if match is not None and match.lender is not None:
            self.tree.unlock(match.lender)
        self._let_go(request)

    def _let_go(self, request: Request) -> None:
        if request.node is not None:
            self.tree.unlock(request.node)
        request.pages, request.node, request.shared_pages, request.cached_len = [], None, 0, 0

    def take_room(self, request: Request, match: Match | None) -> bool:
        """Pages for all known tokens of a request whose prefix is locked, or PoolExhausted. What is on the host of its
        prefix is loaded.

        Returns whether a page is copied (copy-on-write) because the match ended inside it. Its source needs no lock on
        the device: copies are made in the order in which they were asked for, before anything is computed.
        """
        self._make_room(request, self.pages_for(len(request.tokens)) - len(request.pages))
        self.pool.share(request.pages)
        for node in match.hosted if match is not None else ():
            pages = self.pool.allocate(len(node.pages))
            self.tree.load(node, pages)
            self.pool.share(pages)
            request.pages += pages
            request.shared_pages += len(pages)
            request.cached_len += len(pages) * self.page_size
        own = self.grow(request, len(request.tokens))
        if match is None or not match.partial:
            return False
        request.cached_len += match.partial
        if match.source != own[0]:
            self.copies.extend((match.source, own[0]))
        if match.lender is None:
            return match.source != own[0]
        self.tree.unlock(match.lender)
        return False

    def pages_ahead(self, request: Request, tokens: int, more: int) -> int:
        """Pages that `more` tokens beyond `tokens` would take from the pool."""
        return max(0, self.pages_for(tokens + more) - max(len(request.pages), self.pages_for(tokens)))

    def grow(self, request: Request, tokens: int) -> list[int]:
        """Pages appended to the request's table so that it holds `tokens`; evicts when needed.

        Raises PoolExhausted, and takes nothing, when there are not enough.
        """
        missing = self.pages_for(tokens) - len(request.pages)
        self._make_room(request, missing)
        pages = self.pool.allocate(missing)
        request.pages += pages
        return pages

    def _make_room(self, request: Request, missing: int) -> None:
        if missing > self.available:
            raise PoolExhausted(f"request {request.rid} needs {missing} pages, {self.available} can be had")
        if missing > self.pool.free:
            most = _MOVED_AHEAD if self.tier is not None else _FORGOTTEN_AHEAD
            ahead = min(most, self.tree.evictable // _AHEAD_SHARE)  # of a long edge, the rest is copied
            self.tree.evict(max(missing - self.pool.free, ahead))

    def publish(self, request: Request) -> None:
        """Put the whole pages of a running request, all computed, into the tree so that others can share them.

        When another request was faster with the same tokens, this one keeps its duplicates to itself until it ends:
        locking the other's pages as well would take room that admission has promised to someone. A recurrent model
        computes again what is there but has no snapshot: then the tree takes the new pages and frees its own, where
        nobody uses them.
        """
        whole = request.cached_len // self.page_size
        if not self.prefix_cache or whole <= request.shared_pages:
            return
        tokens = request.tokens[: whole * self.page_size].tobytes()
        known = self.tree.peek(tokens, len(tokens), request.salt, on_device=True)
        if known // self.page_size > request.shared_pages and not self._takes_over(request, tokens):
            return
        node, _ = self.tree.insert(tokens, request.pages[:whole], request.salt, request.node)
        if self.snapshots is not None:
            self._take_over(node, request.pages[:whole], request.shared_pages)
        if node is not request.node:
            self.tree.lock(node)
            if request.node is not None:
                self.tree.unlock(request.node)
            request.node = node
        request.shared_pages = whole

    def _takes_over(self, request: Request, tokens: bytes) -> bool:
        if self.snapshots is None:
            return False
        way = self.tree.walk(tokens, request.salt)
        return not any(node.locks for node, before, _ in way if before >= request.shared_pages)

    def _take_over(self, node: Node, pages: list[int], first: int) -> None:
        """The nodes on the way down to `node`, which nobody has locked, hold `pages` from number `first` on, in place
        of others with the same tokens."""
        end = len(pages)
        while end > first and not node.locks and node.parent is not None:
            own = pages[end - len(node.pages) : end]
            if node.pages != own:
                self.pool.share(own)
                self.pool.release(node.pages)
                node.pages = own
            end -= len(own)
            node = node.parent

    def save_state(self, request: Request, length: int, busy: Collection[int], *, awaited: bool = False) -> int | None:
        """The snapshot that takes the state after the first `length` tokens of a request, whole pages that the step
        under construction computes; `busy` are those that it saves already. None when there is one of these tokens, or
        none can be had (Snapshots.save), or they are not in the tree."""
        assert self.snapshots is not None
        start = request.saving.start if request.saving is not None else 0
        place = self._place(request, length, start)
        if place is None:
            return None
        self.snapshots.supersede(place.superseded)
        number = self.snapshots.save(place.node, place.pages, place.worth, busy, awaited=awaited)
        if number is not None:
            self.tree.version += 1
        return number

    def _place(self, request: Request, length: int, start: int = 0) -> Place | None:
        """Where the tree has the end of a request's first `length` tokens, whole pages; it has started at `start`."""
        way = self.tree.walk(request.tokens[:length].tobytes(), request.salt)
        return place_of(way, length // self.page_size, start // self.page_size, self.page_size)

    def follow_answer(self, request: Request, length: int, least_gain: int, busy: Collection[int]) -> int | None:
        """The snapshot that takes the state after `length` tokens of a request that decodes, if they are whole pages
        and it is to have one (Snapshots.follow)."""
        if length % self.page_size or self.snapshots is None or request.track is None:
            return None
        number = self.snapshots.follow(request.track, length, least_gain, busy)
        if number is not None:
            self.tree.version += 1  # it may have been somewhere else
        return number

    def _settle_track(self, request: Request, known: int) -> None:
        """What a request has computed is in the tree, of which `known` tokens are its own: what went along with its
        answer stays there, unless it has seen a token after the end."""
        track, request.track = request.track, None
        if self.snapshots is None or track is None or track.number < 0:
            return
        place = self._place(request, track.length) if track.length <= known else None
        if place is None:
            self.snapshots.drop(track)
        else:
            self.snapshots.settle(track, place.node, place.pages, place.worth)
            self.tree.version += 1

    def returned_by(self, request: Request) -> int:
        """Pages that can be had once `request` lets go: its own, and those of the tree that nobody else has locked."""
        pages, node = len(request.pages) - request.shared_pages, request.node
        while node is not None and node.locks == 1:
            pages += len(node.pages)
            node = node.parent
        return pages

    def release(self, request: Request) -> None:
        """Take all pages back; what was computed stays in the tree, unlocked, until somebody needs the room."""
        known = min(request.cached_len, len(request.tokens))
        if self.prefix_cache and known > request.shared_pages * self.page_size:
            pages = request.pages[: self.pages_for(known)]
            self.tree.insert(request.tokens[:known].tobytes(), pages, request.salt, request.node)
        self._settle_track(request, known)
        self.pool.release(request.pages)
        self._let_go(request)
