"""Who decodes and who gives way when pages run out, decided by decision."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from common.messages import ints
from common.sampling_params import DrawParams
from scheduler_proc.kv_manager import KVManager
from scheduler_proc.pressure import make_room, spare_pages
from scheduler_proc.request import Event, Request, Status


@dataclass
class Full:
    """A pool of pages of two tokens, without a tree. Holders come in order of seniority, the most senior first."""

    free: int
    holders: list[Request] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kv = KVManager(100, 2, prefix_cache=False)

    def add(
        self, pages: int, *, at_end: bool = True, in_flight: bool = False, status: Status = Status.DECODING
    ) -> None:
        rid = len(self.holders)
        one = Request(rid, ints(*range(2 * pages + 1)), 1, 999, frozenset(), DrawParams(), seq=rid, slot=rid)
        one.pages, one.steps_in_flight = self.kv.pool.allocate(pages), int(in_flight)
        one.status = status or Status.DECODING
        one.cached_len = 2 * pages - (not at_end)
        self.holders.append(one)

    def preempt(self, one: Request) -> None:
        """Who is in no step in flight gives its pages back at once, and waits."""
        self.preempted.append(one.rid)
        one.on(Event.PREEMPT)
        if not one.steps_in_flight:
            self.kv.release(one)
            one.on(Event.REQUEUE)
            self.holders.remove(one)

    def decode(self) -> list[int]:
        """Who can."""
        self.kv.pool.allocate(self.kv.pool.free - self.free)
        ready = [one for one in self.holders if one.status is Status.DECODING]
        able = make_room(ready, self.kv, lambda: list(self.holders), self.preempt)
        needy = sum(one.cached_len == 2 * len(one.pages) for one in able)
        assert self.kv.available - needy == spare_pages(self.kv, able) >= 0, "all of them get their page"
        return [one.rid for one in able]


def test_the_junior_waits_for_a_page_that_its_senior_takes() -> None:
    full = Full(free=1)
    full.add(3)
    full.add(3)
    assert (full.decode(), full.preempted) == ([0], [])


def test_the_most_junior_gives_way_until_there_is_a_page_for_each_senior() -> None:
    full = Full(free=0)
    for _ in range(5):
        full.add(1)
    assert (full.decode(), full.preempted) == ([0, 1], [4, 3])


def test_who_needs_no_page_decodes_unless_it_gives_way() -> None:
    full = Full(free=0)
    full.add(1)
    for _ in range(3):
        full.add(1, at_end=False)
    assert (full.decode(), full.preempted) == ([0, 1, 2], [3])


def test_pages_that_are_still_in_flight_are_awaited_one_senior_for_each() -> None:
    full = Full(free=0)
    for _ in range(4):
        full.add(1, in_flight=True)
    full.add(1, in_flight=True, status=Status.PREEMPTED)
    assert (full.decode(), full.preempted) == ([], [3]), "one senior waits for that page, the next for a junior's"
    again = Full(free=0)
    for _ in range(4):
        again.add(1, in_flight=True)
    again.add(2, in_flight=True, status=Status.ABORTED)
    assert (again.decode(), again.preempted) == ([], [3])


def test_who_has_given_way_already_is_not_asked_again() -> None:
    full = Full(free=0)
    full.add(1)
    full.add(1, at_end=False)
    full.add(0, in_flight=True, status=Status.PREEMPTED)
    assert (full.decode(), full.preempted) == ([0], [1])


@given(
    st.integers(0, 4),
    st.lists(st.tuples(st.integers(1, 3), st.booleans(), st.booleans()), min_size=1, max_size=8),
)
def test_nobody_gives_way_in_vain(free: int, holders: list[tuple[int, bool, bool]]) -> None:
    """Without its last victim, some senior of all victims would have neither a page nor one to await."""
    full = Full(free)
    for pages, at_end, in_flight in holders:
        full.add(pages, at_end=at_end, in_flight=in_flight)
    pages_of = {one.rid: len(one.pages) for one in full.holders}
    needy = [one.rid for one in full.holders if one.cached_len == 2 * len(one.pages)]
    able = full.decode()
    assert full.preempted == sorted(pages_of, reverse=True)[: len(full.preempted)], "the most junior first"
    assert set(pages_of) - set(needy) - set(full.preempted) <= set(able), "who needs nothing goes on"
    if full.preempted:
        seniors = [rid for rid in needy if rid < full.preempted[-1]]
        assert free + sum(pages_of[rid] for rid in full.preempted[:-1]) < len(seniors)
    assert 0 not in full.preempted and not set(able) & set(full.preempted)
