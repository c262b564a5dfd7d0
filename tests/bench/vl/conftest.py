"""The tokenizer of the questions, and a geometry that a CPU trains in seconds."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from bench.vl.model import Geometry
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
