"""Pages that go to the host and come back: the very bits, in every kind of cache, and for GPUs the order of streams."""

import gc
from contextlib import contextmanager

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from common.config import CacheConfig
from common.messages import ints
from tests.helpers_paged import sent
from worker_proc.cuda import page_transfer
from worker_proc.cuda.page_transfer import CudaTransfer
from worker_proc.errors import ModelError
from worker_proc.host_tier import HostPages, PageCopies, Way, make_transfer, runs
from worker_proc.kv_cache import KVCache, KVHeads, KVSpec
from worker_proc.memory import choose_host_pages
from worker_proc.staging import Staging

PAGES, HOST = 7, 5
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def filled(dtype=torch.float32, page_size=4, k=6, v=6, int8=False, device="cpu"):
    """A cache in which every byte is random, so that some numbers are none."""
    cache = KVCache(KVSpec.uniform(3, 2, k, v, dtype, int8), PAGES, page_size, device)
    generator = torch.Generator().manual_seed(page_size)
    for tensor in cache.page_tensors:
        tensor.view(torch.uint8).copy_(torch.randint(0, 256, tensor.view(torch.uint8).shape, generator=generator))
    return cache


def bits(cache, page):
    return [tensor[page].view(torch.uint8).clone() for tensor in cache.page_tensors]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def make(copies, *pages, device="cpu"):
    """Copies at once: from the first page to the second, from the third to the fourth, and so on."""
    with sent(device) as staging:
        copies.stage(ints(*pages), staging)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize(
    ("dtype", "int8"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.float16, False), (torch.bfloat16, True)],
)
def test_what_comes_back_is_what_went(dtype, int8, page_size, device):
    cache = filled(dtype, page_size, k=5, v=3, int8=int8, device=device)  # K and V of different and odd width
    copies = PageCopies(cache, HostPages(cache, HOST, device))
    before = [bits(cache, page) for page in range(PAGES + 1)]
    make(copies, 2, PAGES + 4, 6, PAGES + 0, device=device)
    assert all(same(bits(cache, page), before[page]) for page in range(PAGES + 1)), "offloading only reads"
    make(copies, PAGES + 4, 0, PAGES + 0, 2, device=device)
    after = {0: 2, 2: 6}
    assert all(same(bits(cache, page), before[after.get(page, page)]) for page in range(PAGES + 1))


def test_layers_with_other_heads_come_back_too():
    cache = KVCache(KVSpec((KVHeads(2, 5, 3), KVHeads(1, 16, 8)), torch.bfloat16), PAGES, 4)
    for tensor in cache.page_tensors:
        tensor.view(torch.uint8).random_(0, 256)
    copies, before = PageCopies(cache, HostPages(cache, HOST, "cpu")), bits(cache, 2)
    assert cache.page_bytes == 4 * cache.spec.bytes_per_token == 4 * (2 * (5 + 3) + 16 + 8) * 2
    make(copies, 2, PAGES + 4, PAGES + 4, 0)
    assert same(bits(cache, 0), before)


@pytest.mark.parametrize("device", DEVICES)
def test_the_order_of_copies_is_kept(device):
    """A page that was given up is used again at once, on both sides."""
    cache = filled(device=device)
    copies = PageCopies(cache, HostPages(cache, HOST, device))
    before = [bits(cache, page) for page in range(PAGES)]
    host = PAGES
    make(copies, 0, host, 1, 0, 2, host + 1, host, 2, 3, host, 0, 3, host, 0, device=device)
    assert same(bits(cache, 0), before[3]) and same(bits(cache, 1), before[1])
    assert same(bits(cache, 2), before[0]) and same(bits(cache, 3), before[1])


def test_runs_are_as_long_as_their_order_allows():
    found = list(runs([0, 1, 2, 12, 3, 4, 5], [10, 11, 3, 4, 10, 10, 6], 10))
    assert [run.way for run in found] == [Way.DOWN, Way.WITHIN, Way.UP, Way.DOWN, Way.DOWN, Way.WITHIN]
    assert (found[0].sources, found[0].targets) == ([0, 1], [0, 1])
    assert [(run.sources, run.targets) for run in found[2:5]] == [([2], [4]), ([3], [0]), ([4], [0])]


moves = st.lists(
    st.tuples(st.integers(0, PAGES + HOST - 1), st.integers(0, PAGES + HOST - 1)).filter(lambda m: min(m) < PAGES),
    min_size=1,
    max_size=20,
)


@settings(max_examples=150, deadline=None)
@given(moves, st.booleans())
def test_any_copies_do_what_one_after_the_other_would_do(pairs, staged):
    """`staged` is the way of a GPU, with buffers of two pages."""
    cache = filled(page_size=2)
    host = HostPages(cache, HOST)
    copies = PageCopies(cache, host)
    if staged:
        copies._transfer = staged_transfer(cache, host, Clocks())
    before = [bits(cache, page) for page in range(PAGES)]
    wanted = {page: page for page in range(PAGES)}
    made = []
    for source, target in pairs:
        if source in wanted:  # nobody reads a host page that was never written
            wanted[target] = wanted[source]
            made += [source, target]
    if made:
        make(copies, *made)
    assert all(same(bits(cache, page), before[wanted[page]]) for page in range(PAGES))


@pytest.mark.parametrize(
    ("pairs", "words"),
    [((0, PAGES + HOST), "outside"), ((-1, 0), "outside"), ((PAGES, PAGES + 1), "both pages are on the host")],
)
def test_impossible_copies_are_refused(pairs, words):
    cache = filled()
    with pytest.raises(ValueError, match=words):
        make(PageCopies(cache, HostPages(cache, HOST)), *pairs)
    with pytest.raises(ValueError, match=r"outside 0\.\.6"):
        make(PageCopies(cache), 0, PAGES)


def test_the_size_of_the_tier_follows_from_its_memory(monkeypatch):
    cache = filled()
    assert cache.page_bytes == cache.page_size * cache.spec.bytes_per_token
    assert choose_host_pages(CacheConfig(host_kv_bytes=10 * cache.page_bytes + 1), cache, 2) == 10
    with pytest.raises(ModelError, match="do not hold one page"):
        choose_host_pages(CacheConfig(host_kv_bytes=cache.page_bytes - 1), cache, 1)
    monkeypatch.setattr("worker_proc.memory.available_memory", lambda: 10 * cache.page_bytes)
    with pytest.raises(ModelError, match="for each of 2 ranks are too many"):
        choose_host_pages(CacheConfig(host_kv_bytes=6 * cache.page_bytes), cache, 2)
    held = (cache.num_pages + 1) * cache.page_bytes  # on a CPU the cache itself is to come from the same memory
    monkeypatch.setattr("worker_proc.memory.available_memory", lambda: 2 * (held + 5 * cache.page_bytes))
    assert choose_host_pages(CacheConfig(host_kv_bytes=5 * cache.page_bytes), cache, 2) == 5
    with pytest.raises(ModelError, match="of which each KV cache will take"):
        choose_host_pages(CacheConfig(host_kv_bytes=5 * cache.page_bytes + 1), cache, 2)
    assert make_transfer(cache, HostPages(cache, 1)).__class__.__name__ == "MemoryTransfer"


class Clocks:
    """Streams that keep time: what a stream does comes after all that it did before, and after the events that it has
    waited for. An event is the set of what came before it (vector clocks, Fidge and Mattern, 1988)."""

    def __init__(self, forget=None):
        self.seen = {}  # stream -> numbers of accesses that come before what it does next
        self.now = self.computing = self.new()
        self.accesses = []  # (what, writes)
        self.forget = forget  # number of the wait that is left out
        self.waits = 0

    def new(self):
        stream = len(self.seen)
        self.seen[stream] = set()
        return stream

    def current(self):
        return self.now

    def record(self, stream):
        return frozenset(self.seen[stream])

    def wait(self, stream, event):
        if event is not None:
            self.waits += 1
            if self.waits - 1 != self.forget:
                self.seen[stream] |= event

    @contextmanager
    def using(self, stream):
        before, self.now = self.now, stream
        yield
        self.now = before

    def touch(self, reads, writes):
        """Two accesses to the same place, one of which writes, must have an order."""
        for what, is_write in [*((r, False) for r in reads), *((w, True) for w in writes)]:
            for number, (other, wrote) in enumerate(self.accesses):
                if other == what and (wrote or is_write) and number not in self.seen[self.now]:
                    raise AssertionError(f"{what} is touched twice in no order")
        for what, is_write in [*((r, False) for r in reads), *((w, True) for w in writes)]:
            self.seen[self.now].add(len(self.accesses))
            self.accesses.append((what, is_write))


class Watched(CudaTransfer):
    def gather(self, pages, buffer):
        self._streams.touch([f"page {p}" for p in pages.tolist()], [f"buffer {id(buffer)}"])
        super().gather(pages, buffer)

    def scatter(self, buffer, pages, layers):
        self._streams.touch([f"buffer {id(buffer)}"], [f"page {p}" for p in pages.tolist()])
        super().scatter(buffer, pages, layers)

    def to_host(self, buffer, rows):
        self._streams.touch([f"buffer {id(buffer)}"], [f"row {r}" for r in rows])
        super().to_host(buffer, rows)

    def from_host(self, rows, buffer, layers):
        self._streams.touch([f"row {r}" for r in rows], [f"buffer {id(buffer)}", f"copy of layer {layers.start}"])
        super().from_host(rows, buffer, layers)


def staged_transfer(cache, host, clocks):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_transfer, "STAGING_BYTES", 2 * cache.page_bytes)
        return Watched(cache, host, torch.device("cpu"), clocks)


def move(way, sources, targets):
    staging = Staging("cpu")
    way(sources, targets, staging)
    staging.send()


def busy(clocks):
    """Steps that compute in all pages, between copies that touch everything in both directions."""
    cache = filled(page_size=2)
    transfer = staged_transfer(cache, HostPages(cache, HOST), clocks)
    for turn in range(4):
        clocks.touch([], [f"page {page}" for page in range(PAGES)])
        move(transfer.down, [0, 1, 2, 3, 4], [turn % 5, (turn + 1) % 5, (turn + 2) % 5, (turn + 3) % 5, (turn + 4) % 5])
        clocks.touch([], ["page 0", "page 4"])
        move(transfer.up, [0, 1, 2], [3, 4, 5])
        clocks.touch(["page 3", "page 5"], ["page 6"])
        move(transfer.up, [3, 4], [0, 1])
        move(transfer.down, [6], [2])
        loads = begin(transfer, [0, 1, 2], [1, 3, 5])
        for layer in range(len(cache.k)):
            loads.before(layer)
            clocks.touch(["page 1", "page 3"], ["page 5"])
    return transfer


def begin(transfer, sources, targets):
    """Pages that come up layer by layer."""
    staging = Staging("cpu")
    loads = transfer.up_by_layer(sources, targets, staging)
    staging.send()
    return loads


def test_streams_of_a_gpu_wait_for_each_other_where_they_must():
    busy(Clocks())


def test_a_wait_that_is_left_out_is_seen():
    """Of all waits, so that none is there in vain but those that another one implies."""
    clocks = Clocks()
    busy(clocks)
    seen = 0
    for number in range(clocks.waits):
        try:
            busy(Clocks(forget=number))
        except AssertionError:
            seen += 1
    assert seen > clocks.waits // 2


def test_the_computing_stream_goes_on_while_pages_go_down():
    """It waits for the copy within the GPU alone: the host's pages are written behind its back."""
    clocks = Clocks()
    cache = filled(page_size=2)
    transfer = staged_transfer(cache, HostPages(cache, HOST), clocks)
    move(transfer.down, [0, 1], [0, 1])
    before = {clocks.accesses[number][0] for number in clocks.seen[clocks.computing]}
    assert "page 0" in before and not any(what.startswith("row") for what in before)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_layers_come_when_they_are_asked_for(count):
    """Buffers of two pages, or of several layers of more pages. What a layer has written before the next ones come
    stays."""
    clocks, cache = Clocks(), filled(page_size=2)
    transfer = staged_transfer(cache, HostPages(cache, HOST), clocks)
    move(transfer.down, list(range(count)), list(range(count)))
    before = [bits(cache, page) for page in range(count)]
    for tensor in cache.page_tensors:
        tensor.view(torch.uint8).zero_()
    loads = begin(transfer, list(range(count)), list(range(1, 1 + count)))
    layers = len(cache.k)
    for layer in range(layers):
        loads.before(layer)
        for page in range(count):
            for tensor, part in ((cache.k[layer], layer), (cache.v[layer], layers + layer)):
                assert torch.equal(tensor[1 + page].view(torch.uint8), before[page][part]), "not there in time"
                before[page][part] = torch.full_like(before[page][part], 7)
                tensor[1 + page].view(torch.uint8).fill_(7)
    assert all(same(bits(cache, 1 + page), before[page]) for page in range(count)), "written over after it was there"


def test_the_computing_stream_waits_for_the_layers_that_it_needs():
    clocks, cache = Clocks(), filled(page_size=2)
    transfer = staged_transfer(cache, HostPages(cache, HOST), clocks)
    move(transfer.down, [0, 1], [0, 1])

    def waited_for():
        return {name for name, _ in (clocks.accesses[n] for n in clocks.seen[clocks.computing]) if "copy of" in name}

    loads = begin(transfer, [0, 1], [2, 3])
    assert waited_for() == set(), "the copies have begun, and nobody waits for them"
    seen = []
    for layer in range(len(cache.k)):
        loads.before(layer)
        seen.append(waited_for())
    assert seen == [{f"copy of layer {i}" for i in range(layer + 1)} for layer in range(3)]


@settings(max_examples=100, deadline=None)
@given(moves, st.integers(0, 2))
def test_the_last_copies_may_come_by_layer(pairs, upto):
    """After all layers everything is as copies one after the other leave it; layers before `upto` are not named."""
    results = []
    for by_layer in (False, True):
        cache = filled(page_size=2)
        host = HostPages(cache, HOST)
        host.bytes.zero_()
        copies = PageCopies(cache, host)
        copies._transfer = staged_transfer(cache, host, Clocks())
        staging = Staging("cpu")
        loads = copies.stage(ints(*(page for pair in pairs for page in pair)), staging, by_layer=by_layer)
        staging.send()
        assert (loads is not None) == (by_layer and pairs[-1][0] >= PAGES)
        for layer in range(upto, len(cache.k)) if loads is not None else ():
            loads.before(layer)
        results.append([bits(cache, page) for page in range(PAGES)])
    assert all(same(*pages) for pages in zip(*results, strict=True))


class Runtime:
    """What pages need of CUDA's runtime, which pins memory once and returns error 712 the second time."""

    def __init__(self):
        self.pinned, self.calls = set(), []

    def cudaHostRegister(self, address, nbytes, flags):
        assert address not in self.pinned, "cudaErrorHostMemoryAlreadyRegistered (712)"
        self.pinned.add(address)
        return 0

    def cudaHostUnregister(self, address):
        self.calls.append("unpin")
        self.pinned.remove(address)
        return 0


def test_memory_is_unpinned_when_nobody_has_it_any_more(monkeypatch):
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda error: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: runtime.calls.append(f"wait for {device}"))
    cache = filled()
    host = HostPages(cache, HOST, "cuda:3")
    transfer = CudaTransfer(cache, host, torch.device("cpu"), Clocks())
    assert runtime.pinned == {host.bytes.data_ptr()}
    del host
    gc.collect()
    assert runtime.pinned and not runtime.calls, "the transfer still has it"
    del transfer
    gc.collect()
    assert not runtime.pinned and runtime.calls == ["wait for cuda:3", "unpin"]
    for _ in range(3):  # at the address of the last one, or at another one
        HostPages(cache, HOST, "cuda:3")
        gc.collect()
    assert not runtime.pinned
