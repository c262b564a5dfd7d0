"""What forecasts read and write on the device: parameters, what rows remember, and scratch.

The inputs of the convolution stand in line, so that the recursive steps overwrite nothing that is read:

    inputs   │ window, before the step │ newest │ of recursive step 1 │ 2 │ ...
                    └──── kept when the forecast is done ┘

The recurrence has two places: one for the step itself, and one that the recursive steps write over.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch

from hetero_gpu.predict.sizes import ForecastSizes
from hetero_scheduler.predict.mamba2_compiled import CompiledState, Weights
from hetero_scheduler.predict.mamba2_model import GroupModel

_MATRICES = frozenset({"project", "in_proj", "out_proj", "head"})


class DeviceWeights(NamedTuple):
    """Parameters of one group, shaped as in `hetero_scheduler.predict.mamba2_compiled.Weights`."""

    project: torch.Tensor
    project_bias: torch.Tensor
    norm: torch.Tensor
    in_proj: torch.Tensor
    conv: torch.Tensor
    conv_bias: torch.Tensor
    dt_bias: torch.Tensor
    decay: torch.Tensor
    skip: torch.Tensor
    gated_norm: torch.Tensor
    out_proj: torch.Tensor
    final_norm: torch.Tensor
    head: torch.Tensor
    head_bias: torch.Tensor

    @classmethod
    def of(cls, model: GroupModel, *, dtype: torch.dtype, device: torch.device) -> Self:
        """Copies of the parameters: matrices as `dtype`, vectors in float32."""
        host = Weights.of(model)._asdict()
        return cls(
            **{
                name: torch.from_numpy(array).to(device, dtype if name in _MATRICES else torch.float32)
                for name, array in host.items()
            }
        )


class RowMemory(NamedTuple):
    """What the rows of one group remember. float32."""

    inputs: torch.Tensor
    """`[rows, blocks, window + horizon, channels]`"""
    recurrence: torch.Tensor
    """`[2, rows, blocks, heads, head_dim, states]`: after the step, and after the newest recursive one."""

    @classmethod
    def empty(cls, sizes: ForecastSizes, *, rows: int, device: torch.device) -> Self:
        """Of texts that have not begun."""
        s = sizes
        return cls(
            torch.zeros((rows, s.blocks, s.window + s.horizon, s.channels), device=device),
            torch.zeros((2, rows, s.blocks, s.heads, s.head_dim, s.states), device=device),
        )

    def load(self, row: int, state: CompiledState) -> None:
        """Let `row` remember `state`."""
        window = state.conv.shape[-1]
        self.inputs[row, :, :window] = torch.from_numpy(state.conv).transpose(1, 2).to(self.inputs.device)
        self.recurrence[0, row] = torch.from_numpy(state.ssm).to(self.recurrence.device)

    def export(self, row: int, *, window: int) -> CompiledState:
        """What `row` remembers. Waits for the device."""
        conv = self.inputs[row, :, :window].transpose(1, 2).contiguous()
        return CompiledState(conv.cpu().numpy().copy(), self.recurrence[0, row].cpu().numpy().copy())


class Scratch(NamedTuple):
    """What one phase of a forecast leaves to the next. float32; written before it is read."""

    taken_in: torch.Tensor
    """`[rows, layers, width]`: each layer's part of the input projection."""
    hidden: torch.Tensor
    """`[rows, blocks, width]`: what went into a block."""
    mixed: torch.Tensor
    """`[rows, blocks, heads, width]`: each head's part of a block's output, not normalised yet."""
    energy: torch.Tensor
    """`[rows, blocks, heads]`: sum of squares of what the norm is taken of."""

    @classmethod
    def empty(cls, sizes: ForecastSizes, *, rows: int, device: torch.device) -> Self:
        """Of `rows` rows."""
        s = sizes
        return cls(
            torch.empty((rows, s.layers, s.width), device=device),
            torch.empty((rows, s.blocks, s.width), device=device),
            torch.empty((rows, s.blocks, s.heads, s.width), device=device),
            torch.empty((rows, s.blocks, s.heads), device=device),
        )
