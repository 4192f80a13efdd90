"""Tests of the worker in this process: kernels for CPUs and GPUs, models, quantized weights, sampling: minutes."""
