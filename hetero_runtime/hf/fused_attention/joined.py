"""Projections of the same input as one product."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hetero_gpu.linear import linear


class Joined:
    """The outputs of `projections` side by side, in one launch.

    One weight and one bias, of which those of the projections become parts: nothing is kept twice. A
    projection without a bias among others with one adds zeros.
    """

    def __init__(self, projections: Sequence[torch.nn.Linear]) -> None:
        self.sizes = [projection.out_features for projection in projections]
        self._weight = _joined([projection.weight for projection in projections])
        biases = [projection.bias for projection in projections]
        self._bias: torch.Tensor | None = None
        if any(bias is not None for bias in biases):
            zeros = self._weight.new_zeros
            own = [zeros(n) if bias is None else bias for bias, n in zip(biases, self.sizes, strict=True)]
            self._bias = _joined(own)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` `[rows, inputs]` to `[rows, sum of sizes]`."""
        return linear(x, self._weight, self._bias)


def project(projection: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """`x` `[rows, inputs]` through a layer of transformers: by the kernel where it is a plain product."""
    if type(projection) is not torch.nn.Linear:
        output: torch.Tensor = projection(x[:, None])[:, 0]
        return output
    return linear(x, projection.weight, projection.bias)


def _joined(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    joined = torch.cat([parameter.data for parameter in parameters])
    parts = joined.split([parameter.shape[0] for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part
    return joined
