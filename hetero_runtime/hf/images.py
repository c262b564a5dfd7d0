"""Images of a prompt as the model's own inputs, by transformers' image processor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from hetero_runtime.errors import CheckpointError, RequestError

if TYPE_CHECKING:
    from PIL import Image


class ImagePrompt(NamedTuple):
    """`ids`: the prompt, one place-holder for each image token; `inputs`: pixels and grids."""

    ids: tuple[int, ...]
    inputs: dict[str, torch.Tensor]


class ImageProcessor:
    """Turns PIL images into the inputs of a Qwen-VL-like model. `config`: the model's transformers config."""

    def __init__(self, path: Path, config: Any) -> None:
        self._token = int(config.image_token_id)
        try:
            self._processor = AutoImageProcessor.from_pretrained(path, local_files_only=True, backend="pil")
        except (OSError, ValueError, ImportError) as error:
            raise CheckpointError(
                f"{path}: its image processor cannot be read ({error}). Copy preprocessor_config.json from "
                "where the model came from."
            ) from error

    def prepare(self, ids: Sequence[int], images: Sequence[Image.Image]) -> ImagePrompt:
        """Give each image's single place-holder in `ids` as many tokens as the image has."""
        if ids.count(self._token) != len(images):
            raise RequestError(
                f"the prompt has {ids.count(self._token)} image place-holders and {len(images)} images; "
                "give one image for each place-holder"
            )
        try:
            pixels = self._processor(images=list(images), return_tensors="pt")
        except ValueError as error:
            sizes = ", ".join(f"{image.width} x {image.height}" for image in images)
            raise RequestError(
                f"the model's image processor refuses an image of {sizes} pixels: {error}"
            ) from error
        num_tokens = iter(pixels["image_grid_thw"].prod(-1) // self._processor.merge_size**2)
        expanded: list[int] = []
        for token in ids:
            expanded += [token] * (int(next(num_tokens)) if token == self._token else 1)
        tokens = torch.tensor([expanded])
        inputs = {
            "pixel_values": pixels["pixel_values"],
            "image_grid_thw": pixels["image_grid_thw"],
            "mm_token_type_ids": (tokens == self._token).int(),
        }
        return ImagePrompt(tuple(expanded), inputs)
