"""Which running requests begin with the same pages, so that attention can read those once for all of them.

One level: a row shares its beginning with one group. Where prefixes nest (a system prompt for all, a document for
some), the grouping that saves most reads is taken. It changes only when rows come or go, because pages that requests
have in common are whole and in place when they enter.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from common.messages import StepPlan

_LEAST_SHARE = (
    8  # at least one in so many of the tokens that decodes read must be saved, else a second kernel costs more
)


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows (indices of a batch) whose first `pages` pages are the same."""

    pages: int
    rows: tuple[int, ...]


class SharedPageFinder:
    """The pages of every slot, as plans say, and the tiles of a step."""

    def __init__(self, page_size: int, tile_rows: int) -> None:
        self._page_size = page_size
        self._tile_rows = tile_rows
        self._pages: dict[int, bytearray] = {}  # big-endian, 4 bytes a page: compared like sequences of numbers
        self._found: tuple[tuple[int, ...], list[Tile]] | None = None  # for these slots

    def reset(self) -> None:
        """Every slot is free."""
        self._pages.clear()
        self._found = None

    def apply(self, plan: StepPlan) -> None:
        """Slots leave and enter, and get pages."""
        if plan.leave or plan.enter_slots:
            self._found = None
        for slot in plan.leave:
            self._pages.pop(slot, None)
        for slot in plan.enter_slots:
            self._pages[slot] = bytearray()
        begin = 0
        for slot, count in zip(plan.page_slots, plan.page_counts, strict=True):
            self._pages[slot] += np.array(plan.pages[begin : begin + count], dtype=">u4").tobytes()
            begin += count

    def tiles(self, slots: Sequence[int], lengths: Sequence[int]) -> list[Tile]:
        """For decodes of `slots`, whose rows have `lengths` tokens with the new one; empty where it does not pay.

        There is at most one tile for every two rows, a row is in one tile at most, and its newest token in none.
        """
        key = tuple(slots)
        if self._found is None or self._found[0] != key:
            self._found = (key, self._find(key, lengths))
        return self._found[1]

    def _find(self, slots: tuple[int, ...], lengths: Sequence[int]) -> list[Tile]:
        if len(slots) < 2:
            return []
        size = self._page_size
        # numpy's view keeps nobody from appending to the bytearray: bytes() is a copy
        pages = [bytes(self._pages[slot][: 4 * ((n - 1) // size)]) for slot, n in zip(slots, lengths, strict=True)]
        order = sorted(range(len(slots)), key=pages.__getitem__)
        common = [0] + [_common(pages[a], pages[b]) for a, b in pairwise(order)]
        saved, groups = self._best(common, 0, len(order))
        if saved * size * _LEAST_SHARE < sum(lengths):
            return []
        tiles: list[Tile] = []
        for begin, end, count in groups:
            for start in range(begin, end, self._tile_rows):
                rows = tuple(sorted(order[start : min(start + self._tile_rows, end)]))
                if len(rows) > 1:
                    tiles.append(Tile(count, rows))
        return tiles

    def _best(self, common: list[int], begin: int, end: int) -> tuple[int, list[tuple[int, int, int]]]:
        """How to group rows `begin .. end` of the order, whose neighbours have `common` pages in common: pages saved,
        and groups as begin, end, pages."""
        if end - begin < 2:
            return 0, []
        least = min(common[begin + 1 : end])
        rows = end - begin
        # a tile saves all reads but its own; a last one of a single row saves none
        together = (rows - -(-rows // self._tile_rows)) * least
        cuts = [begin, *(i for i in range(begin + 1, end) if common[i] == least), end]
        apart, groups = 0, []
        for left, right in pairwise(cuts):
            value, found = self._best(common, left, right)
            apart += value
            groups += found
        if together > 0 and together >= apart:
            return together, [(begin, end, least)]
        return apart, groups


def layout(tiles: Sequence[Tile], rows: int, page_size: int, tile_rows: int) -> "tuple[array[int], array[int]]":
    """The numbers of `SharedPages` for a batch of `rows` decodes: `skipped` and, row after row, `tiles`."""
    skipped = array("q", bytes(8 * rows))
    numbers = array("q")
    for tile in tiles:
        for row in tile.rows:
            skipped[row] = tile.pages * page_size
        numbers.extend((tile.rows[0], tile.pages * page_size, *tile.rows, *[-1] * (tile_rows - len(tile.rows))))
    return skipped, numbers


def _common(a: bytes, b: bytes) -> int:
    """Pages at the beginning that are the same."""
    count = min(len(a), len(b)) // 4
    differ: npt.NDArray[np.bool_] = _numbers(a)[:count] != _numbers(b)[:count]
    return int(differ.argmax()) if differ.any() else count


def _numbers(pages: bytes) -> npt.NDArray[np.uint32]:
    return np.frombuffer(pages, dtype=np.uint32)
