"""Steps of llama.cpp in its own process, for any GGUF file: prompts, and decodes of sequences.

    python bench/peers/llama_cpp_steps.py write FILE.gguf --layers 6     # a mixture in the shape of gpt-oss-20b
    python bench/peers/llama_cpp_steps.py quantize FILE.gguf OUT.gguf Q4_K_M     # as llama.cpp itself does
    python bench/peers/llama_cpp_steps.py run FILE.gguf --threads 2

Needs the packages llama-cpp-python, gguf, numpy and click, in an environment of its own. Weights that are written are
random, experts in MXFP4, the rest in bfloat16, as in bench/random_gpt_oss.py: what they are does not matter for the
time, as all of them are read and multiplied.
"""

import statistics
import time
from typing import Any

import click
import gguf
import llama_cpp
import numpy as np

HIDDEN, CHANNELS, EXPERTS, EACH, VOCABULARY = 2880, 2880, 32, 4, 201088
HEAD, HEADS, KV_HEADS = 64, 64, 8
_CONTEXT = 192
_KINDS = [name for name in dir(llama_cpp) if name.startswith("LLAMA_FTYPE_MOSTLY_")]
_RANDOM = np.random.default_rng(0)


@click.group()
def main() -> None:
    pass


@main.command()
@click.argument("file")
@click.option("--layers", default=24)
def write(file: str, layers: int) -> None:
    """A GGUF file without a vocabulary."""
    writer = gguf.GGUFWriter(file, "gpt-oss")
    writer.add_block_count(layers)
    writer.add_context_length(131072)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(CHANNELS)
    writer.add_expert_feed_forward_length(CHANNELS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(EACH)
    writer.add_sliding_window(128)
    writer.add_rope_freq_base(150000.0)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("none")

    def single(name: str, *shape: int) -> None:
        writer.add_tensor(name, _RANDOM.standard_normal(shape, dtype=np.float32) * np.float32(0.02))

    def half(name: str, *shape: int) -> None:
        bits = (_RANDOM.standard_normal(shape, dtype=np.float32) * np.float32(0.02)).view(np.uint32) >> 16
        raw = bits.astype(np.uint16).view(np.uint8).reshape(*shape[:-1], 2 * shape[-1])
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)

    def fp4(name: str, outputs: int, inputs: int) -> None:
        blocks = _RANDOM.integers(0, 256, (EXPERTS, outputs, inputs // 32, 17), dtype=np.uint8)
        blocks[..., 0] = _RANDOM.integers(119, 122, blocks.shape[:-1])  # the exponent of the scale
        raw = blocks.reshape(EXPERTS, outputs, inputs // 32 * 17)
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.MXFP4)

    half("token_embd.weight", VOCABULARY, HIDDEN)
    single("output_norm.weight", HIDDEN)
    half("output.weight", VOCABULARY, HIDDEN)
    for layer in range(layers):
        base = f"blk.{layer}."
        single(base + "attn_norm.weight", HIDDEN)
        single(base + "post_attention_norm.weight", HIDDEN)
        single(base + "attn_sinks.weight", HEADS)
        shapes = {"q": (HEADS * HEAD, HIDDEN), "k": (KV_HEADS * HEAD, HIDDEN), "v": (KV_HEADS * HEAD, HIDDEN)}
        for name, (outputs, inputs) in (shapes | {"output": (HIDDEN, HEADS * HEAD)}).items():
            half(base + f"attn_{name}.weight", outputs, inputs)
            single(base + f"attn_{name}.bias", outputs)
        single(base + "ffn_gate_inp.weight", EXPERTS, HIDDEN)
        single(base + "ffn_gate_inp.bias", EXPERTS)
        for name in ("gate", "up", "down"):
            fp4(base + f"ffn_{name}_exps.weight", CHANNELS, HIDDEN)  # as large the other way round
            single(base + f"ffn_{name}_exps.bias", EXPERTS, CHANNELS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@main.command()
@click.argument("file")
@click.argument("out")
@click.argument("kind", type=click.Choice([name[len("LLAMA_FTYPE_MOSTLY_") :] for name in _KINDS]))
def quantize(file: str, out: str, kind: str) -> None:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    if llama_cpp.llama_model_quantize(file.encode(), out.encode(), params):
        raise click.ClickException("llama_model_quantize failed")


@main.command()
@click.argument("file")
@click.option("--threads", default=2)
@click.option("--repeats", default=7)
def run(file: str, threads: int, repeats: int) -> None:
    """Medians in milliseconds."""
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(file.encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 65536, 2048, 512, 32
    params.n_threads = params.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, params)
    memory = llama_cpp.llama_get_memory(context)
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def step(tokens: int, positions: list[int], sequences: list[int], first_logits: int) -> float:
        return decode(context, _RANDOM.integers(0, vocabulary, tokens).tolist(), positions, sequences, first_logits)

    for tokens in (128, 1024):
        times = []
        for _ in range(3):
            llama_cpp.llama_memory_clear(memory, True)
            times.append(step(tokens, list(range(tokens)), [0] * tokens, tokens - 1))
        print(f"prompt of {tokens}: {statistics.median(times) * 1e3:.0f} ms", flush=True)
    llama_cpp.llama_memory_clear(memory, True)
    for sequence in range(32):
        step(_CONTEXT, list(range(_CONTEXT)), [sequence] * _CONTEXT, _CONTEXT - 1)
    lengths = [_CONTEXT] * 32
    for rows in (1, 2, 4, 8, 16, 32):
        times = []
        for _ in range(repeats + 1):
            times.append(step(rows, lengths[:rows], list(range(rows)), 0))
            for sequence in range(rows):  # recurrent states cannot take a token back: there sequences grow
                removed = llama_cpp.llama_memory_seq_rm(memory, sequence, _CONTEXT, -1)
                lengths[sequence] += not removed
        print(f"decode of {rows}: {statistics.median(times[1:]) * 1e3:.1f} ms", flush=True)


def decode(context: Any, tokens: list[int], positions: list[int], sequences: list[int], first_logits: int) -> float:
    """Seconds of a step, with logits from `first_logits` on."""
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, positions[i], 1
        batch.seq_id[i][0], batch.logits[i] = sequences[i], i >= first_logits
    started = time.perf_counter()
    if llama_cpp.llama_decode(context, batch):
        raise RuntimeError("llama_decode failed")
    llama_cpp.llama_synchronize(context)
    took = time.perf_counter() - started
    llama_cpp.llama_batch_free(batch)
    return took


if __name__ == "__main__":
    main()
