"""Hugging Face transformers' continuous batching, in process: reads cases as JSON lines, answers each with a JSON line.

Run with the Python of an environment that has transformers 5: `python transformers_cases.py MODEL VOCABULARY THREADS`.
Its manager computes in a thread of its own and streams tokens through a queue.
"""

import queue
import sys

import torch
import transformers
from closed_loop import serve
from transformers.generation import ContinuousBatchingConfig, GenerationConfig

KV_BYTES = 2 * 2**30
PAGE = 256  # tokens; its default
BATCH_TOKENS = 512
PATIENCE_S = 300.0


class Engine:
    """A running manager with a KV cache of KV_BYTES."""

    def __init__(self, path):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.bfloat16, attn_implementation="sdpa", local_files_only=True
        )
        config = model.config
        heads = config.num_key_value_heads * (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        page_bytes = 2 * 2 * config.num_hidden_layers * heads * PAGE
        self._manager = model.init_continuous_batching(
            GenerationConfig(do_sample=False, eos_token_id=-1),
            ContinuousBatchingConfig(
                page_size=PAGE, num_blocks=KV_BYTES // page_bytes, max_batch_tokens=BATCH_TOKENS,
                allow_block_sharing=True,
            ),
        )  # fmt: skip
        self._manager.warmup()
        self._manager.start()
        self._seen = {}

    def add(self, prompt, output):
        key = self._manager.add_request(prompt, max_new_tokens=output, streaming=True)
        if key is None:
            raise RuntimeError("the manager takes no requests any more")
        self._seen[key] = 0
        return key

    def poll(self):
        results = [self._manager.get_result(timeout=PATIENCE_S)]
        while results[-1] is not None and (more := self._at_hand()) is not None:
            results.append(more)
        if results[0] is None:
            raise RuntimeError("the manager has stopped")
        return [self._news(result) for result in results]

    def _at_hand(self):
        try:
            return self._manager.output_router.output_queue.get_nowait()
        except queue.Empty:
            return None

    def _news(self, result):
        if result.error is not None:
            raise RuntimeError(result.error)
        new = len(result.generated_tokens) - self._seen[result.request_id]
        self._seen[result.request_id] += new
        ended = result.is_finished()
        if ended:
            del self._seen[result.request_id]
        return result.request_id, new, ended

    def stop(self):
        self._manager.stop(block=True, timeout=10, hard_stop=True)


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[3]))
    engine = Engine(sys.argv[1])
    try:
        serve(transformers.__version__, int(sys.argv[2]), engine.add, engine.poll)
    finally:
        engine.stop()
