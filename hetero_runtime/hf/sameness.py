"""Whether a kernel says what transformers' module says, up to rounding."""

from __future__ import annotations

import torch

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Relative. Half types: two units in the last place. float32: sums are made in another order."""


def relative_error(output: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest error relative to the largest value of the vector; infinite for another type or shape."""
    if output.dtype != expected.dtype or output.shape != expected.shape:
        return float("inf")
    scale = expected.float().abs().amax(-1, keepdim=True).clamp_min(1e-30)
    return float(((output.float() - expected.float()).abs() / scale).max())
