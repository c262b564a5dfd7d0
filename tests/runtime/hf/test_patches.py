"""Patches embedded by a product are those that transformers' convolution embeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_runtime.hf.sameness import TOLERANCE, relative_error
from hetero_runtime.hf.visual import embed_by_product
from tests.architectures import build_checkpoint, image_inputs, reference_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that sees."""
    return build_checkpoint("Qwen3VLMoe", tmp_path_factory.mktemp("Qwen3VLMoe"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_product_is_the_convolution_and_no_convolution_runs(
    dtype: torch.dtype, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embed: Any = reference_model(folder).to(dtype).model.visual.patch_embed
    model: Any = reference_model(folder).to(dtype)
    embed_by_product(model)
    pixels = image_inputs()["pixel_values"]
    with torch.inference_mode():
        expected = embed(pixels)
        monkeypatch.setattr(torch.nn.functional, "conv3d", None)  # whoever calls it fails
        embedded = model.model.visual.patch_embed(pixels)
    assert relative_error(embedded, expected) < TOLERANCE[dtype]


def test_patches_of_another_size_are_refused(folder: Path) -> None:
    model: Any = reference_model(folder).to(torch.bfloat16)
    embed_by_product(model)
    convolution = model.model.visual.patch_embed.proj
    with pytest.raises(AssertionError, match="patches"):
        convolution(torch.zeros(1, *convolution.weight.shape[1:4], 2 * convolution.weight.shape[4]))


@pytest.mark.parametrize("name", ["Qwen3Moe", "Qwen3VLMoe"])
def test_float32_and_text_alone_are_left_alone(name: str, tmp_path: Path) -> None:
    model = reference_model(build_checkpoint(name, tmp_path))
    embed_by_product(model)
    assert not any("forward" in vars(module) for module in model.modules())
