"""The smallest checkpoint of random weights that both transformers and the engine run."""

from __future__ import annotations

from bench.models.random_geometry import RandomGeometry

TINY = RandomGeometry(
    layers=2,
    hidden=64,
    experts=8,
    top_k=2,
    intermediate=32,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocab_size=300,
)
