"""mini-sglang's and nano-vllm's offline benchmark through a real cluster: 256 prompts of 100 to 1024 random tokens,
100 to 1024 output tokens each, all handed in at once; output tokens per second.

    python -m bench.gpu.offline --model DIR --repeats 3 [--quantization int4] [--kv-cache-dtype int8]
"""

import random
import statistics
import time
from pathlib import Path

import click

from rhizome import LLM, SamplingParams

_SEED = 0


def workload(rng: random.Random, requests: int, shortest: int, longest: int) -> tuple[list[list[int]], list[int]]:
    """Prompts, and how many tokens each gets."""
    prompts = [[rng.randrange(3, 10_000) for _ in range(rng.randint(shortest, longest))] for _ in range(requests)]
    return prompts, [rng.randint(shortest, longest) for _ in range(requests)]


@click.command()
@click.option("--model", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--requests", default=256)
@click.option("--repeats", default=3)
@click.option("--shortest", default=100)
@click.option("--longest", default=1024)
@click.option("--quantization", default="auto")
@click.option("--kv-cache-dtype", default="auto")
def main(
    model: Path, requests: int, repeats: int, shortest: int, longest: int, quantization: str, kv_cache_dtype: str
) -> None:
    rng = random.Random(_SEED)
    rates = []
    # nobody waits for a single token: prompts come in steps as large as there are
    flags = {"quantization": quantization, "kv_cache_dtype": kv_cache_dtype}
    with LLM(model, max_running=requests, chunk_tokens=2048, chunk_slowdown=0, **flags) as llm:
        for repeat in range(repeats + 1):
            prompts, lengths = workload(rng, requests, shortest, longest)
            params = [
                SamplingParams(temperature=0.6, max_tokens=length, ignore_eos=True, seed=i)
                for i, length in enumerate(lengths)
            ]
            started = time.perf_counter()
            results = llm.generate(prompts, params, use_tqdm=False)
            taken = time.perf_counter() - started
            tokens = sum(len(result.outputs[0].token_ids) for result in results)
            if tokens != sum(p.max_tokens or 0 for p in params):
                raise click.ClickException(f"{tokens} tokens came, not as many as asked for")
            if repeat:  # the first round warms up
                rates.append(tokens / taken)
                print(f"  {tokens} tokens in {taken:.2f} s: {rates[-1]:,.0f} tok/s", flush=True)
    what = f"{quantization} weights, {kv_cache_dtype} cache"
    print(f"offline, {what}: median {statistics.median(rates):,.0f} output tok/s over {repeats} repeats")


if __name__ == "__main__":
    main()
