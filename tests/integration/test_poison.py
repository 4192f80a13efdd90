"""A request that kills or hangs the workers each time it runs ends with an error; the cluster and the others go on."""

from collections.abc import Iterator

import pytest

from common.messages import ErrorCode
from common.sampling_params import SamplingParams
from tests.helpers_models import make_checkpoint
from tests.integration.cluster import ROOT, Cluster, running
from tests.integration.test_recovery import FLAGS, Streams
from tests.mortal_worker import HANGS, KILLS

PARAMS = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    path = make_checkpoint("llama", tmp_path_factory.mktemp("m") / "llama")
    program = (str(ROOT / "tests" / "mortal_worker.py"),)
    with running(path, *FLAGS, program=program) as cluster:
        yield cluster


@pytest.mark.parametrize("poison", [KILLS, HANGS], ids=["kills", "hangs"])
def test_the_culprit_ends_and_nobody_else(cluster: Cluster, poison: list[int]) -> None:
    with cluster.connect() as connection:
        alone = Streams(connection).finish()
        before = cluster.info["restarts"]["workers"]
        streams = Streams(connection)
        streams.until(len(streams.answers))
        culprit = connection.submit(poison, PARAMS)
        streams.left.add(culprit)
        streams.until(10**9)
        assert set(streams.errors) == {culprit} and streams.errors[culprit].code == ErrorCode.INTERNAL
        assert "died again and again" in streams.errors[culprit].problem
        del streams.errors[culprit]
        assert streams.finish() == alone
        cluster.remember()
        assert cluster.info["restarts"]["workers"] == before + 2
        again = connection.submit(poison, PARAMS)  # clients try again by themselves
        while True:
            rows = connection.poll(1)
            if rows:
                break
        assert rows[0].rid == again and getattr(rows[0], "code", None) == ErrorCode.INTERNAL
        assert cluster.info["restarts"]["workers"] == before + 2
    assert cluster.check_idle()["scheduler.suspects"] == 0
