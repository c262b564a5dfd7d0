"""The shapes: layers and experts of big models, everything else narrow.

Routing lives in the number of layers, experts and choices; what an expert computes does not matter to a
cache. So experts are 16 features wide, and a model of 48 layers × 128 experts has 42 M parameters, 6 M of
them active.
"""

from __future__ import annotations

from bench.models.model import Geometry

SHAPES = {
    "48x128": Geometry(
        hidden=128,
        layers=48,
        heads=4,
        kv_heads=2,
        head_dim=32,
        experts=128,
        top_k=8,
        intermediate=16,
        max_length=1024,
    ),
    "16x64": Geometry(
        hidden=128,
        layers=16,
        heads=4,
        kv_heads=2,
        head_dim=32,
        experts=64,
        top_k=8,
        intermediate=16,
        max_length=1024,
    ),
    "24x32": Geometry(
        hidden=128,
        layers=24,
        heads=4,
        kv_heads=2,
        head_dim=32,
        experts=32,
        top_k=4,
        intermediate=32,
        max_length=1024,
    ),
    "6x32": Geometry(
        hidden=64,
        layers=6,
        heads=2,
        kv_heads=1,
        head_dim=32,
        experts=32,
        top_k=4,
        intermediate=16,
        max_length=512,
    ),
}
"""By layers × experts: Qwen3-30B-A3B and OLMoE-1B-7B (top-8), GPT-OSS-20B (top-4), and one that a CPU trains
in minutes."""

PUBLISHED_LRU = {0.25: 74.0, 0.45: 88.0}
"""LRU hits in percent by residency, the mean of four big models (SeqMoE §9.3, rounded)."""
LRU_TOLERANCE = 3.0
"""Points around them within which a trace counts as matched."""
MIN_ENTROPY = 0.95
"""Load entropy below which a hit rate says more of skew than of order in time."""
