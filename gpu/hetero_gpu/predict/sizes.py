"""The sizes of one group's model, as its kernel is compiled for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import triton

from hetero_scheduler.predict.mamba2_model import GroupShape

_ELEMENTS_OF_A_WARP = 2048
"""Of the largest tile of weights that a program holds: 64 registers a thread."""
_FEWEST_WARPS, _MOST_WARPS = 4, 16


@dataclass(frozen=True)
class ForecastSizes:
    """Numbers of things; those of a mixer as in `Mamba2Sizes`."""

    layers: int
    """Of the group."""
    experts: int
    top_k: int
    horizon: int
    """Steps that are foreseen, the next one included."""
    blocks: int
    width: int
    """Features between the blocks."""
    heads: int
    head_dim: int
    states: int
    """What a row of a head remembers."""
    window: int
    """Inputs that the convolution reads before the newest."""

    @classmethod
    def of(cls, shape: GroupShape, *, horizon: int) -> Self:
        """The sizes of a model that looks `horizon` steps ahead."""
        return cls(
            layers=shape.num_layers,
            experts=shape.num_experts,
            top_k=shape.top_k,
            horizon=horizon,
            blocks=shape.num_blocks,
            width=shape.sizes.d_model,
            heads=shape.sizes.num_heads,
            head_dim=shape.sizes.head_dim,
            states=shape.sizes.state_size,
            window=shape.sizes.conv_kernel - 1,
        )

    @property
    def channels(self) -> int:
        """Of the convolution: x of all heads, B and C."""
        return self.heads * self.head_dim + 2 * self.states

    def phases(self, steps: range) -> tuple[int, int]:
        """The first phase of `steps`, and that after their last. Before step 0 routing is read; in each step
        every block mixes, then experts are predicted."""
        first, last = (1 + step * (self.blocks + 1) for step in (steps.start, steps.stop))
        return (first if steps.start else 0), last

    @property
    def num_warps(self) -> int:
        """Enough to hold the weights that one program asks for at once."""
        outputs = max(self.experts, self.head_dim, self.states)
        elements = triton.next_power_of_2(self.width) * triton.next_power_of_2(outputs)
        return int(min(_MOST_WARPS, max(_FEWEST_WARPS, elements // _ELEMENTS_OF_A_WARP)))
