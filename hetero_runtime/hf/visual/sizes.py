"""What follows from the sizes of images is made on the host, which knows them.

    sizes, kinds of tokens ── stay on the host ─┬─► positions of a prompt's tokens
                                                └─► tables of the encoder ──► device
    images, ids ──────────────────────────────────────────────────────────► device

Where a device has the sizes, transformers asks it for them many times in a pass, and each time the host waits
for all that it has submitted. As here, the whole encoder is submitted while the device computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
)

from hetero_runtime.hf.visual.base import Images, is_qwen3_vl

_OF_THE_HOST = ("image_grid_thw", "mm_token_type_ids", "tile_grid")
"""Inputs of which a model reads the values, not only computes with them."""


def images_on(device: torch.device, images: Images) -> dict[str, torch.Tensor]:
    """`images`, the model's own inputs, where it wants them: on `device`, but for what the host reads."""
    return {name: tensor if name in _OF_THE_HOST else tensor.to(device) for name, tensor in images.items()}


class ImagePositions(NamedTuple):
    """Of the tokens of a prompt with images. `positions` int64 `[3, 1, n]` (time, height, width), on the
    device; a text token after them has the number of those before it plus `offset`, in all three."""

    positions: torch.Tensor
    offset: int


def image_positions(model: Any, ids: torch.Tensor, images: Images) -> ImagePositions:
    """Of the prompt `ids` `[n]`, as `model`, one with image positions, has them."""
    positions, offset = model.model.get_rope_index(
        ids[None].cpu(),
        image_grid_thw=images["image_grid_thw"].cpu(),
        mm_token_type_ids=images["mm_token_type_ids"].cpu(),
    )
    return ImagePositions(positions.to(ids.device), int(offset))


def read_sizes_on_host(model: Any) -> None:
    """From now on passes of `model` over images ask the device for nothing. Its images are as many tokens as
    their sizes say: nobody checks that on the way. Another model than Qwen3-VL is left alone."""
    if not is_qwen3_vl(model):
        return
    seen: Any = model.model
    seen.visual.register_forward_pre_hook(_Tables(), with_kwargs=True)
    find = seen.get_placeholder_mask

    def find_unchecked(input_ids: torch.Tensor, inputs_embeds: torch.Tensor, **_features: Any) -> Any:
        return find(input_ids, inputs_embeds=inputs_embeds)

    seen.get_placeholder_mask = find_unchecked
    add_features_to(seen.language_model, kept=lambda: None)


def add_features_to(text: Any, *, kept: Callable[[], torch.Tensor | None]) -> None:
    """From now on `text`, Qwen3-VL's decoder, adds features of images to its first layers as transformers
    does, without asking where they stand. `kept`: places of the tokens that went on, None for all."""

    def add(hidden: torch.Tensor, is_image: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        added = hidden.new_zeros((*is_image.shape, hidden.shape[-1]))
        added = added.masked_scatter(is_image[..., None], features.to(hidden.dtype))
        places = kept()
        return hidden + (added if places is None else added[:, places])

    text._deepstack_process = add


class _Tables:
    """Before the encoder runs: gives it what it would make of the sizes. Images often have the sizes of the
    last ones, and then it has that already."""

    def __init__(self) -> None:
        self._key: tuple[object, ...] = ()
        self._tables: dict[str, torch.Tensor] = {}

    def __call__(self, encoder: Any, arguments: tuple[torch.Tensor], named: dict[str, Any]) -> Any:
        sizes, device = named["grid_thw"].cpu(), arguments[0].device
        key = (device, *sizes.flatten().tolist())
        if key != self._key:
            self._key, self._tables = key, _tables(encoder, sizes, device)
        return arguments, {**named, **self._tables}


def _tables(encoder: Any, sizes: torch.Tensor, device: torch.device) -> dict[str, torch.Tensor]:
    """By the names under which transformers takes them. `sizes` `[images, 3]`."""
    merge = encoder.config.spatial_merge_size
    indices, weights = get_vision_interpolation_indices_and_weights(
        sizes,
        encoder.num_grid_per_side,
        mode=encoder.interpolation_mode,
        align_corners=encoder.interpolation_align_corners,
        spatial_merge_size=merge,
    )
    return {
        "interp_indices": indices.to(device),
        "interp_weights": weights.to(device),
        "position_ids": get_vision_position_ids(sizes, merge).to(device),
        "cu_seqlens": get_vision_cu_seqlens(sizes),  # its values are read, nothing else
    }
