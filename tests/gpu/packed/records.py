"""Records for the tests of packing: weights as models have them, with whatever a test puts among them."""

from __future__ import annotations

import numpy as np

from hetero_gpu.packed.layout import CHUNK_ELEMENTS
from hetero_gpu.packed.reference import Bytes

SPECIAL = np.array(
    [0x0000, 0x8000, 0x0001, 0x807F, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F7F, 0x0080], dtype=np.uint16
)
"""Both zeros, denormals, both infinities, NaNs, the largest and the least normal number."""

SIZES = (32, 2048, CHUNK_ELEMENTS, CHUNK_ELEMENTS + 32, 3 * CHUNK_ELEMENTS - 96)
"""Elements: one group, a page, a chunk, one with the shortest tail, one with a long tail."""


def bf16(values: np.ndarray) -> np.ndarray:
    """Values cut to bf16, as bits, uint16."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def weights(num_elements: int, *, seed: int = 0) -> np.ndarray:
    """uint16 `[num_elements]`: two matrices of different scale, SPECIAL at chunk borders and at the ends."""
    rng = np.random.default_rng(seed)
    elements = bf16(rng.standard_normal(num_elements) * 0.02)
    elements[num_elements // 2 :] = bf16(rng.standard_normal(num_elements - num_elements // 2) * 3.0)
    for border in range(0, num_elements + 1, CHUNK_ELEMENTS):
        around = range(max(0, border - len(SPECIAL)), min(num_elements, border + len(SPECIAL)))
        elements[list(around)] = rng.choice(SPECIAL, len(around))
    elements[-len(SPECIAL) :] = SPECIAL
    return elements


def as_bytes(elements: np.ndarray) -> Bytes:
    """uint8 `[2 n]`"""
    return np.ascontiguousarray(elements).view(np.uint8)
