"""The scheduler process: request state machines, block pool, radix tree, admission, and the plans for the workers.

Everything but `event_loop.py` is pure: no sockets, no torch, no clock. Read `request.py`, `block_pool.py`,
`radix_tree.py`, `kv_manager.py`, `admission.py`, `policy.py`, `pressure.py`, `scheduler.py`, in this order.
`simulator.py` and the files beside it run the same scheduler on a cost model; `replay.py` shows what a recorded one
did.
"""
