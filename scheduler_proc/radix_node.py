"""What the radix tree is made of, and what it finds."""

from dataclasses import dataclass

TOKEN_BYTES = 4


Heap = list[tuple[int, int, "Node"]]


class Node:
    """One edge: `key` holds the tokens of `pages`, which are numbers of host pages where `on_host`. A root has no
    pages; its key is its namespace."""

    __slots__ = ("children", "heap", "key", "last_access", "live", "locks", "on_host", "order", "pages", "parent")

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


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix: whole pages down to `node`, then `partial` tokens of page `source`, to be copied.

    `pages` are on the device. The last nodes of the way, `hosted`, are on the host and must be loaded. If `source` is
    on the host, it is a number as in a plan's copies, and `lender` its node. `from_host` tokens are there, in all.
    """

    node: Node
    pages: list[int]
    source: int = -1
    partial: int = 0
    hosted: tuple[Node, ...] = ()
    lender: Node | None = None
    from_host: int = 0


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
