"""Dequantisation against transformers' own operations, bit for bit."""

from __future__ import annotations

import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from hetero_runtime.experts.formats import (
    MXFP4,
    PLAIN,
    WeightForm,
    dequantize_blocks,
    dequantize_mxfp4,
    materialize,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def by_transformers(weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    result: torch.Tensor = Fp8Dequantize(None)._dequantize_one(weight, scales, output_dtype=dtype)
    return result


def some_scales(kind: str, shape: tuple[int, ...]) -> torch.Tensor:
    if kind == "float32":
        return torch.rand(shape) * 0.01
    if kind == "bfloat16":
        return (torch.rand(shape) * 0.01).bfloat16()
    exponents = torch.randint(100, 140, shape, dtype=torch.uint8)
    return exponents if kind == "uint8" else exponents.view(torch.float8_e8m0fnu)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "e8m0", "uint8"])
@pytest.mark.parametrize(("rows", "cols", "block"), [(32, 48, (16, 16)), (8, 64, (1, 32)), (6, 10, (6, 10))])
def test_blocks_of_float8(
    rows: int, cols: int, block: tuple[int, int], kind: str, dtype: torch.dtype
) -> None:
    weight = torch.randn(2, rows, cols).to(torch.float8_e4m3fn)
    scales = some_scales(kind, (2, rows // block[0], cols // block[1]))
    expected = torch.cat([by_transformers(weight[i], scales[i], dtype) for i in range(2)])
    actual = dequantize_blocks(weight.view(2 * rows, cols), scales, block=block, dtype=dtype)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_of_packed_fp4(dtype: torch.dtype) -> None:
    weight = torch.randint(-128, 128, (2, 8, 32), dtype=torch.int8)
    scales = some_scales("e8m0", (2, 8, 2))
    expected = torch.cat([by_transformers(weight[i], scales[i], dtype) for i in range(2)])
    assert torch.equal(dequantize_blocks(weight.view(16, 32), scales, block=(1, 32), dtype=dtype), expected)


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (17, 16), (16, 17), (40, 33)])
def test_the_last_block_may_be_short(rows: int, cols: int) -> None:
    weight = torch.randn(2 * rows, cols).to(torch.float8_e4m3fn)
    scales = torch.rand(2, -(-rows // 16), -(-cols // 16))
    actual = dequantize_blocks(weight, scales, block=(16, 16), dtype=torch.float32)
    for row in range(2 * rows):
        for col in range(cols):
            scale = scales[row // rows, row % rows // 16, col // 16]
            assert actual[row, col] == weight[row, col].float() * scale


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mxfp4(dtype: torch.dtype) -> None:
    blocks = torch.randint(0, 256, (3, 24, 2, 16), dtype=torch.uint8)
    scales = torch.randint(110, 136, (3, 24, 2), dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    for i in range(3):
        actual = dequantize_mxfp4(blocks[i], scales[i], dtype=dtype)
        assert actual.is_contiguous()
        assert torch.equal(actual, expected[i])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_mxfp4_scale_and_value(dtype: torch.dtype) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(255, 1, 1)  # every byte in every row
    scales = torch.arange(255, dtype=torch.uint8)[:, None].repeat(1, 16)  # 255 is NaN
    expected = convert_moe_packed_tensors(blocks[None], scales[None], dtype=dtype)[0]
    actual = dequantize_mxfp4(blocks, scales, dtype=dtype)
    assert torch.allclose(actual, expected, rtol=0, atol=0, equal_nan=True)


def test_plain_fields_of_the_right_dtype_are_views() -> None:
    fields = {"w": torch.randn(4, 4), "w_bias": torch.randn(4).bfloat16()}
    params = materialize(fields, {"w": PLAIN, "w_bias": PLAIN}, torch.float32)
    assert params["w"].data_ptr() == fields["w"].data_ptr()
    assert params["w_bias"].dtype == torch.float32


def test_each_field_by_its_form() -> None:
    fields = {
        "a": torch.randn(4, 8).to(torch.float8_e4m3fn),
        "a.scale": torch.rand(1, 2, 2),
        "b": torch.randint(0, 256, (4, 1, 16), dtype=torch.uint8),
        "b.scale": torch.full((4, 1), 127, dtype=torch.uint8),
    }
    forms = {"a": WeightForm("block_scaled", (2, 4)), "b": MXFP4}
    params = materialize(fields, forms, torch.bfloat16)
    assert {name: (p.dtype, tuple(p.shape)) for name, p in params.items()} == {
        "a": (torch.bfloat16, (4, 8)),
        "b": (torch.bfloat16, (32, 4)),
    }
