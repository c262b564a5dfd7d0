"""The model from its published tensors: vision, projector, layout, language part, each against plain code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hetero_runtime.errors import CheckpointError
from hetero_runtime.hf.deepseek_vl2 import DeepseekVL2Config
from hetero_runtime.hf.reference import load_reference
from tests.architectures import prompt_ids
from tests.deepseek_vl2_checkpoints import IMAGE, TILE, VARIANTS, build_deepseek_vl2, published_config
from tests.runtime.hf.deepseek_vl2.plain import laid_out, language_logits, projected, vision_features

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def load(folder: Path, dtype: str = "float32") -> Any:
    return load_reference(folder, dtype=dtype, device=torch.device("cpu"))


@torch.inference_mode()
def test_images_become_tokens(tmp_path: Path) -> None:
    folder = build_deepseek_vl2("small", tmp_path)
    model, tensors = load(folder), load_file(folder / "model.safetensors")
    grids = [(2, 3), (1, 1), (3, 1)]
    pixels = torch.randn(sum(1 + columns * rows for columns, rows in grids), 3, TILE, TILE)
    features = vision_features(tensors, pixels, heads=2)
    torch.testing.assert_close(model.vision(pixel_values=pixels).last_hidden_state, features, **TOLERANCE)
    tiles = projected(tensors, features)
    torch.testing.assert_close(model.projector(features), tiles, **TOLERANCE)
    own = tiles.split([1 + columns * rows for columns, rows in grids])
    expected = torch.cat([laid_out(tensors, part, *grid) for part, grid in zip(own, grids, strict=True)])
    torch.testing.assert_close(model.image_tokens(pixels, torch.tensor(grids)), expected, **TOLERANCE)


@torch.inference_mode()
def test_the_global_view_may_come_last(tmp_path: Path) -> None:
    model = load(build_deepseek_vl2("small", tmp_path))
    pixels, grid = torch.randn(3, 3, TILE, TILE), torch.tensor([[2, 1]])
    first = model.image_tokens(pixels, grid)
    model.config.global_view_pos = "tail"
    assert torch.equal(model.image_tokens(pixels, grid), torch.cat([first[21:], first[20:21], first[:20]]))


@torch.inference_mode()
def test_image_tokens_take_the_places_of_their_place_holders(tmp_path: Path) -> None:
    model = load(build_deepseek_vl2("tiny", tmp_path))
    pixels, grid = torch.randn(2, 3, TILE, TILE), torch.tensor([[1, 1]])
    tokens = model.image_tokens(pixels, grid)
    ids = torch.tensor([[9, *[IMAGE] * len(tokens), 10]])
    embeddings = model.get_input_embeddings()(ids)
    embeddings[0, 1:-1] = tokens
    expected = model.language(inputs_embeds=embeddings).logits
    said = model(ids, pixel_values=pixels, tile_grid=grid, image_places=ids == IMAGE).logits
    assert torch.equal(said, expected)


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_the_language_part_is_transformers_own(variant: str, tmp_path: Path) -> None:
    folder, ids = build_deepseek_vl2(variant, tmp_path), prompt_ids(19)
    config = published_config(variant)["language_config"]
    expected = language_logits(load_file(folder / "model.safetensors"), variant, config, ids[0])
    torch.testing.assert_close(load(folder)(ids).logits[0], expected, **TOLERANCE)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_tensor_is_read_and_none_is_made_up(variant: str, tmp_path: Path) -> None:
    folder = build_deepseek_vl2(variant, tmp_path)
    model = load(folder)
    loaded = sum(tensor.numel() for tensor in model.state_dict().values())
    stored = load_file(folder / "model.safetensors")
    used = {name: tensor for name, tensor in stored.items() if ".attn_pool." not in name}
    assert loaded == sum(tensor.numel() for tensor in used.values())


def test_routers_keep_their_precision(tmp_path: Path) -> None:
    """In transformers' releases that keep them in float32, below this model as anywhere."""
    model = load(build_deepseek_vl2("large", tmp_path, dtype=torch.bfloat16), "bfloat16")
    bias = model.language.model.layers[1].mlp.gate.e_score_correction_bias
    assert bias.dtype == torch.float32
    assert model.language.lm_head.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tile_tag": "1D"}, "tile_tag '1D' and global_view_pos 'head' is not covered"),
        ({"global_view_pos": "middle"}, "global_view_pos 'middle' is not"),
        ({"projector_config": {"projector_type": "identity"}}, "projector_type 'identity'"),
        ({"projector_config": {"token_pooling": True}}, "token_pooling True is not covered"),
        ({"language_config": {"topk_method": "best"}}, "topk_method 'best' with scoring_func 'softmax'"),
        (
            {"language_config": {"scoring_func": "sigmoid"}},
            "topk_method 'greedy' with scoring_func 'sigmoid'",
        ),
        ({"language_config": {"norm_topk_prob": True}}, "norm_topk_prob with topk_method 'greedy'"),
        ({"language_config": {"moe_layer_freq": 2}}, "moe_layer_freq 2 is not covered"),
        (
            {"language_config": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "use_mla": False}},
            "'noaux_tc' is covered with latent attention only",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_was_never_released_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        DeepseekVL2Config(**(published_config("small") | changes))
