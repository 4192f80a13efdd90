"""Clusters whose device is too small for the conversations that take turns on it, with and without a host tier."""

import os
import signal
from pathlib import Path

import pytest

from common.connection import Connection
from common.sampling_params import SamplingParams
from tests.helpers_models import make_checkpoint
from tests.integration.cluster import Cluster, running, wait_until
from tests.integration.test_cluster import collect

TOKENS = 12  # per answer
TURNS = 3
PROMPTS = [[10 + speaker] * 40 + [50 + speaker + i for i in range(20)] for speaker in range(3)]
DEVICE = ("--kv-tokens", "128", "--page-size", "4")  # one conversation at its end, not two
HOST = ("--host-kv-memory", "2MiB")


def speak(connection: Connection, speaker: int, history: list[int]) -> tuple[list[int], int]:
    """A turn: the answer's tokens and how many of the prompt's were cached. Every second speaker is sampled."""
    params = SamplingParams(temperature=0.9 * (speaker % 2), seed=speaker, max_tokens=TOKENS, ignore_eos=True)
    rid = connection.submit(history, params)
    answer = collect(connection, [rid])[rid]
    return list(answer.token_ids), answer.cached_tokens


def converse(cluster: Cluster, *, lose_workers_after: int | None = None) -> tuple[list[list[int]], list[list[int]]]:
    """Everybody in turn, TURNS times: what was said, and what was cached, by speaker."""
    histories = [list(prompt) for prompt in PROMPTS]
    cached: list[list[int]] = [[] for _ in PROMPTS]
    with cluster.connect() as connection:
        for turn in range(TURNS):
            for speaker, history in enumerate(histories):
                tokens, hits = speak(connection, speaker, history)
                history += [*tokens, 7 + turn]
                cached[speaker].append(hits)
            if turn == lose_workers_after:
                assert connection.stats()["scheduler.host_used_pages"] > 0
                os.kill(cluster.pid("worker-0"), signal.SIGKILL)
                wait_until(lambda: connection.stats()["scheduler.host_used_pages"] == 0, 60, lambda: cluster.log)
    cluster.remember()
    return histories, cached


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("m") / "llama")


@pytest.mark.parametrize(
    "flags",
    [("--dtype", "float32"), ("--dtype", "bfloat16", "--kv-cache-dtype", "int8", "--tp", "2")],
    ids=["float32", "int8 tp 2"],
)
def test_conversations_come_back_with_the_same_tokens(checkpoint: Path, flags: tuple[str, ...]) -> None:
    with running(checkpoint, *flags, *DEVICE) as cluster:
        said, cached = converse(cluster)
        assert cluster.check_idle()["scheduler.offloaded_pages"] == 0
        forgotten = sum(map(sum, cached))
    with running(checkpoint, *flags, *DEVICE, *HOST) as cluster:
        assert cluster.info["model"]["host_kv_tokens"] > 1000
        again, cached = converse(cluster)
        assert again == said
        for prompt, own in zip(PROMPTS, cached, strict=True):  # all but what the last answer ends with, and one token
            assert own == [0] + [len(prompt) + turn * (TOKENS + 1) - 2 for turn in range(1, TURNS)]
        values = cluster.check_idle()
        assert values["scheduler.cached_tokens"] == sum(map(sum, cached)) > forgotten
        assert 0 < values["scheduler.host_cached_tokens"] <= values["scheduler.cached_tokens"]
        moved = values["scheduler.offloaded_pages"] - values["scheduler.loaded_pages"]
        assert moved >= values["scheduler.host_used_pages"] > 0


def test_lost_workers_take_their_host_tiers_with_them(checkpoint: Path) -> None:
    flags = ("--dtype", "float32", "--tp", "2", *DEVICE)
    with running(checkpoint, *flags) as cluster:
        said, _ = converse(cluster)
    with running(checkpoint, *flags, *HOST) as cluster:
        again, cached = converse(cluster, lose_workers_after=0)
        assert again == said
        assert [own[1] for own in cached] == [0] * len(PROMPTS), "nothing was left after the first turn"
        assert all(own[2] > 60 for own in cached), "the second one came back"
        assert cluster.check_idle()["launcher.restarts.workers"] == 1


def test_a_tier_that_does_not_fit_is_refused_by_name(checkpoint: Path) -> None:
    for size, words in (("10B", "do not hold one page"), ("900TiB", "are too many")):
        with Cluster(checkpoint, *DEVICE, "--host-kv-memory", size) as cluster:
            assert cluster.process.wait(120) == 1
            assert "host_kv_memory" in cluster.log and words in cluster.log
