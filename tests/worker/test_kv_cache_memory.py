"""Where the tensors of the KV cache lie."""

import itertools

import torch

from worker_proc.cpu.memory import HUGE_PAGE
from worker_proc.kv_cache import KVCache, KVSpec


def test_the_tensors_of_all_layers_share_their_huge_pages() -> None:
    cache = KVCache(KVSpec.uniform(20, 2, 64, 32, torch.bfloat16), num_pages=9, page_size=16)
    begins = [tensor.data_ptr() for tensor in cache.page_tensors]
    ends = [begin + tensor.nbytes for begin, tensor in zip(begins, cache.page_tensors, strict=True)]
    assert sum(tensor.nbytes for tensor in cache.page_tensors) < HUGE_PAGE
    assert max(ends) - min(begins) <= HUGE_PAGE and min(begins) % HUGE_PAGE == 0
    order = sorted(zip(begins, ends, strict=True))
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(order)), "none reaches into another"
    assert all(begin % 64 == 0 for begin in begins)
