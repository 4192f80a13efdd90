"""Speculation on a real cluster: the tokens of a cluster without it, with one rank and with two."""

import pytest

from common.messages import ints
from common.sampling_params import SamplingParams
from tests.helpers_models import VOCAB_SIZE, make_checkpoint
from tests.integration.cluster import running
from tests.integration.test_sampling import ask_all
from tests.worker.test_cpu_build import needs_compiler

PASSAGE = [(7 * i + i * i) % (VOCAB_SIZE - 10) + 5 for i in range(13)]


def requests() -> list[tuple[list[int], SamplingParams, dict[str, int]]]:
    """Loops, a few tokens at random, free text, and requests that cannot have guesses, with n answers and stops."""
    asked = []
    for i in range(9):
        values = [
            {"temperature": 0.0, "logit_bias": {20 + i: 50.0}},
            {"temperature": 0.0},
            {"temperature": 1.0, "seed": i, "logit_bias": {30: 50.0, 31: 50.0}, "logprobs": 2},
            {"temperature": 0.8, "seed": i, "top_p": 0.9},
            {"temperature": 0.0, "repetition_penalty": 1.2, "logprobs": 0},
            {"temperature": 0.0, "logit_bias": {25: 50.0, 26: 49.9}, "stop_token_ids": ints(26)},
            {"temperature": 0.0, "allowed_token_ids": ints(40, 41)},
            {"temperature": 0.0, "bad_words": ("e", "in the")},
        ][i % 8]
        params = SamplingParams(**({"max_tokens": 60 + i, "ignore_eos": True} | values))
        asked.append((PASSAGE * 2 + PASSAGE[: 1 + i], params, {"n": 1 + i % 2}))
    return asked


@needs_compiler
@pytest.mark.parametrize("tp", [1, 2])
def test_tokens_are_those_of_a_cluster_without_speculation(tmp_path, tp):
    """In bfloat16, where a token's bits depend on nothing but its context. How much is guessed where that has to pay
    depends on measured times."""
    flags = (
        "--tp",
        str(tp),
        "--dtype",
        "bfloat16",
        "--device",
        "cpu",
        "--kv-tokens",
        "800",
        "--page-size",
        "4",
        "--max-running",
        "8",
    )
    model = make_checkpoint("llama", tmp_path / "llama")
    found = []
    for how in ("off", "ngram-always", "ngram"):
        with running(model, *flags, "--speculation", how) as cluster, cluster.connect() as connection:
            answers = ask_all(connection, requests())
            stats = connection.stats()
            found.append([[(got.token_ids, got.text, got.end) for got in choices] for choices in answers])
            assert (stats["scheduler.draft_tokens"] == 0) or how != "off"
            assert (stats["scheduler.accepted_tokens"] > 100) or how != "ngram-always"
    assert found[0] == found[1] == found[2]
