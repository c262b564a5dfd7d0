"""The contract of a fused forward, and what it is told of positions."""

from __future__ import annotations

from typing import Protocol

import torch

from hetero_runtime.hf.kv_cache import StepLayer

Tables = tuple[torch.Tensor, torch.Tensor] | torch.Tensor
"""What transformers' rotary embeddings make: cos and sin `[rows or 1, 1, n]`, or complex numbers of both."""


def cos_and_sin(tables: Tables) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row, `[rows or 1, n]`, as views."""
    if isinstance(tables, tuple):
        return tables[0][:, 0], tables[1][:, 0]
    return tables.real[:, 0], tables.imag[:, 0]


class Step(Protocol):
    """The forward of one attention layer in a step: one token a row."""

    def __call__(
        self, hidden: torch.Tensor, tables: Tables, layer: StepLayer, positions: torch.Tensor
    ) -> torch.Tensor:
        """`hidden` `[rows, 1, width]` to the same shape. Writes the tokens into `layer` at `positions`
        `[rows]`."""
