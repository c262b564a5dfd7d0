"""DeepSeek-VL2: an image is many tiles, laid out with newlines and a separator, which are never dropped.

attention     a tile at a time, [tiles, patches]; an odd side ends in a token of fewer patches
saliency      mean over a token's patches, laid out as the tokens are, marks in between left out
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.models.siglip.modeling_siglip import SiglipAttention

from hetero_runtime.hf.deepseek_vl2.projector import Marks, image_tokens
from hetero_runtime.hf.visual.base import Images, VisualPart


class DeepseekVL2Part(VisualPart):
    """`model`: our DeepseekVL2ForConditionalGeneration."""

    def __init__(self, model: Any) -> None:
        config = model.config
        self._vision = model.vision
        self._patches = config.vision_config.image_size // config.vision_config.patch_size  # of a tile's side
        self._downsample = config.projector.downsample
        mark = torch.full((1,), torch.nan)
        self._marks = Marks(mark, mark, config.global_view_pos == "head")

    @property
    def attention(self) -> nn.Module:
        return [module for module in self._vision.modules() if isinstance(module, SiglipAttention)][-1]

    def positions(self, ids: torch.Tensor, images: Images) -> list[torch.Tensor]:
        places = images["image_places"][0].nonzero()[:, 0]
        num_tiles = int((images["tile_grid"].prod(-1) + 1).sum())
        laid_out = self._laid_out(torch.zeros(num_tiles, self._patches**2), images)
        of_images = places.split([len(tokens) for tokens in laid_out])
        return [own[~tokens.isnan().to(own.device)] for own, tokens in zip(of_images, laid_out, strict=True)]

    def saliency(self, received: Sequence[torch.Tensor], images: Images) -> list[torch.Tensor]:
        laid_out = self._laid_out(torch.cat(list(received)).cpu(), images)
        return [tokens[~tokens.isnan()] for tokens in laid_out]

    def _laid_out(self, of_patches: torch.Tensor, images: Images) -> list[torch.Tensor]:
        """For each image one value a token, nan for marks, `[tokens]`. `of_patches`: `[tiles, patches]`"""
        grid = of_patches.view(-1, 1, self._patches, self._patches)
        # a window over the edge is divided by the patches that it has
        tiles = functional.avg_pool2d(grid, self._downsample, ceil_mode=True)[:, 0, :, :, None]
        grids = images["tile_grid"].tolist()
        of_images = tiles.split([1 + columns * rows for columns, rows in grids])
        return [
            image_tokens(own, columns, rows, marks=self._marks)[:, 0]
            for own, (columns, rows) in zip(of_images, grids, strict=True)
        ]
