"""The workload of bench.gpu.offline through transformers' continuous batching, greedy, on the same GPU.

    python -m bench.gpu.offline_peer --model DIR --repeats 1

It has 24 GiB for its KV cache and steps of up to 2,048 tokens.
"""

import random
import statistics
import sys
import time
from pathlib import Path

import click

from bench.gpu.offline import workload

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peers"))  # which are scripts for other environments


@click.command()
@click.option("--model", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--requests", default=256)
@click.option("--repeats", default=1)
@click.option("--shortest", default=100)
@click.option("--longest", default=1024)
def main(model: Path, requests: int, repeats: int, shortest: int, longest: int) -> None:
    import transformers
    from transformers_cases import Engine

    rng, rates = random.Random(0), []
    engine = Engine(str(model), "cuda", 24 * 2**30, 2048)
    try:
        for repeat in range(repeats + 1):
            prompts, lengths = workload(rng, requests, shortest, longest)
            started, tokens, running = time.perf_counter(), 0, requests
            for prompt, length in zip(prompts, lengths, strict=True):
                engine.add(prompt, length)
            while running:
                for _, new, ended in engine.poll():
                    tokens += new
                    running -= ended
            taken = time.perf_counter() - started
            if tokens != sum(lengths):
                raise click.ClickException(f"{tokens} tokens came, not as many as asked for")
            print(f"  {tokens} tokens in {taken:.2f} s: {tokens / taken:,.0f} tok/s", flush=True)
            if repeat:  # the first round warms up
                rates.append(tokens / taken)
    finally:
        engine.stop()
    print(f"transformers {transformers.__version__}, offline: median {statistics.median(rates):,.0f} output tok/s")


if __name__ == "__main__":
    main()
