"""Real clusters on multimodal checkpoints: text as the whole model answers it, and no images."""

from pathlib import Path

import httpx
import pytest

from common.sampling_params import SamplingParams
from tests.helpers_models import VOCAB_SIZE
from tests.helpers_multimodal import greedy_of_whole, make_multimodal
from tests.helpers_paged import make_prompts
from tests.integration.cluster import running
from tests.integration.test_cluster import collect

PROMPTS = [[token for token in prompt if token != 3] for prompt in make_prompts(VOCAB_SIZE)]  # 3 stands for an image
PARAMS = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=20)
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
SMALL = ("--chunk-tokens", "16", "--kv-tokens", "4096")


@pytest.mark.parametrize(
    ("kind", "flags"),
    [("mistral3", ("--tp", "2")), ("gemma4", ("--host-kv-memory", "1MiB")), ("llama4", ("--page-size", "8"))],
    ids=["native", "mixed", "chunked"],
)
def test_text_is_answered_and_images_are_refused(kind: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    path = make_multimodal(kind, tmp_path / kind)
    expected = greedy_of_whole(path, PROMPTS, PARAMS.max_tokens)
    with running(path, "--dtype", "float32", "--port", "0", *SMALL, *flags) as cluster:
        with cluster.connect() as connection:
            for _ in ("a cold cache", "a warm one"):
                rids = [connection.submit(prompt, PARAMS) for prompt in PROMPTS]
                answers = collect(connection, rids)
                assert [answers[rid].token_ids for rid in rids] == expected
            assert [answers[rid].cached_tokens for rid in rids] == [len(prompt) - 1 for prompt in PROMPTS]
        url = cluster.info["addresses"]["http"] + "/v1/chat/completions"
        content = [{"type": "text", "text": "what is it?"}, IMAGE]
        body = {"model": kind, "messages": [{"role": "user", "content": content}], "max_tokens": 4}
        answer = httpx.post(url, json=body, timeout=60)
        assert answer.status_code == 400 and "image_url" in answer.text
        body["messages"] = [{"role": "user", "content": content[:1]}]
        answer = httpx.post(url, json=body, timeout=60)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] > 0
