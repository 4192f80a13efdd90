"""The block pool: all or nothing, counts, double frees."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_proc.block_pool import BlockPool, PoolExhausted


def test_allocation_is_all_or_nothing():
    pool = BlockPool(4)
    assert sorted(pool.allocate(3)) == [0, 1, 2]
    with pytest.raises(PoolExhausted, match="2 pages asked for, 1 are free"):
        pool.allocate(2)
    assert pool.free == 1
    assert pool.allocate(0) == []


def test_the_last_release_frees_and_one_more_is_refused():
    pool = BlockPool(2)
    (page,) = pool.allocate(1)
    pool.share([page])
    pool.release([page])
    assert pool.free == 1
    pool.release([page])
    assert pool.free == 2
    with pytest.raises(ValueError, match="more often than it was taken"):
        pool.release([page])
    with pytest.raises(ValueError, match="is free and cannot be shared"):
        pool.share([page])


def test_a_pool_has_pages():
    with pytest.raises(ValueError, match="at least 1 page"):
        BlockPool(0)
    assert BlockPool(1).allocate(1) == [0]


@given(st.lists(st.integers(0, 5), max_size=40))
def test_no_page_is_handed_out_twice(sizes):
    pool = BlockPool(12)
    held: list[list[int]] = []
    for size in sizes:
        if size > pool.free:
            with pytest.raises(PoolExhausted):
                pool.allocate(size)
            if held:
                pool.release(held.pop(0))
            continue
        held.append(pool.allocate(size))
        flat = [page for pages in held for page in pages]
        assert len(set(flat)) == len(flat)
        assert len(flat) + pool.free == 12
