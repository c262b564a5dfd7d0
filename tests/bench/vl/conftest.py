"""The tokenizer of the questions, a geometry that a CPU trains in seconds, and transformers' processors."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoImageProcessor, AutoProcessor

from bench.vl.geometry import Geometry
from bench.vl.text import make_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return make_tokenizer()


@pytest.fixture(scope="session")
def geometry() -> Geometry:
    return Geometry(
        hidden=32,
        layers=3,
        heads=2,
        kv_heads=1,
        head_dim=16,
        experts=8,
        top_k=2,
        intermediate=16,
        vision_hidden=24,
        vision_layers=2,
        vision_heads=2,
        vision_intermediate=32,
        deepstack=(0, 1),
        max_length=512,
    )


@pytest.fixture
def load_processor() -> Any:
    """`AutoProcessor.from_pretrained`, as others load the model's folder."""
    if hasattr(AutoImageProcessor, "_backends"):  # a placeholder that only says what is missing
        pytest.skip("this transformers loads image processors with torchvision alone")
    return AutoProcessor.from_pretrained
