"""Weights and KV in fewer bits: which scheme, how numbers become codes, and checkpoints that hold codes.

`scheme` and `stored_config` say what is wanted or stored, without torch; `rows` quantizes and dequantizes, `source`
says where each projection's codes come from, `stored` reads codes as checkpoints hold them; `kv` is the int8 cache.
"""
