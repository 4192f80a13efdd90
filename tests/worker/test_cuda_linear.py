"""Products with codes on a GPU against torch: on the GPU where there is one, else in Triton's interpreter."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.helpers_triton import DEVICE

pytest.importorskip("triton")

import triton
import triton.language as tl

from tests.helpers_codes import SCHEMES, random_rows
from tests.helpers_models import VOCAB_SIZE, make_checkpoint
from tests.helpers_paged import generate, make_prompts
from tests.helpers_quantized import quantize_checkpoint
from tests.worker.test_cuda_decoder import OnDevice, load
from worker_proc.attention.reference import ReferenceAttention
from worker_proc.cuda.quantized import Launch, PackedWeight
from worker_proc.cuda.widening import float4
from worker_proc.errors import ModelError
from worker_proc.models.registry import load_model
from worker_proc.parallel import TensorParallel
from worker_proc.quantization.rows import QuantizedRows, QuantizedWeight
from worker_proc.quantization.scheme import FP4_NUMBERS, FP8, MXFP4, Scheme

DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]  # see test_cuda_attention
HALF = torch.float16 if DEVICE.type == "cpu" else torch.bfloat16
BOUNDS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}  # of the largest number: outputs are rounded


def packed(rows: QuantizedRows, dtype: torch.dtype) -> PackedWeight:
    outputs, inputs = rows.codes.shape
    weight = PackedWeight.empty(outputs, inputs, rows.scheme, dtype, DEVICE)
    cut = outputs // 3
    weight.put(cut, rows.select((cut, outputs), (0, inputs)))
    weight.put(0, rows.select((0, cut), (0, inputs)))
    return weight


# an order of inputs is none of the kernels' business: one scheme with it will do
ORDERED = [scheme for scheme in SCHEMES if scheme.ordered]
CUT_IN_MANY_WAYS = [*(scheme for scheme in SCHEMES if scheme not in ORDERED[1:]), Scheme(4, 96), Scheme(8, 256)]


def check(rows: QuantizedRows, tokens: int, dtype: torch.dtype, biased: bool) -> None:
    outputs, inputs = rows.codes.shape
    weight = packed(rows, dtype)
    x = torch.randn(tokens, inputs + 3)[:, :inputs].to(dtype)
    bias = torch.randn(outputs).to(dtype) if biased else None
    exact = F.linear(x.double(), rows.dequantize(torch.float64), bias.double() if bias is not None else None)
    got = weight.linear(x.to(DEVICE), bias.to(DEVICE) if bias is not None else None)
    assert got.dtype == dtype
    torch.testing.assert_close(got.cpu().double(), exact, rtol=0, atol=BOUNDS[dtype] * float(exact.abs().max() + 1e-3))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", CUT_IN_MANY_WAYS, ids=str)
@pytest.mark.parametrize("tokens, outputs, inputs", [
    (1, 70, 384), (16, 64, 1024), (17, 200, 520), (64, 130, 96), (65, 128, 640), (130, 260, 40),
])  # fmt: skip
def test_equals_torch(tokens: int, outputs: int, inputs: int, scheme: Scheme, dtype: torch.dtype) -> None:
    """One row and many, a whole number of tiles and not, inputs shared out (1024, 640) and not."""
    torch.manual_seed(tokens)
    check(random_rows(outputs, inputs, scheme, tokens), tokens, dtype, biased=tokens % 2 == 1)


@settings(max_examples=25, deadline=None)
@example(Scheme(8), 1, 1, 1, False, torch.float32, 0)  # parts of a matrix without rows
@example(Scheme(4), 1, 4, 129, False, torch.float32, 0)  # and with one
@given(
    st.sampled_from(SCHEMES), st.integers(1, 80), st.integers(1, 140), st.integers(1, 700), st.booleans(),
    st.sampled_from(DTYPES), st.integers(0, 99),
)  # fmt: skip
def test_any_shape(
    scheme: Scheme, tokens: int, outputs: int, inputs: int, biased: bool, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    check(random_rows(outputs, inputs, scheme, seed), tokens, dtype, biased)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("inputs", [31, 128, 300])
def test_rows_are_those_of_torch(scheme: Scheme, inputs: int) -> None:
    rows = random_rows(50, inputs, scheme, 3)
    weight, plain = packed(rows, torch.bfloat16), QuantizedWeight.empty(50, inputs, scheme, torch.bfloat16, DEVICE)
    plain.put(0, rows)
    assert torch.equal(weight.rows(), plain.rows())
    some = torch.tensor([49, 0, 7, 7], device=DEVICE)
    assert torch.equal(weight.rows(some), plain.rows(some))
    assert weight.linear(torch.zeros(0, inputs, dtype=torch.bfloat16, device=DEVICE), None).shape == (0, 50)


@pytest.mark.parametrize("scheme", [*CUT_IN_MANY_WAYS, MXFP4], ids=str)
def test_weights_are_widened_as_torch_widens_them(scheme: Scheme) -> None:
    """All of them at once, which is how many rows are multiplied: one rounding, of zeros that need not be whole too."""
    rows = random_rows(70, 300, scheme, 4)
    weight = packed(rows, HALF)
    exact = rows.dequantize(torch.float64)
    exact = exact if rows.order is None else exact[:, rows.order]  # they stay in the order of codes
    torch.testing.assert_close(weight.widened().cpu().double(), exact, rtol=2.0**-8, atol=1e-6)


@pytest.mark.parametrize("scheme", [Scheme(4, 32, symmetric=False), Scheme(8), Scheme(4, 32, ordered=True)], ids=str)
def test_many_rows(scheme: Scheme) -> None:
    """From 512 on weights are widened first; in float32 they never are."""
    for dtype in (HALF, torch.float32)[: 1 if DEVICE.type == "cpu" else 2]:
        rows = random_rows(40, 200, scheme, 5)
        assert packed(rows, dtype).row_counts(600)[-1] == (513 if dtype == HALF else 33)
        check(rows, 600, dtype, biased=True)


@triton.jit
def widen_kernel(codes_ptr, out_ptr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(out_ptr + at, float4(tl.load(codes_ptr + at), out_ptr.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_numbers_of_fp4_are_exact(dtype: torch.dtype) -> None:
    """Whatever the upper halves of the bytes are; the sign of zero too."""
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(torch.int8)
    found = torch.empty(256, dtype=dtype, device=DEVICE)
    widen_kernel[(1,)](codes, found, 256)
    want = torch.tensor(FP4_NUMBERS).repeat(16)
    assert torch.equal(found.cpu().float(), want) and torch.equal(found.cpu().signbit(), want.signbit())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inputs", [64, 300])
def test_products_of_fp4_with_one_input_are_exact(inputs: int, dtype: torch.dtype) -> None:
    """Every code with scales of powers of two, as small and as large as outputs can be."""
    codes = (torch.arange(16)[:, None] + torch.arange(inputs)).remainder(16).to(torch.uint8)
    scales = 2.0 ** torch.arange(-12, 13).repeat(10)[: 16 * MXFP4.num_groups(inputs)].view(16, -1)
    rows = QuantizedRows(MXFP4, codes, scales)
    found = packed(rows, dtype).linear(torch.eye(inputs, dtype=dtype, device=DEVICE), None)
    assert torch.equal(found.t().cpu(), rows.dequantize(dtype))


def test_a_row_has_the_same_bits_in_a_batch_of_up_to_sixteen() -> None:
    weight = packed(random_rows(70, 1024, Scheme(4, 128), 1), torch.float32)
    x = torch.randn(16, 1024, device=DEVICE)
    together = weight.linear(x, None)
    for row in (0, 7, 15):
        assert torch.equal(weight.linear(x[row : row + 1], None), together[row : row + 1])


@given(
    st.integers(1, 9000), st.integers(1, 150_000), st.integers(1, 500),
    st.sampled_from([torch.float32, torch.bfloat16]), st.booleans(),
)  # fmt: skip
def test_every_tile_is_multiplied_once(rows: int, outputs: int, tiles: int, dtype: torch.dtype, roomy: bool) -> None:
    cut = Launch.of(rows, outputs, tiles, dtype, roomy=roomy)
    assert cut.each * cut.splits >= tiles > cut.each * (cut.splits - 1), "no part without a tile"
    assert 1 <= cut.splits <= 16 and (cut.splits == 1 or cut.each >= 4)
    programs = -(-rows // cut.block_m) * -(-outputs // cut.block_n)
    assert (cut.splits - 1) * programs < 264, "more parts than a GPU runs at once"
    if rows <= 16:
        assert cut == Launch.of(1, outputs, tiles, dtype)


def test_groups_that_cut_a_tile_are_refused() -> None:
    with pytest.raises(ModelError, match="quantization group size = 48: must be a multiple of 32"):
        PackedWeight.empty(4, 96, Scheme(4, 48), torch.float32, DEVICE)


PROMPTS = [prompt[:20] for prompt in make_prompts(VOCAB_SIZE)][:4]


@pytest.mark.parametrize(("kind", "scheme", "int8"), [
    ("llama-gqa-untied", Scheme(4, 32), False), ("qwen3", Scheme(8), False),
    ("qwen3", Scheme(4, 32), True), ("llama-gqa-untied", Scheme(8), True), ("qwen3", FP8, False),
])  # fmt: skip
def test_tokens_are_those_of_the_reference_decoder(kind: str, scheme: Scheme, int8: bool, tmp_path: Path) -> None:
    path = make_checkpoint(kind, tmp_path)
    tp, attention = TensorParallel(), ReferenceAttention()
    reference = load_model(path, dtype=torch.float32, device="cpu", tp=tp, attention=attention, quantization=scheme)
    want = generate(reference, PROMPTS, 5, page_size=4, chunk=9, int8=int8)
    assert len({token for output in want for token in output}) > 8, "a degenerate model proves nothing"
    assert generate(OnDevice(load(path, scheme)), PROMPTS, 5, page_size=4, chunk=9, int8=int8) == want


@pytest.mark.parametrize(("method", "scheme"), [
    ("gptq", Scheme(4, 32)), ("awq", Scheme(4, 64, symmetric=False)), ("compressed-tensors", Scheme(8, 32)),
])  # fmt: skip
def test_stored_codes_are_what_they_stand_for(method: str, scheme: Scheme, tmp_path: Path) -> None:
    source = make_checkpoint("llama-gqa-untied", tmp_path / "source", intermediate_size=128)
    codes, _ = quantize_checkpoint(source, tmp_path, method, scheme)
    tp, attention = TensorParallel(), ReferenceAttention()
    reference = load_model(codes, dtype=torch.float32, device="cpu", tp=tp, attention=attention)
    assert generate(OnDevice(load(codes)), PROMPTS, 4, page_size=16) == generate(reference, PROMPTS, 4, page_size=16)


@pytest.mark.parametrize("outputs, inputs", [(70, 64), (1024, 4096), (6144, 1024), (151_936, 512)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("most", [1, 40, 64, 65, 3000])
def test_some_products_launch_what_all_of_them_would(outputs: int, inputs: int, dtype: torch.dtype, most: int) -> None:
    weight = PackedWeight.empty(outputs, inputs, Scheme(4, 64), dtype, torch.device("cpu"))

    def kernel(rows: int) -> tuple[int, int, int, int, bool] | None:
        if rows >= 512 and dtype == torch.bfloat16:
            return None  # weights are widened first
        cut = Launch.of(rows, outputs, -(-inputs // 128), dtype, group=64)
        return cut.block_m, cut.block_n, cut.warps, cut.stages, cut.splits > 1

    some = weight.row_counts(most)
    assert max(some) <= most and len({kernel(rows) for rows in some}) == len(some)
    assert {kernel(rows) for rows in some} == {kernel(rows) for rows in range(1, most + 1)}
