"""How an image is cut into tiles, and how many tokens that makes (DeepSeek-VL2, arXiv 2412.10302, §2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MOST_TILED_IMAGES = 2
"""With more images in a prompt each is one tile, so that they do not fill the context."""


class TileGrid(NamedTuple):
    """Tiles of one image, besides its global view."""

    columns: int
    rows: int


def choose_grid(size: tuple[int, int], resolutions: Sequence[tuple[int, int]], *, tile_size: int) -> TileGrid:
    """The grid for an image of `size` (width, height): of `resolutions` the one that keeps most of its pixels
    when it is fitted in, then the one that leaves the least empty; of equals the first."""

    def merit(resolution: tuple[int, int]) -> tuple[int, int]:
        scale = min(resolution[0] / size[0], resolution[1] / size[1])
        fitted = int(size[0] * scale) * int(size[1] * scale)
        kept = min(fitted, size[0] * size[1])
        return kept, kept - resolution[0] * resolution[1]

    width, height = max(resolutions, key=merit)
    return TileGrid(width // tile_size, height // tile_size)


def num_image_tokens(grid: TileGrid, side: int) -> int:
    """Tokens of an image whose tiles are `side` x `side` tokens: both views with a newline a row, and the
    separator."""
    return side * (side + 1) + 1 + grid.rows * side * (grid.columns * side + 1)
