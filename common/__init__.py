"""What every process shares: the wire schema and its codec, sockets, run directory, configuration, child lifecycle.

This package imports nothing of Rhizome's other packages and never imports torch.
"""
