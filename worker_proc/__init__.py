"""The worker: one process per tensor-parallel rank, holding weights and KV tensors and deciding nothing.

Read it in this order: `errors`, `weights` (checkpoint files), `parallel` (collectives between ranks), `kv_cache`
(the paged K/V tensors), `attention/` (how a step attends over pages), `models/` (from a checkpoint to logits), `cpu/`
(the same in native code), and then what drives them: the sampler, the slot state, the model runner, the process loop.
"""
