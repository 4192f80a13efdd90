"""Benchmarks and the scripts behind every number in the documentation. Run them as `python -m bench.NAME`."""
