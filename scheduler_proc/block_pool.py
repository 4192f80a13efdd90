"""The block pool: fixed-size pages of KV cache by number, a free list, and reference counts.

The scheduler only counts; the tensors live in the workers. After PagedAttention (Kwon et al., SOSP 2023).
"""

from array import array
from collections.abc import Iterable


class PoolExhausted(RuntimeError):
    """More pages were asked for than are free. Admission must have prevented it, so this is a bug."""


class BlockPool:
    """`num_pages` pages. Every operation is O(pages it touches); allocation is all or nothing.

    A page is free exactly when its reference count is 0. Owners are requests (one reference for each page in their
    page table) and the radix tree (one reference for each page in a node).
    """

    def __init__(self, num_pages: int):
        if num_pages < 1:
            raise ValueError(f"a pool needs at least 1 page, got {num_pages}")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: the page freed last is warm in caches
        self._refs = array("i", bytes(4 * num_pages))

    @property
    def free(self) -> int:
        return len(self._free)

    def references(self, page: int) -> int:
        return self._refs[page]

    def all_references(self) -> list[int]:
        """The reference counts by page, a copy, for checks."""
        return self._refs.tolist()

    def free_pages(self) -> list[int]:
        """A copy of the free list, for checks."""
        return list(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` pages with one reference each. Raises PoolExhausted, and takes nothing, when there are fewer."""
        if count > len(self._free):
            raise PoolExhausted(f"{count} pages asked for, {len(self._free)} are free")
        if count <= 0:
            return []
        pages = self._free[-count:][::-1]
        del self._free[-count:]
        for page in pages:
            self._refs[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more reference for each page, none of which may be free."""
        for page in pages:
            if self._refs[page] < 1:
                raise ValueError(f"page {page} is free and cannot be shared")
            self._refs[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One reference less for each page; the last one frees it. Raises ValueError on a double free."""
        for page in pages:
            if self._refs[page] < 1:
                raise ValueError(f"page {page} is released more often than it was taken")
            self._refs[page] -= 1
            if self._refs[page] == 0:
                self._free.append(page)
