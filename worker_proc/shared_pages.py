"""Which running requests begin with the same pages, so that attention can read those once for all of them.

Prefixes nest: a system prompt of all, a document of some, several answers to one question. A row can be in a tile on
each of several levels, which together are its beginning; where more levels nest, those that save most are taken. It
changes only when rows come or go, because pages that requests have in common are whole and in place when they enter.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from common.messages import StepPlan
from worker_proc.attention.interface import SHARED_LEVELS, TILE_COLUMNS, TILE_ROWS

# At least one in so many of the tokens that decodes read must be saved, else a second kernel costs more.
_LEAST_SHARE = 8
LEVEL_TOKENS = 24  # what a row's partial results of one more level cost, in tokens read (see docs/gpu.md)
_MANY_NESTED = 12  # prefixes inside each other from which on not all of them are looked at


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows (indices of a batch) whose first `pages` pages are the same, and that read those from `above` on together.

    `level` is in how many tiles each of them is with the pages before `above`.
    """

    pages: int
    rows: tuple[int, ...]
    above: int = 0
    level: int = 0


@dataclass(slots=True)
class _Prefix:
    """Rows `begin .. end` of the order have `pages` pages in common, and so have more `inside`."""

    pages: int
    begin: int
    end: int = 0
    inside: "list[_Prefix]" = field(default_factory=list)
    height: int = 1  # prefixes inside each other, with this one

    def ended(self, end: int) -> "list[_Prefix]":
        """This one; or, where very many are inside each other, those inside it, if one of them has nearly all rows. So
        the tree is as high as a logarithm of rows, and little is lost."""
        self.end = end
        self.height += max((inner.height for inner in self.inside), default=0)
        most = max((inner.end - inner.begin for inner in self.inside), default=0)
        return self.inside if self.height > _MANY_NESTED and 8 * most >= 7 * (end - self.begin) else [self]


_Choice = tuple[int, list[tuple[_Prefix, int, int]]]  # tokens saved; prefixes with the pages above them and their level


class SharedPageFinder:
    """The pages of every slot, as plans say, and the tiles of a step."""

    def __init__(self, page_size: int, tile_rows: int = TILE_ROWS, level_tokens: int = LEVEL_TOKENS) -> None:
        """A tile has up to `tile_rows` rows; with fewer than three, three rows would leave one alone. A level beyond
        the first must save more than `level_tokens` tokens per row."""
        if tile_rows < 3:
            raise ValueError(f"tile_rows = {tile_rows}: a tile has room for three rows at least")
        self._page_size = page_size
        self._tile_rows = tile_rows
        self._level_tokens = level_tokens
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
        """For decodes of `slots`, whose rows have `lengths` tokens with the new one; empty where it does not pay. It is
        the same list while the same requests decode.

        There are at most `max_tiles(len(slots))`, each of two rows or more. A row is in at most one tile of each level,
        on all levels from 0 to its last, and their pages follow each other. Its newest token is in none.
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
        known: dict[tuple[int, int, int, int], _Choice] = {}
        outermost = _nested([_common(pages[a], pages[b]) for a, b in pairwise(order)])
        choices = [self._choose(prefix, 0, 0, known) for prefix in outermost]
        if sum(saved for saved, _ in choices) * _LEAST_SHARE < sum(lengths):
            return []
        tiles: list[Tile] = []
        for prefix, above, level in (chosen for _, several in choices for chosen in several):
            rows = prefix.end - prefix.begin
            count = -(-rows // self._tile_rows)
            borders = [prefix.begin + rows * i // count for i in range(count + 1)]  # as even as can be: none is alone
            for begin, end in pairwise(borders):
                tiles.append(Tile(prefix.pages, tuple(sorted(order[begin:end])), above, level))
        return tiles

    def _choose(
        self, prefix: _Prefix, above: int, level: int, known: dict[tuple[int, int, int, int], _Choice]
    ) -> _Choice:
        """What to read together of a prefix and those inside it, where `above` pages are read together already."""
        key = (prefix.begin, prefix.end, above, level)
        if key not in known:
            best = _sum([self._choose(inner, above, level, known) for inner in prefix.inside])
            if level < SHARED_LEVELS:
                deeper = [self._choose(inner, prefix.pages, level + 1, known) for inner in prefix.inside]
                rows = prefix.end - prefix.begin
                # a tile saves all reads but its own
                saved = (rows - -(-rows // self._tile_rows)) * (prefix.pages - above) * self._page_size
                cost = rows * self._level_tokens if level else 0
                taken = _sum([(saved - cost, [(prefix, above, level)]), *deeper])
                if taken[0] > 0 and taken[0] >= best[0]:
                    best = taken
            known[key] = best
        return known[key]


def max_tiles(rows: int) -> int:
    """As many tiles as there can be for so many decodes: in a tree whose leaves are the rows, in which each inner node
    joins two or more, with at most `SHARED_LEVELS` levels above the leaves."""
    return max(1, rows - (rows >> SHARED_LEVELS))


def layout(tiles: Sequence[Tile], rows: int, page_size: int) -> "tuple[array[int], array[int], array[int]]":
    """The numbers of `SharedPages` for a batch of `rows` decodes: `skipped`, `levels` and, row after row, `tiles`."""
    skipped, levels = array("q", bytes(8 * rows)), array("q", bytes(8 * rows))
    numbers = array("q")
    for tile in tiles:
        for row in tile.rows:
            skipped[row] = max(skipped[row], tile.pages * page_size)
            levels[row] += 1
        numbers.extend((tile.rows[0], tile.above * page_size, tile.pages * page_size, tile.level))
        numbers.extend((*tile.rows, *[-1] * (TILE_ROWS - len(tile.rows))))
    assert len(numbers) == len(tiles) * TILE_COLUMNS
    return skipped, levels, numbers


def _sum(choices: list[_Choice]) -> _Choice:
    return sum(saved for saved, _ in choices), [chosen for _, several in choices for chosen in several]


def _nested(common: Sequence[int]) -> list[_Prefix]:
    """Prefixes of rows in order whose neighbours have so many pages in common, those inside no other one (the tree of
    intervals over longest common prefixes; Abouelhoda, Kurtz, Ohlebusch, 2004)."""
    stack = [_Prefix(0, 0)]
    for row, pages in enumerate([*common, 0], 1):
        begin, ended = row - 1, list[_Prefix]()
        while pages < stack[-1].pages:
            begin, ended = stack[-1].begin, stack.pop().ended(row)
            if pages <= stack[-1].pages:
                stack[-1].inside += ended
                ended = []
        if pages > stack[-1].pages:
            stack.append(_Prefix(pages, begin, inside=ended))
    return stack[0].inside


def _common(a: bytes, b: bytes) -> int:
    """Pages at the beginning that are the same."""
    count = min(len(a), len(b)) // 4
    differ: npt.NDArray[np.bool_] = _numbers(a)[:count] != _numbers(b)[:count]
    return int(differ.argmax()) if differ.any() else count


def _numbers(pages: bytes) -> npt.NDArray[np.uint32]:
    return np.frombuffer(pages, dtype=np.uint32)
