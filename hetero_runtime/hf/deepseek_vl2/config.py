"""config.json of DeepSeek-VL2 as transformers' configurations: SigLIP's, a DeepSeek model's, and the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

from transformers import PreTrainedConfig, SiglipVisionConfig

from hetero_runtime.errors import CheckpointError
from hetero_runtime.hf.deepseek_vl2.language import language_config_of

MODEL_TYPE = "deepseek_vl_v2"

_VISION_DEFAULTS: dict[str, Any] = {
    "image_size": 384,
    "patch_size": 16,
    "width": 1024,
    "layers": 24,
    "heads": 16,
    "mlp_ratio": 4,
}
_PROJECTOR_DEFAULTS: dict[str, Any] = {
    "projector_type": "downsample_mlp_gelu",
    "input_dim": 1152,
    "n_embed": 2048,
    "depth": 2,
    "mlp_ratio": 1,
    "downsample_ratio": 2,
    "token_pooling": False,
}


class ProjectorShape(NamedTuple):
    """Sizes of the projector. `downsample`: patches of each direction that become one token."""

    input_size: int
    hidden_size: int
    output_size: int
    num_linear: int
    downsample: int

    @classmethod
    def of(cls, published: Mapping[str, Any]) -> Self:
        """From `projector_config` of config.json. Raises CheckpointError for another kind of projector."""
        values = _PROJECTOR_DEFAULTS | dict(published)
        if values["projector_type"] != "downsample_mlp_gelu" or values["token_pooling"]:
            raise CheckpointError(
                f"DeepSeek-VL2 with projector_type {values['projector_type']!r} and token_pooling "
                f"{values['token_pooling']} is not covered; covered is 'downsample_mlp_gelu' without "
                "pooling, which all released checkpoints have"
            )
        return cls(
            input_size=values["input_dim"],
            hidden_size=values["n_embed"] * values["mlp_ratio"],
            output_size=values["n_embed"],
            num_linear=values["depth"],
            downsample=values["downsample_ratio"],
        )


class DeepseekVL2Config(PreTrainedConfig):
    """The arguments are the keys of the published config.json. Raises CheckpointError for a variant of the
    model that was never released (see `_check_layout`, `ProjectorShape.of`, `language_config_of`)."""

    model_type = MODEL_TYPE
    sub_configs = {"vision_config": SiglipVisionConfig, "text_config": PreTrainedConfig}  # noqa: RUF012

    def __init__(
        self,
        *,
        language_config: Mapping[str, Any] | None = None,
        vision_config: Mapping[str, Any] | None = None,
        projector_config: Mapping[str, Any] | None = None,
        tile_tag: str = "2D",
        global_view_pos: str = "head",
        **others: Any,
    ) -> None:
        _check_layout(tile_tag, global_view_pos)
        self.text_config = language_config_of(language_config or {})
        self.vision_config = _vision_config(vision_config or {})
        self.projector_config = dict(projector_config or {})
        ProjectorShape.of(self.projector_config)  # refuses another kind now
        self.tile_tag, self.global_view_pos = tile_tag, global_view_pos
        super().__init__(**{"tie_word_embeddings": False, **others})

    @property
    def projector(self) -> ProjectorShape:
        """Sizes of the projector."""
        return ProjectorShape.of(self.projector_config)


def _check_layout(tile_tag: str, global_view_pos: str) -> None:
    if tile_tag != "2D" or global_view_pos not in ("head", "tail"):
        raise CheckpointError(
            f"DeepSeek-VL2 with tile_tag {tile_tag!r} and global_view_pos {global_view_pos!r} is not "
            "covered; covered are tile_tag '2D' and global_view_pos 'head' or 'tail'"
        )


def _vision_config(published: Mapping[str, Any]) -> SiglipVisionConfig:
    values = _VISION_DEFAULTS | dict(published)
    return SiglipVisionConfig(
        hidden_size=values["width"],
        intermediate_size=int(values["width"] * values["mlp_ratio"]),
        num_hidden_layers=values["layers"],
        num_attention_heads=values["heads"],
        image_size=values["image_size"],
        patch_size=values["patch_size"],
        hidden_act="gelu_pytorch_tanh",
        layer_norm_eps=1e-6,
        vision_use_head=False,
    )
