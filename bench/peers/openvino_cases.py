"""OpenVINO GenAI's continuous batching, in process: reads cases as JSON lines, answers each with a JSON line.

Run with the Python of an environment that has openvino-genai: `python openvino_cases.py MODEL_OV VOCABULARY`. The
model is converted before, with the dtype of the checkpoint: `optimum-cli export openvino --model M
--task text-generation-with-past MODEL_OV`.
"""

import sys

import numpy as np
import openvino
import openvino_genai as genai
from closed_loop import serve


class Engine:
    """A pipeline that is stepped by whoever waits for tokens."""

    def __init__(self, model):
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size, scheduler.enable_prefix_caching, scheduler.max_num_batched_tokens = 4, True, 512
        # on processors without instructions for bfloat16 it computes and caches in float32 only
        known = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        precision = "bf16" if "BF16" in known else "f32"
        properties = {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}
        self._pipe = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties=properties)
        self._handles = {}
        self._number = 0

    def add(self, prompt, output):
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos = output, True
        config.do_sample, config.apply_chat_template = False, False
        self._number += 1
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        self._handles[self._number] = self._pipe.add_request(self._number, ids, config)
        return self._number

    def poll(self):
        self._pipe.step()
        news = []
        for key, handle in list(self._handles.items()):
            while handle.can_read():
                news += [(key, len(out.generated_ids), False) for out in handle.read().values()]
            if handle.get_status() != genai.GenerationStatus.RUNNING:
                del self._handles[key]
                news.append((key, 0, True))
        return news


if __name__ == "__main__":
    engine = Engine(sys.argv[1])
    serve(openvino.__version__, int(sys.argv[2]), engine.add, engine.poll)
