"""OpenVINO GenAI's continuous batching, in process: reads cases as JSON lines, answers each with a JSON line.

Run with the Python of an environment that has openvino-genai: `python openvino_cases.py MODEL_OV VOCABULARY`. The
model is converted before, with the dtype of the checkpoint: `optimum-cli export openvino --model M
--task text-generation-with-past MODEL_OV`.
"""

import json
import random
import sys
import time

import numpy as np
import openvino
import openvino_genai as genai


def run(pipe, case, draw):
    """One closed loop of greedy requests of exact lengths; times in ms as a client in this process sees them."""
    prefix = draw(case["prefix"])
    waiting = [prefix + draw(case["input"]) for _ in range(case["requests"])]
    tokens_in = sum(map(len, waiting))
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos = case["output"], True
    config.do_sample, config.apply_chat_template = False, False
    running, ttft, gaps, output = {}, [], [], 0
    started = time.perf_counter()
    number = 0
    while waiting or running:
        while waiting and len(running) < case["concurrency"]:
            number += 1
            ids = openvino.Tensor(np.array([waiting.pop(0)], dtype=np.int64))
            running[number] = [pipe.add_request(number, ids, config), time.perf_counter(), True]
        pipe.step()
        now = time.perf_counter()
        for key, state in list(running.items()):
            handle, before, first = state
            while handle.can_read():
                for out in handle.read().values():
                    output += len(out.generated_ids)
                    (ttft if first else gaps).append(1e3 * (now - before))
                    before, first = now, False
            state[1:] = before, first
            if handle.get_status() != genai.GenerationStatus.RUNNING:
                del running[key]
    seconds = time.perf_counter() - started
    ttft.sort()
    gaps.sort()
    return {
        "output_tokens_per_s": output / seconds,
        "total_tokens_per_s": (output + tokens_in) / seconds,
        "ttft_ms": ttft[len(ttft) // 2],
        "itl_p99_ms": gaps[int(0.99 * (len(gaps) - 1))],
        "completed": case["requests"],
        "output_tokens": output,
    }


def main(model, vocabulary):
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.enable_prefix_caching, scheduler.max_num_batched_tokens = 4, True, 512
    properties = {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"}
    started = time.perf_counter()
    pipe = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties=properties)
    print(json.dumps({"start_s": time.perf_counter() - started, "version": openvino.__version__}), flush=True)
    rng = random.Random(time.time_ns())  # no cache knows the prompts
    for line in sys.stdin:
        answer = run(pipe, json.loads(line), lambda n: [rng.randrange(16, vocabulary) for _ in range(n)])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
