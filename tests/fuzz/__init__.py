"""Fuzzing: `python -m tests.fuzz.http` and `python -m tests.fuzz.wire`, for as long as `--minutes` says."""
