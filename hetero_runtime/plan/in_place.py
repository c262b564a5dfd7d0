"""What the CPU takes to compute experts where they lie: room to work in, and no copy of their weights but by
kt-kernel."""

from __future__ import annotations

import math

from hetero_runtime.config.tree import CpuBackend
from hetero_runtime.plan.geometry import Geometry

CALL_BYTES = 64 << 20
"""Activations that the native kernels lay out for one call; more work is computed in several."""
_LEAST_PAIRS = 64
_LAYOUT_BYTES = 12
"""Of one value: float32, laid out for few and for many tokens, in memory that grows by half."""
_CODE_BYTES = 120 << 20
"""The compiler and what it makes of the kernels, measured and rounded up."""
_SCRATCH_TOKENS = 1024
"""Tokens of one expert in one call."""
_SCRATCH_ROWS = 32
_F32 = 4
KT_TOP_K = 8
"""Experts of a row of kt-kernel's calls; a token with more takes several rows."""
KT_ROWS = 256
"""Of a call; more are computed in several."""
_KT_COPIES = {"int4": 2.3}
"""kt-kernel's own memory for weights, over the bank's, where it is not once."""
_KT_ROW_BYTES = 14
"""Of its activations: for a value of a (token, expert) pair, all layouts together."""
_KT_EXPERT_ROWS = 32
"""Rows that it rounds each expert up to."""


def in_place_pairs(hidden: int, intermediate: int) -> int:
    """(token, expert) pairs of one call of the native kernels."""
    return max(_LEAST_PAIRS, CALL_BYTES // (_LAYOUT_BYTES * (hidden + intermediate)))


def in_place_bytes(
    geometry: Geometry, *, backend: CpuBackend, workers: int, tokens: int, itemsize: int
) -> int:
    """Bytes of host memory to compute experts for `tokens` tokens; `itemsize`: of the model's dtype."""
    hidden, inner = geometry.hidden_size, geometry.moe_intermediate_size
    sums = 3 * _F32 * tokens * hidden  # what goes in, what comes out, and one more sum on its way
    if backend == "torch":
        expert = 3 * hidden * inner * (itemsize + _F32)  # one that is decoded, by way of float32
        return sums + tokens * (2 * hidden + 3 * inner) * itemsize + expert
    if backend == "ktransformers":
        copy = math.ceil(geometry.bank_bytes * _KT_COPIES.get(geometry.expert_dtype, 1))
        rows = KT_ROWS * KT_TOP_K + _KT_EXPERT_ROWS * geometry.num_experts
        return copy + sums + rows * _KT_ROW_BYTES * (hidden + inner)
    pairs = min(tokens * geometry.top_k, in_place_pairs(hidden, inner))
    scratch = workers * _F32 * _SCRATCH_ROWS * (2 * _SCRATCH_TOKENS + hidden)
    return _CODE_BYTES + sums + pairs * _LAYOUT_BYTES * (hidden + inner) + scratch
