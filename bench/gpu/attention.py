"""Attention alone, every backend: its error beside the reference in float32, and the time of a layer.

    python -m bench.gpu.attention [--backend triton] [--small]

The shapes are those of an 8B Llama, bfloat16: a mixed step, decodes, and decodes that begin with the same pages, read
row by row and together, on one level and on two; then all of them with an int8 cache, and some with sinks. Beside a
time stands how much of it reading K and V at the copy bandwidth takes: each page once per row, or once per tile where
it is shared. The error bound is 2e-2 of the reference's norm. A backend that is named and cannot be had makes the exit
status 1.
"""

import sys
from dataclasses import dataclass, replace
from functools import partial

import click
import torch

from bench.gpu.limits import measure, seconds
from bench.gpu.parity import mixed_batch
from bench.gpu.worker import PAGE, filled, make_batch
from common.config import ConfigError
from worker_proc import shared_pages
from worker_proc.attention.interface import TILE_ROWS, AttentionBackend, ForwardBatch, SharedPages
from worker_proc.attention.reference import ReferenceAttention
from worker_proc.cuda.backends import choose_attention
from worker_proc.cuda.flashinfer_attention import FlashInferAttention
from worker_proc.kv_cache import KVCache, KVSpec
from worker_proc.shared_pages import Tile

NAMES = ("triton", "flashinfer")
HEADS, KV_HEADS, DIM = 32, 8, 128
BOUND = 2e-2
MIXED = [(300, 300), (17, 1041), (64, 129), (1, 1), (1, 17), (1, 1024), (1, 4097)]  # new tokens, all tokens


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    batch: ForwardBatch
    pages: int  # of the cache
    read: int  # pages that must be read, where shared ones are read once per tile
    int8: bool = False  # what the cache is in
    sinks: bool = False


def shared_decodes(rows: int, prefix: int, own: int, inner: int = 0) -> list[Case]:
    """`rows` decodes whose first `prefix` pages are the same, then `inner` pages of every eight of them, then `own`
    pages each: row by row, with the outer pages together, and with both."""
    plain = make_batch(rows, 1, (prefix + inner + own) * PAGE)
    table = plain.page_table.clone()
    table[:, :prefix] = table[0, :prefix]
    for first in range(0, rows, 8):
        table[first : first + 8, prefix : prefix + inner] = table[first, prefix : prefix + inner]
    columns = plain.positions // PAGE
    slots = table.gather(1, columns[:, None])[:, 0] * PAGE + plain.positions % PAGE
    batch = replace(plain, page_table=table, slot_mapping=slots)
    outer = [Tile(prefix, tuple(range(i, min(i + TILE_ROWS, rows)))) for i in range(0, rows, TILE_ROWS)]
    both = outer + [Tile(prefix + inner, tuple(range(i, min(i + 8, rows))), prefix, 1) for i in range(0, rows, 8)]
    pages = rows * (prefix + inner + own)
    name = f"{rows} decodes, {prefix * PAGE}" + f" + {inner * PAGE}" * bool(inner) + f" shared, {own * PAGE} own"
    made = [Case(f"{name}, row by row", batch, pages, pages)]
    for how, tiles in (("together", outer), ("on two levels", both if inner else [])):
        if tiles:
            numbers = (torch.tensor(part, device="cuda") for part in shared_pages.layout(tiles, rows, PAGE))
            skipped, levels, table = numbers
            shared = SharedPages(skipped, levels, table.view(len(tiles), -1))
            read = sum(tile.pages - tile.above for tile in tiles) + pages - int(skipped.sum()) // PAGE
            made.append(Case(f"{name}, {how}", replace(batch, shared=shared), pages, read))
    return made


def cases(*, small: bool) -> list[Case]:
    batch, pages = mixed_batch([(new, min(total, 129)) for new, total in MIXED[1:]] if small else MIXED, 1000)
    made = [Case("mixed", batch, pages, pages)]
    if small:
        return [*made, *shared_decodes(20, 4, 2), *shared_decodes(20, 4, 1, 3)]
    for rows in (1, 64, 256):
        made.append(
            Case(f"{rows} decodes of 1024", make_batch(rows, 1, 1024), rows * 1024 // PAGE, rows * 1024 // PAGE)
        )
    return [*made, *shared_decodes(64, 128, 16), *shared_decodes(256, 128, 16), *shared_decodes(256, 128, 16, 64)]


@click.command()
@click.option("--small", is_flag=True, help="Short contexts and no times, for slow tools.")
@click.option("--backend", "names", multiple=True, type=click.Choice(NAMES), help="By default all there are.")
@torch.inference_mode()
def main(small: bool, names: tuple[str, ...]) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    device, failed = torch.device("cuda"), False
    backends: dict[str, AttentionBackend] = {}
    for name in names or NAMES:
        try:
            backends[name] = choose_attention(name, torch.bfloat16, DIM, device)
        except ConfigError as error:
            failed |= name in names
            print(f"{'FAILED' if name in names else 'not run'}: {error}")
    if not backends:
        sys.exit(1)
    bandwidth = 1.0 if small else measure().bandwidth
    plain = cases(small=small)
    others: list[Case] = []
    if "triton" in backends:  # FlashInfer computes neither
        others += [replace(case, int8=True) for case in plain]
        others += [replace(case, sinks=True) for case in (plain[0], plain[-1])]
    for case in (*plain, *others):
        torch.manual_seed(0)
        tokens = len(case.batch.token_ids)
        q, k, v = (torch.randn(tokens, n, DIM, device=device).bfloat16() for n in (HEADS, KV_HEADS, KV_HEADS))
        cache = filled(KVSpec.uniform(1, KV_HEADS, DIM, DIM, torch.bfloat16, case.int8), case.pages)
        exact = KVCache(replace(cache.spec, dtype=torch.float32), case.pages, PAGE, device)
        for wide, narrow in zip(exact.page_tensors, cache.page_tensors, strict=True):
            wide.copy_(narrow)
        limits = {"scale": DIM**-0.5, "sinks": torch.randn(HEADS, device=device) if case.sinks else None}
        reference = ReferenceAttention()
        want = reference.forward(0, q.float(), k.float(), v.float(), case.batch, exact, **limits)
        floor = case.read * PAGE * cache.spec.bytes_per_token / bandwidth
        for name, attention in backends.items():
            if (case.int8 or case.sinks) and isinstance(attention, FlashInferAttention):
                continue
            got = attention.forward(0, q, k, v, case.batch, cache, **limits).float()
            error = float((got - want).norm() / want.norm())
            wrong = not error < BOUND
            failed |= wrong
            what = case.name + ", int8" * case.int8 + ", sinks" * case.sinks
            line = f"{what:<58} {name:<10} error {error:.1e}{' WRONG' * wrong}"
            if not small:
                run = partial(attention.forward, 0, q, k, v, case.batch, cache, **limits)
                taken = seconds(run, repeats=10, queued=True)
                line += f"  {taken * 1e6:8.1f} us, reading {floor * 1e6:7.1f} us = {floor / taken:4.0%}"
            print(line, flush=True)
        torch.cuda.empty_cache()
    sys.exit(failed)


if __name__ == "__main__":
    main()
