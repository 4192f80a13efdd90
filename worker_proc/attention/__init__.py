"""Attention over paged K/V: `interface` says what one step looks like, every other module is one backend.

`reference` is plain PyTorch and defines what is right; any faster backend is tested against it.
"""
