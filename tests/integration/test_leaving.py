"""Clients that disconnect in any phase of a request: it ends everywhere, and every page returns."""

import random
from collections.abc import Iterator

import psutil
import pytest

from bench.leaving import PHASES, leave, until_freed
from tests.integration.cluster import ROOT, Cluster, running, wait_until

TIMES = 10  # of each phase; bench/pressure.py does a thousand


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    flags = ("--port", "0", "--max-running", "2", "--chunk-tokens", "16", "--max-batch-tokens", "64")
    with running(ROOT / "demo_model", *flags) as cluster:
        yield cluster
        assert not any(cluster.info["restarts"].values())


def test_nothing_is_left_of_those_who_leave(cluster: Cluster) -> None:
    url = cluster.info["addresses"]["http"]
    chance = random.Random(3)

    def descriptors() -> int:
        return sum(psutil.Process(pid).num_fds() for pid in cluster.info["pids"].values())

    for phase in PHASES:  # what is opened at the first time may stay
        leave(url, phase, stream=True, seed=0)
        until_freed(url, 30)
    before = descriptors()
    for number in range(TIMES * len(PHASES)):
        leave(url, PHASES[number % len(PHASES)], stream=chance.random() < 0.5, seed=chance.randrange(2**31))
        until_freed(url, 30)
    cluster.check_idle()
    wait_until(lambda: descriptors() <= before, 20, lambda: f"{descriptors()} file descriptors, {before} before")
