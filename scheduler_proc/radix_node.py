"""What the radix tree is made of, and what it finds."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scheduler_proc.snapshots import Found

TOKEN_BYTES = 4


Heap = list[tuple[int, int, "Node"]]


class Node:
    """One edge: `key` holds the tokens of `pages`, which are numbers of host pages where `on_host`. A root has no
    pages; its key is its namespace."""

    __slots__ = (
        "children", "heap", "key", "last_access", "live", "locks", "on_host", "order", "pages", "parent", "states",
    )  # fmt: skip

    def __init__(self, key: bytes, pages: list[int], parent: "Node | None"):
        self.key = key
        self.pages = pages
        self.parent = parent
        self.children: dict[bytes, Node] = {}  # by first page
        self.order: list[bytes] = []  # the keys of `children`, sorted
        self.locks = 0
        self.last_access = 0
        self.on_host = False
        self.live = 0  # children on the device
        self.heap: Heap | None = None  # in which it can be found for eviction
        self.states: dict[int, int] | None = None  # snapshots (snapshots.py) by how many of its pages they are of


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix: whole pages down to `node`, then `partial` tokens of page `source`, to be copied.

    `pages` are on the device. The last nodes of the way, `hosted`, are on the host and must be loaded. If `source` is
    on the host, it is a number as in a plan's copies, and `lender` its node. `from_host` tokens are there, in all.
    `found` is what there is for a recurrent model, of which this is the part that is used.
    """

    node: Node
    pages: list[int]
    source: int = -1
    partial: int = 0
    hosted: tuple[Node, ...] = ()
    lender: Node | None = None
    from_host: int = 0
    found: "Found | None" = None


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


def walk(node: Node, tokens: bytes, page_bytes: int) -> Iterator[tuple[Node, int, int]]:
    """The nodes on the way of the whole pages of `tokens` below a root, each with how many pages are before it and how
    many of its own match."""
    position = 0
    while (child := node.children.get(tokens[position : position + page_bytes])) is not None:
        whole = len(common_prefix(child.key, tokens[position : position + len(child.key)])) // page_bytes
        if whole:
            yield child, position // page_bytes, whole
        if whole * page_bytes < len(child.key):
            return
        node, position = child, position + len(child.key)
