"""Checks and measurements of the GPU worker: `bench/gpu.sh` runs all of them, `compile_kernels` needs no GPU."""
