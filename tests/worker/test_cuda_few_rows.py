"""Products of few rows in kernels of their own."""

import pytest
import torch

from tests.helpers_triton import DEVICE

pytest.importorskip("triton")

from worker_proc.cuda.few_rows import MOST, Cut, few_rows_linear, suits_few_rows
from worker_proc.models.layers import Linear

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).to(DEVICE)


def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """`wanted` in float64."""
    error = (found.double() - wanted).norm() / wanted.norm()
    assert found.isfinite().all()
    assert error < (1e-6 if found.dtype == torch.float32 else 4 * torch.finfo(found.dtype).eps), float(error)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, MOST])
def test_a_product_equals_torch(rows: int, dtype: torch.dtype) -> None:
    x, weight, bias = random(rows, 176, dtype=dtype), random(37, 176, dtype=dtype), random(37, dtype=dtype)
    for cut in (None, Cut(8, 16), Cut(16, 64)):
        for added in (bias, None):
            wanted = x.double() @ weight.double().T
            found = few_rows_linear(x, Linear(weight, added), cut=cut)
            near(found, wanted if added is None else wanted + bias.double())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inputs", [128, 80], ids=["even", "uneven"])
def test_gated(inputs: int, dtype: torch.dtype) -> None:
    x, weight, bias = random(1, inputs, dtype=dtype), random(2 * 9, inputs, dtype=dtype), random(18, dtype=dtype)
    for cut in (None, Cut(8, 32)):
        gate, up = (x.double() @ weight.double().T + bias.double()).to(dtype).double().chunk(2, -1)
        near(few_rows_linear(x, Linear(weight, bias), gated=True, cut=cut), gate * gate.sigmoid() * up)


def test_what_is_left_to_others() -> None:
    small, large = random(8, 64, dtype=torch.bfloat16), torch.empty(2**13, 2**12, dtype=torch.bfloat16, device=DEVICE)
    one, two = (random(rows, 64, dtype=torch.bfloat16) for rows in (1, 2))
    assert suits_few_rows(one, Linear(small, None)) and suits_few_rows(two, Linear(small, None))
    assert suits_few_rows(one, Linear(large, None)) and not suits_few_rows(two, Linear(large, None))
    assert suits_few_rows(one, Linear(small, None), gated=True) and not suits_few_rows(
        two, Linear(small, None), gated=True
    )
    assert not suits_few_rows(one[:0], Linear(small, None))
    assert not suits_few_rows(random(MOST + 1, 64, dtype=torch.bfloat16), Linear(small, None))
    assert not suits_few_rows(one.float(), Linear(small.float(), None))
    assert not suits_few_rows(random(2, 128, dtype=torch.bfloat16)[:, ::2], Linear(small, None))
