"""Headers and blocks of GGUF files, against the package gguf."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers_codes import Q4_K
from tests.helpers_gguf import random_blocks
from worker_proc.errors import ModelError
from worker_proc.gguf.blocks import codes_of, dequantize, keeps_codes, scheme_of
from worker_proc.gguf.header import Uncounted, read_header
from worker_proc.gguf.kinds import CODED, EXACT_IN_4_BITS, NAMES
from worker_proc.quantization.scheme import MXFP4, ScaleForm

RANDOM = np.random.default_rng(0)


@cache
def sample() -> bytes:
    with TemporaryDirectory() as directory:
        file = Path(directory) / "m.gguf"
        writer = gguf.GGUFWriter(file, "llama")
        writer.add_uint32("llama.block_count", 3)
        writer.add_float32("llama.x", 0.5)
        writer.add_bool("llama.yes", True)
        writer.add_array("llama.each", [1, 2, 3])
        writer.add_array("llama.many", list(range(5000)))
        writer.add_string("llama.text", "Ä")
        writer.add_token_list(["a", "bc", ""])
        writer.add_custom_alignment(64)
        writer.add_tensor("plain", np.arange(6, dtype=np.float32).reshape(2, 3))
        writer.add_tensor("half", np.arange(8, dtype=np.float16).reshape(2, 2, 2))
        writer.add_tensor(
            "coded", random_blocks("Q4_K", (3, 512), 1.0, RANDOM), raw_dtype=gguf.GGMLQuantizationType.Q4_K
        )
        for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
            write()
        writer.close()
        return file.read_bytes()


def test_a_header_is_read_as_the_package_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(sample())
    header, theirs = read_header(file), gguf.GGUFReader(file)
    assert header.settings["general.architecture"] == "llama" and header.settings["llama.block_count"] == 3
    assert header.settings["llama.x"] == 0.5 and header.settings["llama.yes"] is True
    assert header.settings["llama.each"] == [1, 2, 3] and header.settings["llama.text"] == "Ä"
    assert header.settings["llama.many"] == Uncounted(5000)
    assert header.settings["tokenizer.ggml.tokens"] == Uncounted(3)
    assert len(header.tensors) == len(theirs.tensors) == 3
    for mine, other in zip(header.tensors, theirs.tensors, strict=True):
        assert (mine.name, mine.kind, mine.nbytes) == (other.name, other.tensor_type.name, other.n_bytes)
        assert mine.shape == tuple(int(size) for size in reversed(other.shape))
        assert sample()[mine.begin : mine.begin + mine.nbytes] == other.data.tobytes()


@given(st.data())
def test_a_broken_file_is_refused_and_nothing_else_happens(data: st.DataObject) -> None:
    raw = bytearray(sample())
    end = raw.index(b"coded") + 100  # of the header, or a little later
    cut = data.draw(st.booleans())
    if cut:  # the last tensor has 3 rows of 2 blocks, and something behind it
        raw = raw[: data.draw(st.integers(0, len(raw) - len(raw) % 64 - 64))]
    else:
        for _ in range(data.draw(st.integers(1, 4))):
            raw[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    with TemporaryDirectory() as directory:
        file = Path(directory) / "m.gguf"
        file.write_bytes(raw)
        try:
            header = read_header(file)
        except ModelError:
            return
    assert not cut, "the last tensor is not whole"
    assert all(tensor.begin + tensor.nbytes <= len(raw) for tensor in header.tensors)


def test_kinds_are_those_of_the_package() -> None:
    for number, name in NAMES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert kind.name == name
        if name in CODED:
            assert gguf.GGML_QUANT_SIZES[kind] == (CODED[name].numbers, CODED[name].nbytes)


@pytest.mark.parametrize("kind", CODED)
def test_every_kind_becomes_numbers(kind: str) -> None:
    block = CODED[kind]
    raw = RANDOM.integers(0, 60, (3, 2 * block.nbytes), dtype=np.uint8)
    numbers = dequantize(kind, torch.from_numpy(raw))
    assert numbers.shape == (3, 2 * block.numbers) and numbers.dtype == torch.float32
    assert len(numbers.unique()) > 4


@pytest.mark.parametrize("kind", [*EXACT_IN_4_BITS, "Q6_K", "Q8_0"])
def test_kinds_that_are_read_here_become_the_numbers_of_the_package(kind: str) -> None:
    raw = random_blocks(kind, (32, 1024), 1.0, RANDOM)
    raw[3] = 0
    want = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind])
    with mock.patch.object(gguf, "dequantize", side_effect=AssertionError):
        assert torch.equal(dequantize(kind, torch.from_numpy(raw)), torch.from_numpy(want))
        assert dequantize(kind, torch.from_numpy(raw[:0])).shape == (0, 1024)


@pytest.mark.parametrize("kind", EXACT_IN_4_BITS)
@pytest.mark.parametrize("beside", ["Q4_0", "Q4_1"])
def test_codes_of_four_bits_stand_for_the_same_numbers(kind: str, beside: str) -> None:
    raw = torch.from_numpy(random_blocks(kind, (64, 1024), 1.0, RANDOM))
    if kind == "Q4_K":
        raw[3, 4:16] = 0  # scales and mins of a block
        raw[5, 4:8] = 0  # scales of four groups: numbers that are all the same
        raw[7, 0:4] = 0
    else:
        raw[3, 0:2] = 0
    scheme = scheme_of([kind, beside])
    assert scheme is not None and scheme.bits == 4 and scheme.symmetric == (kind == beside == "Q4_0")
    rows = codes_of(kind, raw, scheme)
    assert (rows.zeros is None) == scheme.symmetric and bool(rows.scales.isfinite().all())
    torch.testing.assert_close(rows.dequantize(torch.float32), dequantize(kind, raw), rtol=1e-6, atol=1e-5)
    assert rows.zeros is None or bool(rows.zeros.isfinite().all())


def test_mxfp4_stays_as_it_is() -> None:
    raw = torch.from_numpy(RANDOM.integers(0, 256, (64, 8 * 17), dtype=np.uint8))
    raw.view(64, 8, 17)[..., 0] %= 200
    raw[0, 0::17] = torch.arange(8)  # with the least exponents
    rows = codes_of("MXFP4", raw, MXFP4)
    torch.testing.assert_close(rows.dequantize(torch.float32), dequantize("MXFP4", raw), rtol=0, atol=0)


def test_other_kinds_become_eight_bits_together() -> None:
    assert scheme_of(["F16", "BF16", "F32"]) is None
    assert scheme_of(["MXFP4", "MXFP4"]) == MXFP4
    for kinds in (["Q8_0", "F16"], ["MXFP4", "Q4_0"], ["Q5_1", "Q6_K"]):
        assert str(scheme_of(kinds)) == "int8, groups of 32"
    for kinds in (["Q6_K"], ["Q4_K", "Q6_K"], ["Q5_K", "BF16"]):
        assert str(scheme_of(kinds)) == str(scheme_of(kinds, (0, 1024))) == "int8, groups of 128"
    for last, group in ((1376, 32), (2752, 64), (5504, 128), (1360, 32)):  # of 11008 columns, over 8, 4 and 2 ranks
        assert str(scheme_of(["Q6_K"], (0, last))) == f"int8, groups of {group}"


def test_eight_bits_keep_the_codes_of_q8_0() -> None:
    """Any, also where the largest is not 127, and beside other kinds."""
    raw = torch.from_numpy(random_blocks("Q8_0", (64, 1024), 1.0, RANDOM))
    for kinds in (["Q8_0", "Q8_0"], ["Q8_0", "Q5_1"]):
        scheme = scheme_of(kinds)
        assert scheme is not None and keeps_codes("Q8_0", scheme) and not keeps_codes("Q5_1", scheme)
        rows = codes_of("Q8_0", raw, scheme)
        assert torch.equal(rows.dequantize(torch.float32), dequantize("Q8_0", raw))
    large = scheme_of(["Q6_K"])
    assert large is not None and not keeps_codes("Q8_0", large)


def test_scales_stay_as_they_are_where_no_block_is_cut() -> None:
    for kinds, cuts, form in (
        (["Q4_K", "Q4_K"], (), ScaleForm.FACTORS),
        (["Q4_K"], (0, 1024), ScaleForm.FACTORS),
        (["Q4_K"], (0, 1376), ScaleForm.FLOAT32),
        (["Q4_0"], (0, 1376), ScaleForm.FLOAT16),
        (["Q4_0", "Q4_K"], (), ScaleForm.FLOAT32),
        (["Q4_1"], (), ScaleForm.FLOAT32),
        (["Q8_0", "Q8_0"], (0, 1376), ScaleForm.FLOAT16),
        (["Q8_0", "F16"], (), ScaleForm.FLOAT32),
    ):
        scheme = scheme_of(kinds, cuts)
        assert scheme is not None and scheme.scale_form == form


def test_what_blocks_have_in_common_is_not_cut() -> None:
    rows = codes_of("Q4_K", torch.from_numpy(random_blocks("Q4_K", (8, 1024), 1.0, RANDOM)), Q4_K)
    half = rows.select((2, 7), (512, 1024))
    assert torch.equal(half.dequantize(torch.float32), rows.dequantize(torch.float32)[2:7, 512:])
    assert half.factors is not None and rows.factors is not None
    assert torch.equal(half.factors.products()[0], rows.factors.products()[0][2:7, 16:])
    with pytest.raises(ValueError, match="columns from 128 on cut what 256 inputs have in common"):
        rows.select((0, 8), (128, 1024))
