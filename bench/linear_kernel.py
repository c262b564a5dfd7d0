"""Products of few rows by the weights of one Qwen3-30B-A3B layer: our kernel beside torch's (cuBLAS).

Each of 48 products in a graph has a weight of its own, so that no cache holds them, and follows the one
before, as in a decode step. A kernel is compared with its reference before it is timed.

    python -m bench.linear_kernel
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from bench.harness import ResultFile, Row, measure
from hetero_gpu.linear import linear, linear_reference

DEVICE = "cuda"

LAYERS = 48
ROWS = (1, 2, 4, 8)
WEIGHTS = {"qkv": (5120, 2048), "o_proj": (2048, 4096), "router": (128, 2048)}
MOST_ERROR = 1e-2

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def main() -> None:
    torch.manual_seed(0)
    rows = [row for name in WEIGHTS for row in measured(name)]
    ResultFile.write("linear_kernel", rows)


def measured(name: str) -> list[Row]:
    """Microseconds of one product by `WEIGHTS[name]`, for each number of rows."""
    outputs, inputs = WEIGHTS[name]
    weights = torch.randn(LAYERS, outputs, inputs, device=DEVICE, dtype=torch.bfloat16)
    x = torch.randn(max(ROWS), inputs, device=DEVICE, dtype=torch.bfloat16)
    result = []
    for num_rows in ROWS:
        check(x[:num_rows], weights[0], name)
        ours, theirs = (
            microseconds(product, x[:num_rows], weights) for product in (linear, functional.linear)
        )
        gb_s = weights[0].nbytes / ours / 1e3
        result.append(
            Row(
                id=f"linear.{name}_r{num_rows}_us",
                value=ours,
                unit="us",
                reference=f"cuBLAS in this run: {theirs:.2f} us",
                note=f"{num_rows} rows, {weights[0].nbytes / 1e6:.1f} MB, {gb_s:.0f} GB/s",
            )
        )
    return result


def check(x: torch.Tensor, weight: torch.Tensor, name: str) -> None:
    """Raise AssertionError when the product is not what the reference computes."""
    expected = linear_reference(x, weight).float()
    error = float((linear(x, weight).float() - expected).norm() / expected.norm())
    assert error <= MOST_ERROR, f"{name}, {len(x)} rows: relative error {error:.1e}"


def microseconds(product: Product, x: torch.Tensor, weights: torch.Tensor) -> float:
    """Of one product: the median of several replays, over the layers."""

    def step() -> None:
        for weight in weights:
            product(x, weight)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    replays = measure(graph.replay, num_runs=20, num_warmups=3, synchronize=torch.cuda.synchronize)
    return 1e6 * replays.median / LAYERS


if __name__ == "__main__":
    main()
