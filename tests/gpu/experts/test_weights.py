"""Bit patterns to values, for every code there is."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from hetero_gpu.experts.weights import decode_e8m0, decode_fp4, decode_fp8, decode_fp8_bits
from tests.gpu.experts.cases import DEVICE, WHERE

pytestmark = WHERE


@triton.jit
def _decode(codes, values, KIND: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    i = tl.arange(0, 256)
    code = tl.load(codes + i)
    if KIND == "fp4":
        tl.store(values + i, decode_fp4(code))
    elif KIND == "fp8":
        tl.store(values + i, decode_fp8(code))
    elif KIND == "fp8_bits":
        tl.store(values + i, decode_fp8_bits(code))
    else:
        tl.store(values + i, decode_e8m0(code))


def all_codes(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel makes of each byte, and the byte itself."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes & 0xF if kind == "fp4" else codes
    values = torch.full((256,), -7.25, device=DEVICE)
    _decode[(1,)](codes.to(DEVICE), values, kind)
    return values.cpu(), codes


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("fp8", torch.float8_e4m3fn), ("fp8_bits", torch.float8_e4m3fn), ("e8m0", torch.float8_e8m0fnu)],
    ids=["fp8", "fp8_bits", "e8m0"],
)
def test_every_code(kind: str, dtype: torch.dtype) -> None:
    values, codes = all_codes(kind)
    expected = codes.view(dtype).float()
    assert torch.equal(values.isnan(), expected.isnan())
    assert torch.equal(values.nan_to_num(), expected.nan_to_num())


def test_every_fp4_code() -> None:
    values, codes = all_codes("fp4")
    positive = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    expected = torch.cat((positive, -positive))[codes.int()]
    assert torch.equal(values, expected)
    assert torch.equal(values.signbit(), expected.signbit())
