"""The structs of native/decoder.h."""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from typing import Final

from worker_proc.cpu.linear import MatrixStruct


class LayerStruct(ctypes.Structure):
    """`DecoderLayer` of native/decoder.h."""

    _fields_ = (
        *((name, MatrixStruct) for name in ("qkv", "o", "gate_up", "down", "router")),
        *((name, c_void_p) for name in ("expert_gate_ups", "expert_downs", "delta")),
        ("gates", MatrixStruct),
        *((name, c_void_p) for name in ("conv", "space", "choice_bias")),
        *((name, c_void_p) for name in ("input_norm", "post_norm", "attention_norm", "mlp_norm")),
        *((name, c_void_p) for name in ("router_norm", "experts_norm", "beside_norm", "made_norm", "expert_scales")),
        *((name, c_void_p) for name in ("q_norm", "k_norm", "v_norm")),
        ("input_gate", MatrixStruct),
        ("input_output", MatrixStruct),
        ("inputs_norm", c_void_p),
        *((name, c_void_p) for name in ("k_pages", "v_pages", "k_scales", "v_scales", "sinks")),
        ("scale", c_float),
        ("output_scale", c_float),
        *((name, c_int32) for name in ("window", "rope", "query_rope", "rotated", "kv_heads", "head_dim", "batch")),
    )


class ModelStruct(ctypes.Structure):
    """`DecoderModel` of native/decoder.h."""

    _fields_ = (
        ("layers", c_void_p),
        ("head", MatrixStruct),
        ("token_inputs", MatrixStruct),
        *((name, c_void_p) for name in ("screen", "embedding", "norm", "inverse_frequencies", "attention_factors")),
        *((name, c_void_p) for name in ("token_inputs_norm", "betas", "periods")),
        *((name, c_float) for name in ("norm_eps", "embedding_scale", "residual_scale", "softcap", "share_scale")),
        ("inputs_scale", c_float),
        *((name, c_int32) for name in ("num_layers", "hidden", "heads", "ropes", "rotated")),
        *((name, c_int32) for name in ("gate", "inner", "experts", "experts_each", "renormalizes")),
        *((name, c_int32) for name in ("vocab_first", "vocab_count", "several")),
        *((name, c_int32) for name in ("gated", "projected", "mixed", "shared", "shared_gate", "sigmoid", "beside")),
        *((name, c_int32) for name in ("inputs", "first_input", "last_whole")),
    )


class StepStruct(ctypes.Structure):
    """`DecoderStep` of native/decoder.h."""

    _fields_ = (
        *(
            (name, c_void_p)
            for name in ("attention", "token_ids", "inputs", "positions", "slots", "logit_rows", "waves")
        ),
        *((name, c_int64) for name in ("num_waves", "tokens", "num_logits")),
        ("workspace", c_void_p),
        ("op_ns", c_void_p),
    )


# `Operation` of native/decoder.h
OPERATIONS: Final = ("embed", "norm", "qkv", "rotate", "attention", "recurrent", "o", "gate_up", "down", "head")
