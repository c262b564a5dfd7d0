"""Images of a prompt as the model's own inputs, by processors that need no torchvision."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from hetero_runtime.errors import CheckpointError, RequestError
from hetero_runtime.hf.deepseek_vl2 import DeepseekVL2Config
from hetero_runtime.hf.deepseek_vl2.chat import IMAGE_TOKEN
from hetero_runtime.hf.deepseek_vl2.processor import TileProcessor

if TYPE_CHECKING:
    from PIL import Image


class ImageProcessor(Protocol):
    """What the images of one prompt are to a model: first how many tokens, then the inputs themselves."""

    def num_tokens(self, images: Sequence[Image.Image]) -> list[int]:
        """Tokens of each image, from sizes alone. Raises RequestError for an image that the model refuses."""

    def inputs(self, ids: Sequence[int], images: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
        """What the model's forward takes besides `ids`, a prompt with as many tokens as `num_tokens` says
        where each image stands."""


def make_image_processor(path: Path, config: Any, tokenizer: Any) -> ImageProcessor:
    """The image processor of the checkpoint at `path`; `config`: the model's transformers config.

    Raises CheckpointError when the checkpoint does not say how its images are prepared.
    """
    token = image_token_id(config, tokenizer)
    return TileProcessor(path, config, token) if _has_tiles(config) else GridProcessor(path, token)


def image_token_id(config: Any, tokenizer: Any) -> int:
    """The token that stands for an image, or for a part of one. `config`: the model's transformers config."""
    return int(tokenizer.convert_tokens_to_ids(IMAGE_TOKEN) if _has_tiles(config) else config.image_token_id)


def _has_tiles(config: Any) -> bool:
    return isinstance(config, DeepseekVL2Config)


class GridProcessor:
    """For models like Qwen-VL: an image is a grid of patches, `merge_size` squared of them a token."""

    def __init__(self, path: Path, token: int) -> None:
        self._token = token
        try:
            self._processor: Any = AutoImageProcessor.from_pretrained(
                path, local_files_only=True, backend="pil"
            )
        except (OSError, ValueError, ImportError) as error:
            raise CheckpointError(
                f"{path}: its image processor cannot be read ({error}). Copy preprocessor_config.json from "
                "where the model came from."
            ) from error

    def num_tokens(self, images: Sequence[Image.Image]) -> list[int]:
        return [self._num_patches(image) // self._processor.merge_size**2 for image in images]

    def inputs(self, ids: Sequence[int], images: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
        pixels = self._processor(images=list(images), return_tensors="pt")
        return {
            "pixel_values": pixels["pixel_values"],
            "image_grid_thw": pixels["image_grid_thw"],
            "mm_token_type_ids": (torch.tensor([list(ids)]) == self._token).int(),
        }

    def _num_patches(self, image: Image.Image) -> int:
        try:
            return int(self._processor.get_number_of_image_patches(image.height, image.width))
        except ValueError as error:
            raise RequestError(
                f"the model's image processor refuses an image of {image.width} x {image.height} pixels: "
                f"{error}"
            ) from error
