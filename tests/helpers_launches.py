"""Which kernels Triton would compile for steps of all kinds, found out without a GPU.

    python -m tests.helpers_launches kernels
    python -m tests.helpers_launches workers [--cold]

Steps on a CPU's tensors, whose launches go no further than Triton's own look at their arguments. `kernels`: first steps
with which a worker could begin, then many others, with other numbers of rows and pages and at addresses that are no
multiples of 16. `workers`: several configurations, each made ready as the worker makes it, then requests of all kinds
through a scheduler; what is in the results is arbitrary. Whatever those would have compiled that the first did not is
printed, and makes the exit status 1; with `--cold`, a worker is not warmed up. Triton's interpreter must be off.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from bench.gpu.compile_kernels import HOPPER
from bench.gpu.compiles import Case, make_decoder, make_runner, serve
from bench.gpu.shapes import random_weights
from worker_proc.attention.interface import TILE_COLUMNS, AttentionBackend, SharedPages
from worker_proc.cuda import overlap
from worker_proc.cuda.attention import TritonAttention, decode, prefill, store
from worker_proc.cuda.layers import Rotation, add_rms_norm, rope_store, silu_mul
from worker_proc.cuda.pieces import Outputs
from worker_proc.cuda.quantized import PackedWeight
from worker_proc.cuda.sampling import draw, make_weights
from worker_proc.kv_cache import KVCache, KVSpec
from worker_proc.models.decoder import Decoder
from worker_proc.models.decoder_layout import Shard
from worker_proc.models.decoder_weights import MlpWeights
from worker_proc.models.families import parse_spec
from worker_proc.models.interface import LanguageModel
from worker_proc.models.layers import Linear, RMSNorm
from worker_proc.models.paged_call import ATTENTION_NAME
from worker_proc.models.transformers_backend import TransformersModel
from worker_proc.parallel import TensorParallel
from worker_proc.quantization.scheme import MXFP4, Scheme
from worker_proc.shared_pages import max_tiles

HEADS, KV_HEADS, DIM, PAGE, INPUTS, VOCAB, SLOTS = 16, 8, 64, 16, 4096, 1000, 300
seen: dict[str, str] = {}  # by what Triton tells kernels apart; the step that was the first
launched: set[str] = set()  # names
missing: set[str] = set()


def count_launches(step: list[str]) -> None:
    """From now on kernels are not run but noted, with `step[0]`."""
    backend, binders = make_backend(HOPPER), {}
    overlap.possible = lambda device: True  # as on that GPU

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if self not in binders:
            binders[self] = create_function_from_signature(self.signature, self.params, backend)
        _, specialization, options = binders[self](*args, **options)
        names = [param.name for param in self.params]
        facts = [f"{name}={kind}" for name, kind in zip(names, specialization, strict=True)]
        launched.add(self.fn.__name__)
        seen.setdefault(f"{self.fn.__name__} {' '.join(facts)} {options}", step[0])

    JITFunction.run = run


def numbers(count: int, odd: bool) -> Tensor:
    """int64 zeros, as part of what is sent to a GPU in one piece."""
    return torch.zeros(count + 1, dtype=torch.int64)[int(odd) :][:count]


def attend(rows: int, columns: int, odd: bool, cache: KVCache) -> None:
    """Chunks of two tokens, and decodes with shared pages and without."""
    tokens = 2 * rows
    qkv = torch.zeros(tokens, HEADS + 2 * KV_HEADS, DIM, dtype=cache.spec.dtype)
    norm = RMSNorm(torch.ones(DIM, dtype=cache.spec.dtype), 1e-6)
    rotation = Rotation(torch.zeros(DIM // 2), 1.0)
    q = rope_store(qkv, HEADS, cache, 0, numbers(tokens, odd), numbers(tokens, odd), rotation, norm, norm)
    store(qkv[:, :KV_HEADS], qkv[:, KV_HEADS : 2 * KV_HEADS], numbers(tokens, odd), cache, 0)
    table, lengths = numbers(rows * columns, odd).view(rows, columns), numbers(rows, odd)
    out = torch.empty_like(q)
    tiles = numbers(max_tiles(rows) * TILE_COLUMNS, odd).view(-1, TILE_COLUMNS)
    shared = SharedPages(numbers(rows, odd), numbers(rows, odd), tiles)
    for sinks in (None, torch.zeros(HEADS + 1)[int(odd) :][:HEADS]):
        limits = (cache, 0, 1.0, None, None, sinks)
        prefill(q, out, table, lengths, numbers(rows + 1, odd), 2, *limits)
        decode(q[rows:], out[rows:], table, lengths, *limits)
        decode(q[rows:], out[rows:], table, lengths, *limits, shared)


def compute(rows: int, odd: bool, weights: list[PackedWeight]) -> None:
    x = torch.zeros(rows, INPUTS, dtype=torch.bfloat16)
    add_rms_norm(x, x, RMSNorm(x[0], 1e-6))
    silu_mul(x)
    for weight in weights:
        weight.linear(x, None)
    logits, params = torch.zeros(rows, VOCAB), torch.zeros(4, SLOTS, dtype=torch.float64)
    index, tokens = numbers(3 * rows, odd).view(3, rows), torch.zeros(rows, dtype=torch.int64)
    draw(make_weights(logits, logits[:, 0].clone(), params, index), params, params[0].long(), index, tokens)


def kernels(step: list[str]) -> None:
    caches = [KVCache(KVSpec.uniform(1, KV_HEADS, DIM, DIM, torch.bfloat16, int8), 2, PAGE) for int8 in (False, True)]
    device = torch.device("cpu")
    weights = [PackedWeight.empty(700, INPUTS, Scheme(bits), torch.bfloat16, device) for bits in (4, 8)]
    weights.append(PackedWeight.empty(700, INPUTS, MXFP4, torch.bfloat16, device))
    sizes = [(rows, 256) for rows in (1, 2, 4, 8, 16, 32, 64, 256)] + [(1, 1), (1, 33), (16, 33)]
    for (rows, columns), cache in product(sizes, caches):
        attend(rows, columns, False, cache)
    for rows in (1, 17, 33, 64, 65, 4096):
        compute(rows, False, weights)
    first = set(seen)
    for rows, columns, odd, cache in product((1, 3, 5, 16, 17, 41, 96, 240), (1, 2, 16, 33, 100), (0, 1), caches):
        step[0] = f"{rows} rows, {columns} pages, {'odd' if odd else 'even'} addresses"
        attend(rows, columns, bool(odd), cache)
    for rows, odd in product((1, 2, 16, 31, 48, 100, 512, 1000), (False, True)):
        step[0] = f"{rows} rows, {'odd' if odd else 'even'} addresses"
        compute(rows, odd, weights)
    report(first)


def run_again(step: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
    """A graph's stand-in, which launches nothing when it is replayed."""
    return lambda: None, step()


def workers(step: list[str], *, cold: bool) -> None:
    llama = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1003, "hidden_size": 576,
        "intermediate_size": 1088, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu",
    }  # fmt: skip
    plain = parse_spec(llama)
    qwen = parse_spec(llama | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 64})
    window = replace(plain, windows=(None, 100))
    experts = {"head_dim": 64, "sliding_window": 100, "num_local_experts": 4, "num_experts_per_tok": 2}
    gpt_oss = parse_spec(llama | {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]} | experts)
    cases = {
        "plain": Case(plain),
        "without graphs, int8 cache": Case(qwen, graphs=False, int8_kv=True, max_running=100),
        "4 bits, bias, windows": Case(
            window, Scheme(4, 64), bias=True, max_running=5, max_batch_tokens=2048, graphs=False
        ),
        "8 bits, one KV head": Case(replace(plain, num_kv_heads=1), Scheme(8), page_size=5, context_len=700),
        "short": Case(plain, max_running=1, max_batch_tokens=64, context_len=64, graphs=False),
        "sinks, windows, experts in FP4": Case(gpt_oss, max_batch_tokens=256, context_len=1024),
        "gpt2": Case(plain, context_len=512),
        "gemma2": Case(plain, context_len=512),
    }
    for name, case in list(cases.items())[: 1 if cold else None]:
        seen.clear()
        step[0] = f"{name}: start"
        runner = make_runner(*model_of(name, case), case, "cpu", run_again, ahead=not cold)
        first, step[0] = set(seen), name
        launched.clear()
        steps = serve(runner, case, 60)
        print(f"{name}: {steps} steps with", *sorted(launched))
        report(first)


def make_mixture(case: Case) -> Decoder:
    """Layers by torch with sinks, biases, and experts in FP4."""
    spec, weights = case.spec, random_weights(case.spec, device="cpu")
    assert spec.mixture is not None
    hidden, inner, experts = spec.hidden_size, spec.intermediate_size, spec.mixture.experts

    def linear(outputs: int, inputs: int, scheme: Scheme | None = None) -> Linear:
        cpu, dtype = torch.device("cpu"), torch.bfloat16
        weight = PackedWeight.empty(outputs, inputs, scheme, dtype, cpu) if scheme else torch.randn(outputs, inputs)
        return Linear(weight if scheme else weight.to(dtype), torch.zeros(outputs, dtype=dtype))

    mlp = MlpWeights(linear(2 * inner, hidden, MXFP4), linear(hidden, inner, MXFP4))
    others = {"router": linear(experts, hidden), "experts": (mlp,) * experts, "sinks": torch.zeros(spec.num_heads)}
    layers = tuple(replace(layer, up=mlp.up, down=mlp.down, **others) for layer in weights.layers)
    shard = Shard.of(spec, 0, 1)
    return Decoder(spec, shard, replace(weights, layers=layers), TensorParallel(), TritonAttention())


def model_of(name: str, case: Case) -> tuple[LanguageModel, AttentionBackend]:
    if case.spec.mixture is not None:
        mixture = make_mixture(case)
        return mixture, mixture.attention
    if name not in CONFIG_MAPPING:
        decoder = make_decoder(case, "cpu")
        return decoder, decoder.attention
    tiny = {"vocab_size": 1003, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "eos_token_id": 2}
    if name == "gemma2":
        tiny |= {"head_dim": 16, "intermediate_size": 128, "num_key_value_heads": 2, "sliding_window": 40}
    config = CONFIG_MAPPING[name](**tiny, bos_token_id=1)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME)
    attention = TritonAttention()
    return TransformersModel(made.eval(), attention), attention


def report(first: set[str]) -> None:
    later = set(seen) - first
    print(f"{len(first)} kernels at first, {len(later)} more", *(f"{seen[key]}: {key}" for key in later), sep="\n")
    missing.update(later)


def skip_products(rows: int = 8) -> None:
    """Products of many rows are zeros: nobody reads what comes of their layers, and they were most of the time."""
    linear = F.linear

    def skipped(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.numel() <= rows * x.shape[-1]:
            return linear(x, weight, bias)
        return x.new_zeros(*x.shape[:-1], weight.shape[0])

    F.linear = skipped


def main() -> None:
    step = [""]
    torch.set_num_threads(1)  # tests have other cores for other work
    skip_products()
    count_launches(step)
    if sys.argv[1] == "kernels":
        kernels(step)
    else:
        workers(step, cold="--cold" in sys.argv)
    sys.exit(bool(missing))


if __name__ == "__main__":
    main()
