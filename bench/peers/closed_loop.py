"""What the drivers of systems in process share: the closed loop, its figures, and JSON lines in and out.

The drivers run in other systems' environments, so this needs nothing but Python's own library.
"""

import json
import random
import sys
import time


def closed_loop(case, draw, add, poll, clock=time.perf_counter):
    """Greedy requests of exact lengths, `concurrency` of them at a time; times in ms as a client in this process sees
    them. `draw(n)` gives n token ids, `add(prompt, output)` the key of a new request, and `poll()` waits for tokens:
    (key, how many new ones, whether it has ended) of each request that got some."""
    prefix = draw(case["prefix"])
    waiting = [prefix + draw(case["input"]) for _ in range(case["requests"])]
    tokens_in = sum(map(len, waiting))
    running, ttft, gaps, output = {}, [], [], 0
    started = clock()
    while waiting or running:
        while waiting and len(running) < case["concurrency"]:
            key = add(waiting.pop(0), case["output"])
            running[key] = clock(), True
        news = poll()
        now = clock()
        for key, tokens, ended in news:
            if tokens:
                before, first = running[key]
                (ttft if first else gaps).append(1e3 * (now - before))
                running[key] = now, False
                output += tokens
            if ended:
                del running[key]
    seconds = clock() - started
    return {
        "output_tokens_per_s": output / seconds,
        "total_tokens_per_s": (output + tokens_in) / seconds,
        "ttft_ms": percentile(ttft, 50),
        "itl_p99_ms": percentile(gaps, 99),
        "itl_max_ms": max(gaps),
        "completed": case["requests"],
        "output_tokens": output,
    }


def percentile(values, percent):
    """As client_cli/bench_metrics.py has it, which measures the systems beside: linear between the closest ranks."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low, high = int(at), min(int(at) + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def serve(version, vocabulary, add, poll):
    """Say that the system is ready, then answer each case on standard input by its figures."""
    print(json.dumps({"version": version}), flush=True)
    rng = random.Random(time.time_ns())  # no cache knows the prompts
    for line in sys.stdin:
        figures = closed_loop(json.loads(line), lambda n: [rng.randrange(16, vocabulary) for _ in range(n)], add, poll)
        print(json.dumps(figures), flush=True)
