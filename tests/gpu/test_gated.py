"""The first half of a gated MLP against torch: interpreted on a CPU, real on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from tests.gpu.absent_gpu import assert_compiles

pytest.importorskip("triton")
from hetero_gpu.gated import gated_linear, gated_linear_kernel
from hetero_gpu.linear import MOST_ROWS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RATIO = {torch.float32: 1e-5, torch.bfloat16: 2**-5, torch.float16: 2**-8}
"""Half types: four roundings one upon another, which the interpreter cuts off."""
SHAPES = [(1, 1), (7, 63), (33, 100), (64, 1), (5, 1030), (20, 2048)]
REAL = [(2816, 2048), (11264, 2048)]


def inputs(
    rows: int, shape: tuple[int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, gate, up = torch.randn(rows, shape[1]), torch.randn(shape), torch.randn(shape)
    return tuple(  # type: ignore[return-value]
        tensor.to(device=DEVICE, dtype=dtype) for tensor in (x, gate / shape[1] ** 0.5, up / shape[1] ** 0.5)
    )


def assert_equals_torch(rows: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, gate, up = inputs(rows, shape, dtype)
    products = (functional.linear(x.float(), weight.float()) for weight in (gate, up))
    expected = functional.silu(next(products)) * next(products)
    output = gated_linear_kernel(x, gate, up)
    assert output.dtype == dtype and output.shape == expected.shape
    error = (output.float() - expected).abs().max() / expected.abs().amax().clamp_min(1.0)
    assert error <= RATIO[dtype], f"relative error {error:.1e}"


@pytest.mark.parametrize("dtype", RATIO, ids=str)
@pytest.mark.parametrize("rows", [1, 3, MOST_ROWS], ids=lambda n: f"rows{n}")
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_equals_torch(shape: tuple[int, int], rows: int, dtype: torch.dtype) -> None:
    assert_equals_torch(rows, shape, dtype)


@pytest.mark.parametrize("dtype", RATIO, ids=str)
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    x, gate, up = inputs(MOST_ROWS, (12, 1100), dtype)
    alone = torch.cat([gated_linear_kernel(row[None], gate, up) for row in x])
    for rows in (1, 2, 3, MOST_ROWS):
        assert torch.equal(gated_linear_kernel(x[:rows], gate, up), alone[:rows]), rows


def test_many_rows_go_by_torch() -> None:
    x, gate, up = inputs(MOST_ROWS + 1, (12, 30), torch.float32)
    expected = functional.silu(functional.linear(x, gate)) * functional.linear(x, up)
    assert torch.equal(gated_linear(x, gate, up), expected)


def test_what_the_kernel_cannot_do_is_refused() -> None:
    weight = torch.zeros(3, 5)
    for rows, up in ((1, torch.zeros(4, 5)), (MOST_ROWS + 1, weight), (0, weight)):
        with pytest.raises(ValueError, match="same inputs"):
            gated_linear_kernel(torch.zeros(rows, 5), weight, up)
    with pytest.raises(ValueError, match="must be contiguous"):
        gated_linear_kernel(torch.zeros(1, 5), weight, torch.zeros(5, 3).mT)


STEP = """
from hetero_gpu import overlap
from hetero_gpu.gated import gated_linear_kernel

overlap._can_overlap = lambda device: True
for rows in (1, 4):
    x, gate, up = (torch.zeros(n, 2048, dtype=torch.bfloat16) for n in (rows, 2816, 2816))
    gated_linear_kernel(x, gate, up)
assert all("griddepcontrol.wait" in each.asm["ptx"] for each in compiled)
"""


def test_the_kernel_compiles(tmp_path: Path) -> None:
    assert_compiles(STEP, 90, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", RATIO, ids=str)
@pytest.mark.parametrize("rows", [1, 4], ids=lambda n: f"rows{n}")
@pytest.mark.parametrize("shape", REAL, ids=lambda s: f"{s[0]}x{s[1]}")
def test_device_equals_torch(shape: tuple[int, int], rows: int, dtype: torch.dtype) -> None:
    assert_equals_torch(rows, shape, dtype)
