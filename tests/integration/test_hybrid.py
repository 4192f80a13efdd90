"""Real clusters on models with recurrent layers: prompts start from snapshots, and answers stay what they are."""

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from common.answer import Answer
from common.messages import Finish
from common.rows import Row
from common.sampling_params import SamplingParams
from tests.helpers_hybrid import make_hybrid
from tests.helpers_models import VOCAB_SIZE, greedy
from tests.helpers_paged import generate, make_prompts
from tests.integration.cluster import START_S, Cluster, running
from tests.integration.test_cluster import collect
from tests.worker.test_cpu_build import needs_compiler
from tests.worker.test_hybrid_decoder import load_native
from worker_proc.models.interface import LanguageModel

PROMPTS = make_prompts(VOCAB_SIZE)
COMMON = PROMPTS[4][:64]
Greedy = Callable[[list[list[int]], int], list[list[int]]]  # prompts, and how many tokens to answer each with
PARAMS = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=24)
FLAGS = ("--chunk-tokens", "24", "--kv-tokens", "4096")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hybrid("qwen3_5_text", tmp_path_factory.mktemp("m") / "model")


# in float32 through transformers, in bfloat16 by the native decoder
KINDS = [
    ("qwen3_5_text", "float32", 1),
    ("qwen3_5_text", "float32", 2),
    pytest.param(("qwen3_5_text", "bfloat16", 1), marks=needs_compiler),
    pytest.param(("granitemoehybrid", "bfloat16", 1), marks=needs_compiler),
]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: "{} {} tp {}".format(*kind))
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Cluster, Greedy]]:
    """A cluster, and what it is to answer."""
    kind, dtype, ranks = request.param
    checkpoint = make_hybrid(kind, tmp_path_factory.mktemp("m") / "model")
    with running(checkpoint, *FLAGS, "--dtype", dtype, "--tp", str(ranks)) as cluster:
        yield cluster, partial(greedy, checkpoint) if dtype == "float32" else partial(alone, load_native(checkpoint))


def alone(model: LanguageModel, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Each prompt by itself."""
    return [generate(model, [prompt], new_tokens)[0] for prompt in prompts]


def test_a_common_beginning_is_computed_twice_and_then_started_from(served: tuple[Cluster, Greedy]) -> None:
    cluster, wants = served
    prompts = [COMMON + [token] * 5 + PROMPTS[2] for token in (5, 6, 7)]
    wanted, cached = wants(prompts, PARAMS.max_tokens), []
    with cluster.connect() as connection:
        for prompt, tokens in zip(prompts, wanted, strict=True):
            rid = connection.submit(prompt, PARAMS)
            answer = collect(connection, [rid])[rid]
            assert answer.token_ids == tokens
            cached.append(answer.cached_tokens)
    assert cached == [0, 0, 64]
    stats = cluster.stats()
    saved = 1 + 2 + 1  # at 80 tokens; at 64, and 96 in its answer; at 96
    assert stats["scheduler.saved_snapshots"] == saved and stats["scheduler.loaded_snapshots"] == 1


def test_the_same_prompts_again_compute_at_most_a_page_and_four_tokens(served: tuple[Cluster, Greedy]) -> None:
    cluster, wants = served
    prompts = [[9] * 5 + prompt for prompt in PROMPTS]
    wanted = wants(prompts, PARAMS.max_tokens)
    with cluster.connect() as connection:
        for expected in ([0] * len(prompts), [(len(prompt) - 5) // 16 * 16 for prompt in prompts]):
            rids = [connection.submit(prompt, PARAMS) for prompt in prompts]
            answers = collect(connection, rids)
            assert [answers[rid].token_ids for rid in rids] == wanted
            short = [0 if count < 32 else count for count in expected]  # for less, no snapshot is taken
            assert [answers[rid].cached_tokens for rid in rids] == short


def test_streams_survive_their_worker(served: tuple[Cluster, Greedy]) -> None:
    cluster, wants = served
    prompts = [COMMON + [20 + i] + PROMPTS[i % 3] for i in range(8)]
    wanted = wants(prompts, 100)
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=100)
    with cluster.connect() as connection:
        answers = {connection.submit(prompt, params): Answer() for prompt in prompts}
        left, killed = set(answers), False
        while left:
            for row in connection.poll(1):
                assert isinstance(row, Row), row
                answers[row.rid].add(row)
                if row.finish is not Finish.NONE:
                    left.remove(row.rid)
            if not killed and sum(len(answer.token_ids) for answer in answers.values()) > 100:
                os.kill(cluster.pid("worker-0"), signal.SIGKILL)
                killed = True
        assert killed and [answer.token_ids for answer in answers.values()] == wanted


def test_requests_are_preempted_on_all_ranks(checkpoint: Path) -> None:
    """A cache that does not hold two of eight requests to their end, with chunks and snapshots."""
    prompts, count = [COMMON[:40] + [token] + PROMPTS[2] for token in range(5, 13)], 100
    flags = ("--dtype", "float32", "--chunk-tokens", "9", "--kv-tokens", "240", "--page-size", "4")
    flags += ("--max-running", "4", "--tp", "2")
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=count)
    with running(checkpoint, *flags) as cluster:
        with cluster.connect() as connection:
            rids = [connection.submit(prompt, params) for prompt in prompts]
            answers = collect(connection, rids)
        assert [answers[rid].token_ids for rid in rids] == greedy(checkpoint, prompts, count)
        stats = cluster.stats()
        assert stats["scheduler.preempted"] > 0 and stats["scheduler.loaded_snapshots"] > 0


@pytest.mark.parametrize(
    ("kind", "ranks"), [("lfm2", "1"), ("granitemoehybrid", "1"), ("lfm2_moe", "2"), ("granitemoehybrid", "2")]
)
def test_other_kinds_in_bfloat16(kind: str, ranks: str, tmp_path: Path) -> None:
    """The precision in which they are served by default on CPUs: tokens may differ in few places from those of float32,
    not from run to run."""
    path = make_hybrid(kind, tmp_path)
    flags = ("--dtype", "bfloat16", "--kv-tokens", "4096", "--max-running", "4", "--tp", ranks)
    with running(path, *flags) as cluster:
        with cluster.connect() as connection:
            rids = [connection.submit(prompt, PARAMS) for prompt in PROMPTS * 3]
            answers = collect(connection, rids)
        assert all(len(answer.token_ids) == PARAMS.max_tokens for answer in answers.values())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--tp", "3"), "linear_num_key_heads = 2: cannot be split over tp = 3 ranks"),
        (("--speculation", "ngram"), "cannot take back tokens"),
        (("--host-kv-memory", "1MiB"), "host_kv_memory"),
        (("--kv-memory", "64KiB"), "what the recurrent layers keep"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_what_does_not_go_together_is_refused_by_name(checkpoint: Path, flags: tuple[str, ...], words: str) -> None:
    with Cluster(checkpoint, *flags) as cluster:
        assert cluster.process.wait(START_S) == 1 and words in cluster.log
