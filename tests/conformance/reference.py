"""What lm-eval should get: log probabilities and greedy answers of the demo model, by transformers in float32."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class Reference:
    """A checkpoint on the CPU."""

    def __init__(self, model: Path):
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._start = self._tokenizer.eos_token_id  # what lm-eval puts before a text that has no context

    def loglikelihood(self, context: str, continuation: str) -> tuple[float, bool]:
        """The sum of the continuation's log probabilities, and whether each of its tokens is the likeliest one."""
        skipped = len(self._ids(context)) if context else 1
        ids = self._ids(context + continuation) if context else [self._start, *self._ids(continuation)]
        with torch.inference_mode():
            logprobs = self._model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        wanted = torch.tensor(ids[skipped:])
        rows = logprobs[skipped - 1 : -1]
        total = float(rows.gather(1, wanted[:, None]).sum())
        return total, bool((rows.argmax(-1) == wanted).all())

    def greedy(self, prompt: str, until: str, max_tokens: int) -> str:
        """The likeliest next tokens, cut before `until`."""
        ids = torch.tensor([self._ids(prompt)])
        out = self._model.generate(ids, max_new_tokens=max_tokens, do_sample=False)[0, ids.shape[1] :]
        text: str = self._tokenizer.decode(out, skip_special_tokens=True)
        return text.split(until)[0]

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids
