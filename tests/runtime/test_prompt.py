"""What a prompt with an image is to a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoConfig

from hetero_runtime.generation import SamplingParams
from hetero_runtime.hf.tokens import load_tokenizer
from hetero_runtime.prompt import PromptReader
from tests.architectures import build_checkpoint


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16], ids=str)
def test_pixels_come_in_the_type_of_the_model(dtype: torch.dtype | None, tmp_path: Path) -> None:
    folder = build_checkpoint("Qwen3VLMoe", tmp_path)
    config = AutoConfig.from_pretrained(folder)
    config.dtype = dtype
    reader = PromptReader(
        folder, tokenizer=load_tokenizer(folder), config=config, has_images=True, max_length=64
    )
    content = [{"type": "image", "image": Image.new("RGB", (64, 64), "teal")}, {"type": "text", "text": "?"}]
    images = reader.read([{"role": "user", "content": content}], SamplingParams(max_tokens=1)).images
    assert images is not None
    assert images["pixel_values"].dtype == (dtype or torch.float32)
    assert not images["image_grid_thw"].is_floating_point()
