"""The worker: one process per tensor-parallel rank, holding weights and KV tensors and deciding nothing.

Read it in this order: `errors`, `weights` (checkpoint files), `parallel` (collectives between ranks), `kv_cache`
(the paged K/V tensors), `attention/` (how a step attends over pages), `cpu/` (the same in native code), `models/` (from a checkpoint to logits), and
then what drives them: the sampler, the slot state, the model runner and the process loop.
"""
