"""The invariant checker: recomputes from scratch who owns every page and compares it with what the parts believe.

Called after every event in tests and at idle in debug logging; it walks everything, so not in a running step.
"""

from collections import Counter
from itertools import compress, repeat
from operator import not_

from scheduler_proc.admission import FullReservation, promised
from scheduler_proc.block_pool import BlockPool
from scheduler_proc.radix_node import Node
from scheduler_proc.request import Request, Status
from scheduler_proc.scheduler import Scheduler
from scheduler_proc.snapshots import Track


class InvariantViolation(AssertionError):
    """Two parts of the scheduler disagree."""


def check(scheduler: Scheduler) -> None:
    """Raises InvariantViolation with the first disagreement found."""
    live = scheduler.holders()
    nodes = list(scheduler.kv.tree.nodes())
    _check_pages(scheduler, live, nodes)
    _check_host(scheduler, nodes)
    _check_snapshots(scheduler, live, nodes)
    _check_tree(scheduler, live, nodes)
    _check_requests(scheduler, live)
    _check_promises(scheduler, live)


def _require(ok: bool, what: str, *values: object) -> None:
    """`what` with `values` in its braces; it is put together only when it is needed."""
    if not ok:
        raise InvariantViolation(what.format(*values))


def _check_counts(pool: BlockPool, owners: Counter[int], name: str) -> None:
    """Every page has as many owners as its reference count says, and the free ones are those without any."""
    free, pages = pool.free_pages(), range(pool.num_pages)
    free_set = set(free)
    _require(len(free_set) == len(free), "a {} is in the free list twice", name)
    counts = list(map(owners.get, pages, repeat(0)))
    unowned = set(compress(pages, map(not_, counts)))
    if pool.all_references() != counts or free_set != unowned:  # all at once, because most often all is well
        what = "{} {} has {} owners, its reference count says {}"
        for page, count in zip(pages, counts, strict=True):
            _require(pool.references(page) == count, what, name, page, count, pool.references(page))
            _require((page in free_set) == (count == 0), "{} {}: free list and owners disagree", name, page)
        raise InvariantViolation(f"a {name} is free that there is not")


def _check_pages(scheduler: Scheduler, live: list[Request], nodes: list[Node]) -> None:
    """Every page has exactly the owners that its reference count says, and a free page has none."""
    pool, tree = scheduler.kv.pool, scheduler.kv.tree
    on_device = [node for node in nodes if not node.on_host]
    in_tree = [page for node in on_device for page in node.pages]
    owners = Counter(in_tree)
    _require(len(owners) == len(in_tree), "a page is in the tree twice")
    for request in live:
        _require(len(set(request.pages)) == len(request.pages), "request {} holds a page twice", request.rid)
        owners.update(request.pages)
    _check_counts(pool, owners, "page")
    evictable = sum(len(n.pages) for n in on_device if n.locks == 0)
    _require(
        pool.free + evictable + (len(in_tree) - evictable) + len(owners) - len(in_tree) == pool.num_pages,
        "free + evictable + locked + held pages are not the total",
    )
    _require(evictable == tree.evictable, "{} pages are evictable, the tree says {}", evictable, tree.evictable)
    _require(len(in_tree) == tree.num_pages, "{} pages are in the tree, it says {}", len(in_tree), tree.num_pages)


def _check_host(scheduler: Scheduler, nodes: list[Node]) -> None:
    """Host pages belong to one node each, which nobody has locked, and nothing of the device hangs below it."""
    tier = scheduler.kv.tier
    hosted = [node for node in nodes if node.on_host]
    if tier is None:
        _require(not hosted, "a node is on the host, and there is no host tier")
        return
    in_tree = [page for node in hosted for page in node.pages]
    owners = Counter(in_tree)
    _require(len(owners) == len(in_tree), "a host page belongs to two nodes")
    _check_counts(tier.pool, owners, "host page")
    _require(tier.pool.free + len(owners) == tier.pool.num_pages, "free + used host pages are not the total")
    for node in hosted:
        _require(not node.locks, "a node on the host is locked between events")
        _require(
            all(child.on_host for child in node.children.values()), "a node on the host is above one on the device"
        )


def _check_snapshots(scheduler: Scheduler, live: list[Request], nodes: list[Node]) -> None:
    """Every snapshot is free, at one place, a whole number of pages of a node, or with one request, which has computed
    as many pages; others are taken ahead of what is planned."""
    snapshots, size = scheduler.kv.snapshots, scheduler.kv.page_size
    owners: list[tuple[int, Node | Track]] = [(n, node) for node in nodes for n in (node.states or {}).values()]
    tracks = [(request, request.track) for request in live if request.track is not None]
    if snapshots is None:
        _require(not owners and not tracks, "a node or a request has a snapshot, and the model is not recurrent")
        return
    owners += [(track.number, track) for _, track in tracks if track.number >= 0]
    numbers = sorted(snapshots.free_numbers() + [number for number, _ in owners])
    _require(numbers == list(range(snapshots.total)), "snapshots that are free or at a place: {}", numbers)
    _require(dict(owners) == snapshots.owners(), "snapshots are not where their nodes and requests say")
    for request, track in tracks:
        computed = track.length <= request.cached_len and not track.length % size
        _require(computed, "request {} has a state of {} tokens", request.rid, track.length)
    for request in scheduler.requests.values():
        _require(request.slot >= 0 or request.track is None, "request {} waits and has a state", request.rid)
    for node in nodes:
        ends = all(0 < pages <= len(node.key) // (size * 4) for pages in node.states or ())
        _require(ends, "a snapshot is not at the end of a whole page of its node")
    for request in live:
        points = request.saving.points if request.saving is not None else []
        ahead = all(request.cached_len < point <= len(request.tokens) and not point % size for point in points)
        _require(ahead and points == sorted(set(points)), "request {} is to leave snapshots at {}", request.rid, points)


def _check_tree(scheduler: Scheduler, live: list[Request], nodes: list[Node]) -> None:
    """Edges are whole pages under the right key, requests have locked what they share, leaves can be evicted."""
    tree, page_bytes = scheduler.kv.tree, scheduler.kv.page_size * 4
    locks: Counter[int] = Counter()
    for request in live:
        node, path = request.node, []
        while node is not None and node.parent is not None:
            locks[id(node)] += 1
            path.append(node)
            node = node.parent
        shared = [page for node in reversed(path) for page in node.pages]
        same = shared == request.pages[: request.shared_pages]
        _require(same, "request {}: its shared pages are not those that it has locked", request.rid)
    leaves = {on_host: tree.leaves(on_host=on_host) for on_host in (False, True)}
    for node in nodes:
        _require(bool(node.pages), "a node without pages")
        full = len(node.pages) * page_bytes
        _require(0 <= full - len(node.key) < page_bytes, "a node's key and pages differ in length")
        _require(len(node.key) == full or not (node.children or node.locks), "a partly filled page is not the last")
        _require(sorted(node.children) == node.order, "a node's children are not in order")
        _require(
            node.parent is not None and node.parent.children.get(node.key[:page_bytes]) is node,
            "a node is not where its first page says",
        )
        held = locks[id(node)]
        _require(node.locks == held, "a node has {} locks, requests hold {}", node.locks, held)
        above = sum(not child.on_host for child in node.children.values())
        _require(node.live == above, "{} children of a node are on the device, it says {}", above, node.live)
        if not node.locks and not (node.children if node.on_host else node.live):
            _require(node in leaves[node.on_host], "an unlocked leaf cannot be found for eviction")


def _check_requests(scheduler: Scheduler, live: list[Request]) -> None:
    """Slots, states, lengths and page tables fit together."""
    size = scheduler.kv.page_size
    _require(not scheduler.slots or scheduler.slots[-1] is not None, "free slots are listed after the last taken one")
    for slot, holder in enumerate(scheduler.slots):
        _require(holder is None or holder.slot == slot, "slot {} is held by a request that says otherwise", slot)
    in_steps = Counter(id(r) for step in scheduler.in_flight for r in step.rows)
    sampled: Counter[int] = Counter()
    for number, step in enumerate(scheduler.in_flight, 1):
        _require(not step.guesses or number == len(scheduler.in_flight), "a step was planned after guesses")
        for request, count in zip(step.sampled, step.sampled_guesses, strict=True):
            sampled[id(request)] += 1 + count
    for request in live:
        rid = request.rid
        _require(request.status is not Status.WAITING, "request {} waits and holds a slot", rid)
        going = request.status in (Status.PREFILLING, Status.DECODING)
        _require(going or request.steps_in_flight > 0, "request {} is {} but holds a slot", rid, request.status.name)
        _require(request.steps_in_flight == in_steps[id(request)], "request {}: steps in flight", rid)
        _require(request.pending == sampled[id(request)], "request {}: pending tokens", rid)
        _require(0 <= request.cached_len <= request.device_len, "request {}: cached_len out of range", rid)
        _require(request.cached_len <= len(request.pages) * size, "request {}: pages do not hold what is computed", rid)
        _require(request.shared_pages <= len(request.pages), "request {}: shared pages", rid)
        _require(request.generated <= request.max_tokens, "request {}: more tokens than asked for", rid)
    for rid, request in scheduler.requests.items():
        _require(request.rid == rid and not request.ended, "request {} is answered but still listed", rid)
        waiting = request.status is Status.WAITING
        _require((request.slot < 0) == waiting, "request {}: slot and status disagree", rid)
        _require(not waiting or not request.pages, "request {} waits and holds pages", rid)


def _check_promises(scheduler: Scheduler, live: list[Request]) -> None:
    """Full reservation cannot overcommit: what running requests may still take can be had."""
    if isinstance(scheduler.admission, FullReservation):
        going = [r for r in live if not r.ended]
        owed, available = promised(scheduler.kv, going), scheduler.kv.available
        _require(owed <= available, f"{owed} pages are promised, {available} can be had")
