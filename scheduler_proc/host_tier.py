"""The host tier: pages of the prefix cache that gave up their place on the device and wait in host memory.

A page is on the device or on the host, never on both, so the two sizes add up. It goes down when the device needs its
place (write on eviction) and comes back when somebody asks for its tokens. SGLang's HiCache has the same two levels
(https://docs.sglang.io/advanced_features/hicache_design.html) and keeps a copy on both, which saves the way down of a
page that goes there again, and costs its place.
"""

from collections.abc import Sequence

from common.fields import IntArray
from scheduler_proc.block_pool import BlockPool


class HostTier:
    """`num_pages` pages in host memory, and the copies that move pages between them and the device.

    In a plan's copies, page h of this pool is page `first` + h: the device has `first` pages. `copies` are pairs of
    source and target, to be made in their order, so that a page can be used again as soon as a copy has read it.
    """

    def __init__(self, num_pages: int, first: int, copies: IntArray):
        self.pool = BlockPool(num_pages)
        self.first = first
        self._copies = copies
        self.offloaded = 0  # pages that went to the host, since the start
        self.loaded = 0  # pages that came back
        self.dropped = 0  # pages that were forgotten because the host had no place for them

    def emptied(self, copies: IntArray) -> "HostTier":
        """The same tier with nothing in it, with counters that go on."""
        tier = HostTier(self.pool.num_pages, self.first, copies)
        tier.offloaded, tier.loaded, tier.dropped = self.offloaded, self.loaded, self.dropped
        return tier

    def offload(self, pages: Sequence[int]) -> list[int]:
        """Copy device pages to free host pages, which are returned. Raises PoolExhausted when there are too few."""
        own = self.pool.allocate(len(pages))
        for source, target in zip(pages, own, strict=True):
            self._copies.extend((source, self.first + target))
        self.offloaded += len(pages)
        return own

    def load(self, own: Sequence[int], pages: Sequence[int]) -> None:
        """Copy host pages to device pages; the host pages are free then."""
        for source, target in zip(own, pages, strict=True):
            self._copies.extend((self.first + source, target))
        self.pool.release(own)
        self.loaded += len(own)
