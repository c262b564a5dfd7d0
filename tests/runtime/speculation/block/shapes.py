"""A block drafter of a few thousand parameters."""

from __future__ import annotations

from typing import Any

from hetero_runtime.speculation.block.shape import BlockShape


def tiny_shape(**changed: Any) -> BlockShape:
    """Two layers, grouped heads; fields of BlockShape as keywords."""
    fields: dict[str, Any] = {
        "hidden": 16,
        "intermediate": 24,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "windows": (None, None),
        "is_causal": (False, False),
        "block": 4,
        "target_layers": (0, 2),
        "num_target_layers": 4,
        "mask_token": 1,
        "rope_theta": 10000.0,
        "norm_eps": 1e-6,
        "context": 64,
    }
    return BlockShape(**{**fields, **changed})
