"""bench.scheduler_speed measures what it says."""

from bench.scheduler_speed import steady_decode


def test_the_steps_that_are_timed_do_nothing_but_decode() -> None:
    """A plan for 256 decodes is a bitmap and the pages of the 16 that begin one; each prompt would add 400 bytes."""
    _, size = steady_decode("fcfs", 10)
    assert 200 < size < 300
