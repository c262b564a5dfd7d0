"""Gated MLPs in two launches instead of five: dense layers, and experts that all tokens share.

Whether a module is one comes out of comparing it with the kernels, with its own weights, not out of its name.
"""

from __future__ import annotations

from typing import Any

import torch

from hetero_gpu.gated import gated_linear
from hetero_gpu.linear import linear
from hetero_runtime.hf.sameness import TOLERANCE, relative_error

_PARTS = ("gate_proj", "up_proj", "down_proj")
_SCALES = (1.0, 0.1, 30.0)
"""Of the tokens that are compared, one each: the last is told apart by modules that limit what they gate."""


class GatedMlp:
    """The forward of a gated MLP. More rows than the kernels take go as before, by torch."""

    is_small_op = True

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` `[..., width]` to the same shape."""
        module, rows = self._module, x.reshape(-1, x.shape[-1])
        inner = gated_linear(rows, module.gate_proj.weight, module.up_proj.weight)
        return linear(inner, module.down_proj.weight, module.down_proj.bias).view(x.shape)


def may_be_gated_mlp(module: Any) -> bool:
    """Whether `module` has the parts of one, as plain products."""
    parts = [getattr(module, name, None) for name in _PARTS]
    if any(type(part) is not torch.nn.Linear for part in parts):
        return False
    return all(part.bias is None for part in parts[:2])  # type: ignore[union-attr]


def gated_mlp(module: Any) -> GatedMlp | None:
    """The forward that says what `module` says, a module of these parts; None: it computes another thing."""
    weight, forward = module.gate_proj.weight, GatedMlp(module)
    scales = torch.tensor(_SCALES, device=weight.device, dtype=weight.dtype)
    hidden = torch.randn(len(_SCALES), weight.shape[1], device=weight.device, dtype=weight.dtype)
    hidden *= scales[:, None]
    is_same = relative_error(forward(hidden), module(hidden)) <= 2 * TOLERANCE[weight.dtype]
    return forward if is_same else None
