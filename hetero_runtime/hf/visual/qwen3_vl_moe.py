"""Qwen3-VL: an encoder whose patches are merged two by two, and features of it between decoder layers.

patches   4 5 6 7 | 8 9 ..        the encoder's order puts what is merged side by side
tokens      1     |   2 ..        saliency of a token: the mean over its patches
decoder   layer 0 ─ + features ─ layer 1 ─ + features ─ ..     DeepStack, at the places of visual tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hetero_runtime.hf.token_cut import TokenCut
from hetero_runtime.hf.visual.base import Images, VisualPart
from hetero_runtime.hf.visual.sizes import add_features_to


class Qwen3VLMoePart(VisualPart):
    """`model`: Qwen3VLMoeForConditionalGeneration."""

    def __init__(self, model: Any) -> None:
        self._image_token = int(model.config.image_token_id)
        self._visual, self._text = model.model.visual, model.model.language_model

    @property
    def attention(self) -> nn.Module:
        module: nn.Module = self._visual.blocks[-1].attn
        return module

    def positions(self, ids: torch.Tensor, images: Images) -> list[torch.Tensor]:
        all_images = (ids == self._image_token).nonzero()[:, 0]
        return list(all_images.split(self._num_tokens(images)))

    def saliency(self, received: Sequence[torch.Tensor], images: Images) -> list[torch.Tensor]:
        patches = torch.cat([call.reshape(-1) for call in received])
        merged = patches.view(-1, self._visual.spatial_merge_unit).mean(dim=1)
        return list(merged.split(self._num_tokens(images)))

    def follow(self, cut: TokenCut) -> None:
        add_features_to(self._text, kept=lambda: cut.kept)

    def _num_tokens(self, images: Images) -> list[int]:
        num_tokens: list[int] = (
            images["image_grid_thw"].prod(-1) // self._visual.spatial_merge_unit
        ).tolist()
        return num_tokens
