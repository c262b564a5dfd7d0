"""Image processors say beforehand how many tokens an image takes, and need no torchvision."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from hetero_runtime.errors import RequestError
from hetero_runtime.hf.images import ImageProcessor, make_image_processor

IMAGE = 7
PUBLISHED = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
"""preprocessor_config.json of Qwen3-VL-30B-A3B; `Fast` names the processor that needs torchvision."""


@pytest.fixture
def processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImageProcessor:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PUBLISHED))
    return make_image_processor(tmp_path, SimpleNamespace(image_token_id=IMAGE), tokenizer=None)


@pytest.mark.parametrize("size", [(1, 1), (64, 48), (640, 480), (333, 777), (2000, 31)], ids=str)
def test_tokens_are_known_from_the_size(size: tuple[int, int], processor: ImageProcessor) -> None:
    image = Image.new("RGB", size, "teal")
    (num_tokens,) = processor.num_tokens([image])
    ids = [1, *[IMAGE] * num_tokens, 2]
    inputs = processor.inputs(ids, [image])
    assert int(inputs["image_grid_thw"].prod()) == len(inputs["pixel_values"]) == num_tokens * 4
    assert inputs["mm_token_type_ids"].tolist() == [[0, *[1] * num_tokens, 0]]


def test_a_strip_is_refused(processor: ImageProcessor) -> None:
    with pytest.raises(RequestError, match="refuses an image of 1 x 500 pixels"):
        processor.num_tokens([Image.new("RGB", (1, 500))])
