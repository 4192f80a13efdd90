"""The worker on NVIDIA GPUs: Triton kernels, paged attention over them, and steps as CUDA graphs.

Nothing here is imported on a machine without a GPU, except by tests, which run the kernels in Triton's interpreter.
"""
