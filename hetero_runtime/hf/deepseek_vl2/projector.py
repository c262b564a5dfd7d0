"""From the patches of tiles to the tokens of images.

A tile of 27 x 27 patches, padded to 28 x 28, becomes 14 x 14 tokens. An image is seen whole (global view) and
in tiles; `n` is the learned newline that ends a row, `|` the learned separator (paper, figure 3):

    global view      tiles, put together
    g g n            a a b b n
    g g n      |     a a b b n
                     c c d d n
                     c c d d n
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from hetero_runtime.hf.deepseek_vl2.config import ProjectorShape


class Projector(nn.Module):
    """Neighbouring patches side by side, then linear layers with GELU between them."""

    def __init__(self, shape: ProjectorShape) -> None:
        super().__init__()
        self._downsample = shape.downsample
        sizes = [shape.input_size * shape.downsample**2, *[shape.hidden_size] * (shape.num_linear - 1)]
        layers: list[nn.Module] = []
        for size, following in zip(sizes, [*sizes[1:], shape.output_size], strict=True):
            layers += [nn.Linear(size, following), nn.GELU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """`[tiles, side * side, input]` to `[tiles, side', side', output]`, side' the rounded-up half."""
        tiles, num_patches, size = patches.shape
        side, step = round(num_patches**0.5), self._downsample
        grid = functional.pad(patches.view(tiles, side, side, size), (0, 0, 0, -side % step, 0, -side % step))
        fewer = grid.shape[1] // step
        blocks = grid.view(tiles, fewer, step, fewer, step, size).permute(0, 1, 3, 5, 2, 4)
        tokens: torch.Tensor = self.layers(blocks.reshape(tiles, fewer, fewer, size * step * step))
        return tokens


class Marks(NamedTuple):
    """The learned tokens of the layout, `[size]` each. `is_global_first`: the global view comes first."""

    newline: torch.Tensor
    separator: torch.Tensor
    is_global_first: bool


def image_tokens(tiles: torch.Tensor, columns: int, rows: int, *, marks: Marks) -> torch.Tensor:
    """The tokens of one image. `tiles`: `[1 + columns * rows, side, side, size]`, the global view first, then
    row by row; returns `[tokens, size]` (see the module docstring)."""
    side, size = tiles.shape[1], tiles.shape[-1]
    local = tiles[1:].view(rows, columns, side, side, size).transpose(1, 2)
    views = [
        _with_newlines(tiles[0], marks.newline),
        marks.separator[None],
        _with_newlines(local.reshape(rows * side, columns * side, size), marks.newline),
    ]
    return torch.cat(views if marks.is_global_first else views[::-1])


def _with_newlines(grid: torch.Tensor, newline: torch.Tensor) -> torch.Tensor:
    """`[height, width, size]` to `[height * (width + 1), size]`."""
    height, _, size = grid.shape
    return torch.cat([grid, newline.expand(height, 1, size)], dim=1).flatten(0, 1)
