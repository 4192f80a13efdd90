"""The scheduler process: request state machines, block pool, radix tree, admission, and the plans for the workers.

Everything but `event_loop.py` is pure: no sockets, no torch, no clock. Read `request.py`, `block_pool.py`,
`radix_tree.py`, `kv_manager.py`, `admission.py`, `policy.py`, `scheduler.py`, in this order.
"""
