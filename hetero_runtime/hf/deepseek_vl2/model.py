"""The whole model: tiles through SigLIP and projector, their tokens among those of the text."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, SiglipVisionModel

from hetero_runtime.hf.deepseek_vl2.config import DeepseekVL2Config
from hetero_runtime.hf.deepseek_vl2.language import build_language_model
from hetero_runtime.hf.deepseek_vl2.multi_head import MultiHeadForCausalLM
from hetero_runtime.hf.deepseek_vl2.names import UNUSED, register_names
from hetero_runtime.hf.deepseek_vl2.projector import Marks, Projector, image_tokens


class DeepseekVL2ForConditionalGeneration(PreTrainedModel):
    """Parts are named as the published tensors are."""

    config_class = DeepseekVL2Config
    _supports_sdpa = True
    _supports_attention_backend = True
    _keys_to_ignore_on_load_unexpected = list(UNUSED)  # noqa: RUF012

    def __init__(self, config: DeepseekVL2Config) -> None:
        super().__init__(config)
        self.vision = SiglipVisionModel._from_config(config.vision_config)
        self.projector = Projector(config.projector)
        self.image_newline = nn.Parameter(torch.empty(config.projector.output_size))
        self.view_separator = nn.Parameter(torch.empty(config.projector.output_size))
        self.language = build_language_model(config.text_config)
        self.post_init()  # type: ignore[no-untyped-call]

    def get_input_embeddings(self) -> nn.Module:
        return self.language.get_input_embeddings()

    def forward(
        self,
        input_ids: torch.Tensor,
        pixel_values: torch.Tensor | None = None,
        tile_grid: torch.Tensor | None = None,
        image_places: torch.Tensor | None = None,
        **language: Any,
    ) -> Any:
        """What the language part says to `input_ids` `[rows, n]`.

        `pixel_values` `[tiles, 3, side, side]`: of each image its global view, then its tiles row by row;
        `tile_grid` `[images, 2]`: columns and rows of tiles; `image_places` bool `[rows, n]`: where their
        tokens stand, row by row. `language`: the language part's own arguments (its cache among them).
        """
        embeddings = self.get_input_embeddings()(input_ids)
        if pixel_values is not None:
            assert tile_grid is not None and image_places is not None, "images without their grid or places"
            tokens = self.image_tokens(pixel_values, tile_grid)
            assert len(tokens) == int(image_places.sum()), "places for another number of image tokens"
            embeddings = embeddings.masked_scatter(image_places[..., None], tokens)
        return self.language(inputs_embeds=embeddings, **language)

    def image_tokens(self, pixel_values: torch.Tensor, tile_grid: torch.Tensor) -> torch.Tensor:
        """Tokens of all images, one after another, `[tokens, hidden]`; arguments as of `forward`."""
        tiles = self.projector(self.vision(pixel_values=pixel_values).last_hidden_state)
        marks = Marks(self.image_newline, self.view_separator, self.config.global_view_pos == "head")
        grids = tile_grid.tolist()
        of_images = tiles.split([1 + columns * rows for columns, rows in grids])
        return torch.cat(
            [
                image_tokens(own, columns, rows, marks=marks)
                for own, (columns, rows) in zip(of_images, grids, strict=True)
            ]
        )


register_names(DeepseekVL2ForConditionalGeneration.__name__, like_deepseek_v2=MultiHeadForCausalLM.__name__)
