"""Native attention where keys or values are not finite: who sees it, and that nobody else does."""

from dataclasses import replace

import pytest
import torch

from tests.worker.test_cpu_attention import LEVELS, Shape, make_step, with_two_threads
from worker_proc.attention.cpu import CpuAttention
from worker_proc.cpu.library import NativeLibrary


@pytest.fixture(scope="module", params=LEVELS)
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    return with_two_threads(request.param)


@pytest.mark.parametrize("softcap", [None, 2.0], ids=["plain", "softcap"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_key_that_is_not_a_number_shows_in_whatever_sees_it(
    library: NativeLibrary, dtype: torch.dtype, softcap: float | None
) -> None:
    """In blocks of its own or others', in chunks and decodes."""
    whole = make_step(Shape(dtype=dtype, softcap=softcap), [(600, 600)])
    clean = whole.run(CpuAttention(library))
    for at in (0, 37, 300):
        k = whole.k.clone()
        k[at, :, 5] = torch.nan
        step = replace(whole, k=k)
        for begin, end in ((0, 600), (at, at + 1), (301, 302), (310, 500)):  # the first one writes all keys
            out = step.chunk(begin, end).run(CpuAttention(library))
            sees = torch.arange(begin, end) >= at
            assert bool(out[sees].isnan().all())
            assert torch.equal(out[~sees], clean[begin:end][~sees])


@pytest.mark.parametrize("value", [torch.inf, torch.nan], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape",
    [Shape(), Shape(14, 2, 96, 80), Shape(2, 2, 24, 24, page_size=5), Shape(8, 1, 128, 128, softcap=2.0, sinks=1.0)],
)
def test_a_token_does_not_see_that_values_of_later_ones_are_not_finite(
    library: NativeLibrary, shape: Shape, dtype: torch.dtype, value: float
) -> None:
    """Wherever the later one is in the block, the step of 16 or 32 tokens and the tile of queries."""
    whole = make_step(replace(shape, dtype=dtype), [(600, 600)])
    clean = whole.run(CpuAttention(library))
    for at in (1, 17, 30, 255, 256, 300, 599):
        v = whole.v.clone()
        v[at, :, 3] = value
        step = replace(whole, v=v)
        for begin, end in ((0, 600), (max(0, at - 20), min(600, at + 3))):
            out = step.chunk(begin, end).run(CpuAttention(library))
            sees = torch.arange(begin, end) >= at
            assert not bool(out[sees, :, 3].isfinite().any())
            assert torch.equal(out[~sees], clean[begin:end][~sees])


@pytest.mark.parametrize("int8", [False, True], ids=["plain", "int8"])
def test_values_that_are_not_finite_show_in_the_same_tokens_in_any_chunk(library: NativeLibrary, int8: bool) -> None:
    """In those whose window holds them, and few behind."""
    whole = make_step(Shape(window=40, int8=int8), [(400, 400)])
    v = whole.v.clone()
    v[100, :, 3] = torch.inf
    whole = replace(whole, v=v)
    expected = whole.run(CpuAttention(library))
    finite = expected[:, :, 3].isfinite().all(dim=1)
    assert bool(finite[:100].all()) and not bool(finite[100:140].any()) and bool(finite[171:].all())
    for begin, end in ((0, 110), (110, 150), (150, 400), *((at, at + 1) for at in range(95, 175))):
        out = whole.chunk(begin, end).run(CpuAttention(library))
        torch.testing.assert_close(out, expected[begin:end], rtol=0, atol=0, equal_nan=True)
