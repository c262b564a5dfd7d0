"""Images as DeepSeek-VL2 takes them: a global view and tiles, by PIL alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hetero_runtime.errors import CheckpointError
from hetero_runtime.hf.deepseek_vl2.config import DeepseekVL2Config
from hetero_runtime.hf.deepseek_vl2.tiles import MOST_TILED_IMAGES, TileGrid, choose_grid, num_image_tokens

if TYPE_CHECKING:
    from PIL import Image

FILE = "processor_config.json"
_COPY = f"Copy {FILE} from where the model came from."
_COVERED = {"sft_format": "deepseek", "normalize": True}
"""Settings that have one value in all released checkpoints, which is what `chat` and this module do."""


class TileProcessor:
    """See `hf.images.ImageProcessor`. `token`: the one that stands for a part of an image."""

    def __init__(self, path: Path, config: DeepseekVL2Config, token: int) -> None:
        self._token = token
        settings = read_settings(path)
        try:
            self._resolutions = [
                (int(width), int(height)) for width, height in settings["candidate_resolutions"]
            ]
            self._mean = np.asarray(settings["image_mean"], dtype=np.float32)
            self._std = np.asarray(settings["image_std"], dtype=np.float32)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{path / FILE}: does not say how images are prepared ({error!r}). {_COPY}"
            ) from error
        vision: Any = config.vision_config
        self._tile_size = int(vision.image_size)
        patches = self._tile_size // int(vision.patch_size)
        self._side = -(-patches // config.projector.downsample)

    def num_tokens(self, images: Sequence[Image.Image]) -> list[int]:
        return [num_image_tokens(grid, self._side) for grid in self._grids(images)]

    def inputs(self, ids: Sequence[int], images: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
        grids = self._grids(images)
        views = [self._views(image, grid) for image, grid in zip(images, grids, strict=True)]
        return {
            "pixel_values": torch.from_numpy(np.concatenate(views)),
            "tile_grid": torch.tensor(grids),
            "image_places": torch.tensor([list(ids)]) == self._token,
        }

    def _grids(self, images: Sequence[Image.Image]) -> list[TileGrid]:
        if len(images) > MOST_TILED_IMAGES:
            return [TileGrid(1, 1)] * len(images)
        return [choose_grid(image.size, self._resolutions, tile_size=self._tile_size) for image in images]

    def _views(self, image: Image.Image, grid: TileGrid) -> Any:
        """The global view, then tiles row by row, `[1 + tiles, 3, size, size]` float32."""
        size = self._tile_size
        whole = self._fitted(image, TileGrid(1, 1))
        cut = self._fitted(image, grid).reshape(3, grid.rows, size, grid.columns, size)
        return np.concatenate([whole[None], cut.transpose(1, 3, 0, 2, 4).reshape(-1, 3, size, size)])

    def _fitted(self, image: Image.Image, grid: TileGrid) -> Any:
        """`image` fitted into `grid`, around it the colour of the mean; normalised. `[3, height, width]`"""
        from PIL import ImageOps

        red, green, blue = (int(each * 255) for each in self._mean.tolist())
        size = (grid.columns * self._tile_size, grid.rows * self._tile_size)
        pixels = np.asarray(ImageOps.pad(image, size, color=(red, green, blue)), dtype=np.float32) / 255
        return ((pixels - self._mean) / self._std).transpose(2, 0, 1)


def read_settings(path: Path) -> dict[str, Any]:
    """processor_config.json of the checkpoint at `path`. Raises CheckpointError when it cannot be read."""
    try:
        settings = json.loads((path / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / FILE}: cannot be read ({error}). {_COPY}") from error
    if not isinstance(settings, dict):
        raise CheckpointError(f"{path / FILE}: is not a JSON object. {_COPY}")
    for name, covered in _COVERED.items():
        if settings.get(name, covered) != covered:
            raise CheckpointError(
                f"{path / FILE}: {name} is {settings[name]!r}, which is not covered; covered is {covered!r}"
            )
    return settings
