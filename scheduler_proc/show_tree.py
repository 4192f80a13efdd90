"""The radix tree as text."""

import heapq
from array import array
from collections.abc import Iterator

from scheduler_proc.radix_node import TOKEN_BYTES, Node
from scheduler_proc.radix_tree import RadixTree

FIRST_TOKENS = 8


def show_tree(tree: RadixTree, *, depth: int = 12, most: int = 60) -> Iterator[str]:
    """Lines of text, a node each: tokens, pages, locks, last access, first token ids.

    Of a larger tree the `most` nodes used last are shown, at most `depth` below their root, each under its parents;
    what is left out is counted where it belongs.
    """
    roots: dict[int, Node] = {}
    nodes = tokens = 0
    for node in tree.nodes():
        nodes += 1
        tokens += len(node.key) // TOKEN_BYTES
        if node.parent is not None and node.parent.parent is None:
            roots[id(node.parent)] = node.parent
    locked = tree.num_pages - tree.evictable
    yield (
        f"radix tree: {tokens} tokens in {tree.num_pages} pages ({locked} locked, {tree.evictable} evictable), "
        f"{nodes} nodes, {tree.evicted} pages evicted so far"
    )
    shown = _chosen(list(roots.values()), depth, most)
    for root in sorted(roots.values(), key=lambda r: r.key):
        if root.key or len(roots) > 1:
            yield f"namespace {root.key.decode()!r}"
        yield from _children(root, shown, "")


def _chosen(roots: list[Node], depth: int, most: int) -> set[int]:
    """The nodes to show: from the roots down, always the one used last next. A parent comes before its children."""
    chosen: set[int] = set()
    heap: list[tuple[int, int, int, Node]] = []

    def offer(parent: Node, level: int) -> None:
        for child in parent.children.values():
            heapq.heappush(heap, (-child.last_access, id(child), level, child))

    for root in roots:
        offer(root, 1)
    while heap and len(chosen) < most:
        _, key, level, node = heapq.heappop(heap)
        chosen.add(key)
        if level < depth:
            offer(node, level + 1)
    return chosen


def _children(node: Node, shown: set[int], indent: str) -> Iterator[str]:
    stack: list[tuple[Node | list[Node], str, bool]] = []

    def push(parent: Node, indent: str) -> None:
        ordered = sorted(parent.children.values(), key=lambda n: n.last_access, reverse=True)
        rows: list[Node | list[Node]] = [n for n in ordered if id(n) in shown]
        hidden = [n for n in ordered if id(n) not in shown]
        rows += [hidden] if hidden else []
        stack.extend((row, indent, i == 0) for i, row in enumerate(reversed(rows)))

    push(node, indent)
    while stack:
        row, indent, last = stack.pop()
        branch, below = ("└─ ", "   ") if last else ("├─ ", "│  ")
        if isinstance(row, list):
            yield f"{indent}{branch}{_summary(row)}"
        else:
            yield f"{indent}{branch}{_describe(row)}"
            push(row, indent + below)


def _describe(node: Node) -> str:
    tokens = array("i", node.key[: FIRST_TOKENS * TOKEN_BYTES])
    length = len(node.key) // TOKEN_BYTES
    ids = " ".join(map(str, tokens)) + (" ..." if length > len(tokens) else "")
    locks = f", locks {node.locks}" if node.locks else ""
    at = " ".join(str(pages) for pages in sorted(node.states or ()))
    states = f", snapshots after pages {at}" if at else ""
    where = "host pages" if node.on_host else "pages"
    return f"{length} tokens, {where} {_ranges(node.pages)}{locks}{states}, used at {node.last_access}: {ids}"


def _summary(nodes: list[Node]) -> str:
    count = pages = 0
    stack = list(nodes)
    while stack:
        node = stack.pop()
        count += 1
        pages += len(node.pages)
        stack.extend(node.children.values())
    return f"... {count} more nodes with {pages} pages"


def _ranges(pages: list[int]) -> str:
    """Page numbers with runs folded: 3-7 12. Long lists are cut."""
    runs: list[list[int]] = []
    for page in pages:
        if runs and runs[-1][1] + 1 == page:
            runs[-1][1] = page
        else:
            runs.append([page, page])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return " ".join(texts[:6]) + (f" ... ({len(pages)} pages)" if len(texts) > 6 else "")
