"""Real clusters on Gemma 4 in the native decoder: layers of different heads, shared keys, inputs of tokens, experts."""

from pathlib import Path

import pytest

from common.sampling_params import SamplingParams
from tests.helpers_gemma4 import make_gemma4
from tests.helpers_gguf_gemma4 import write_gemma4_gguf
from tests.helpers_models import VOCAB_SIZE
from tests.helpers_paged import generate, make_prompts
from tests.integration.cluster import running
from tests.integration.test_cluster import collect
from tests.worker.test_cpu_build import needs_compiler
from tests.worker.test_hybrid_decoder import load_native
from worker_proc.gguf.directory import directory_for

pytestmark = needs_compiler
PROMPTS = make_prompts(VOCAB_SIZE)
COMMON = PROMPTS[4][:64]
ASKED = [COMMON + [token] * 5 + prompt for token, prompt in enumerate(PROMPTS, 5)]
PARAMS = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=40)
TIGHT = ("--chunk-tokens", "24", "--kv-tokens", "288", "--max-running", "4")  # for two of the requests
FLAGS = {
    "preempted": TIGHT,
    "speculating": ("--chunk-tokens", "24", "--kv-tokens", "4096", "--speculation", "ngram"),
    "host": (*TIGHT, "--host-kv-memory", "1MiB"),
}


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
@pytest.mark.parametrize("shape", ["all", "inputs"])
def test_answers_are_those_of_each_request_alone(shape: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    path = make_gemma4(shape, tmp_path / "model")
    model = load_native(path)
    wanted = [generate(model, [prompt], PARAMS.max_tokens)[0] for prompt in ASKED]
    with running(path, "--dtype", "bfloat16", *flags) as cluster, cluster.connect() as connection:
        for _ in ("a cold cache", "a warm one"):
            rids = [connection.submit(prompt, PARAMS) for prompt in ASKED]
            answers = collect(connection, rids)
            assert [answers[rid].token_ids for rid in rids] == wanted
        assert any(answers[rid].cached_tokens >= 48 for rid in rids)


def test_ranks_serve_a_file(tmp_path: Path) -> None:
    source = make_gemma4("all", tmp_path / "source", tie_word_embeddings=True)
    file = write_gemma4_gguf(source, tmp_path / "m.gguf", lambda name: "BF16")
    path = directory_for(file, tmp_path / "cache")
    flags = ("--dtype", "bfloat16", "--tp", "2", "--kv-tokens", "4096")
    with running(path, *flags) as cluster, cluster.connect() as connection:
        found = []
        for _ in ("a cold cache", "a warm one"):
            rids = [connection.submit(prompt, PARAMS) for prompt in ASKED]
            answers = collect(connection, rids)
            found.append([answers[rid].token_ids for rid in rids])
        assert found[0] == found[1]
        assert all(len(tokens) == PARAMS.max_tokens for tokens in found[0])
        assert [answers[rid].cached_tokens for rid in rids] == [len(ask) - 1 for ask in ASKED]
