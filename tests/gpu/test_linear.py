"""The product of few rows against its reference: interpreted on a CPU, real on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from hetero_gpu.linear import MOST_ROWS, LinearTile, linear, linear_kernel, linear_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
RATIO = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (7, 63), (33, 100), (64, 1), (5, 1030), (20, 2048)]


def _inputs(
    rows: int, shape: tuple[int, int], dtype: torch.dtype, *, has_bias: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    x, weight, bias = torch.randn(rows, shape[1]), torch.randn(shape), torch.randn(shape[0])
    x, weight, bias = (tensor.to(device=DEVICE, dtype=dtype) for tensor in (x, weight, bias))
    return x, weight, bias if has_bias else None


def _assert_close(output: torch.Tensor, expected: torch.Tensor) -> None:
    assert output.dtype == expected.dtype and output.shape == expected.shape
    scale = expected.float().abs().amax().clamp_min(1.0)
    error = ((output.float() - expected.float()).abs() / scale).max()
    assert error <= RATIO[output.dtype], f"relative error {error:.1e}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("rows", [1, 3, MOST_ROWS], ids=lambda n: f"rows{n}")
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_equals_reference(shape: tuple[int, int], rows: int, has_bias: bool, dtype: torch.dtype) -> None:
    x, weight, bias = _inputs(rows, shape, dtype, has_bias=has_bias)
    _assert_close(linear_kernel(x, weight, bias), linear_reference(x, weight, bias))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    x, weight, bias = _inputs(MOST_ROWS, (40, 1500), dtype, has_bias=True)
    alone = [linear_kernel(row[None], weight, bias)[0] for row in x]
    for rows in range(1, MOST_ROWS + 1):
        assert torch.equal(linear_kernel(x[:rows], weight, bias), torch.stack(alone[:rows])), rows


@pytest.mark.parametrize("tile", [(1, 2048, 1), (2, 64, 1), (16, 128, 4)], ids=str)
def test_every_tile_gives_the_product(tile: tuple[int, int, int]) -> None:
    x, weight, bias = _inputs(2, (35, 300), torch.float32, has_bias=True)
    output = linear_kernel(x, weight, bias, tile=LinearTile(*tile))
    _assert_close(output, linear_reference(x, weight, bias))


def test_many_rows_and_strided_inputs_work_too() -> None:
    x, weight, bias = _inputs(MOST_ROWS + 1, (12, 30), torch.float32, has_bias=True)
    _assert_close(linear(x, weight, bias), linear_reference(x, weight, bias))
    strided = torch.randn(30, 4, device=DEVICE).T
    _assert_close(linear_kernel(strided, weight, bias), linear_reference(strided, weight, bias))


def test_what_the_kernel_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="same inputs"):
        linear_kernel(torch.zeros(1, 4), torch.zeros(3, 5))
    with pytest.raises(ValueError, match="up to 8 rows"):
        linear_kernel(torch.zeros(9, 5), torch.zeros(3, 5))
