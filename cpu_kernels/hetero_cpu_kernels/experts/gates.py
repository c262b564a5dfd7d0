"""The gate functions of `form.Gate`, written so that the compiler makes vectors of them."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
# mypy: disable-error-code="call-arg, attr-defined, var-annotated"

from __future__ import annotations

import numpy as np
from numba import njit

from hetero_cpu_kernels.addresses import float_of

_jit = njit(nogil=True, error_model="numpy", boundscheck=False)

LOG2_E = np.float32(1.44269504)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)  # their sum is ln 2
LEAST, MOST = np.float32(-87.0), np.float32(88.0)
COEFFICIENTS = tuple(np.float32(1 / n) for n in (720, 120, 24, 6, 2, 1, 1))  # Taylor, |x| <= ln 2 / 2


@_jit
def apply_gate(plan, values, outputs):
    """Gate and up values, twice as many, to `outputs`. `plan`: a `plan.PLAN`, for the gate and their order.

    Gates: 0 silu, 1 clamped_silu, 2 gpt_oss.
    """
    if plan.is_interleaved:
        _gate(plan, values[::2], values[1::2], outputs)
    else:
        _gate(plan, values[: outputs.size], values[outputs.size :], outputs)


@_jit
def _gate(plan, gates, ups, outputs):
    """One loop a function: a choice inside would keep the compiler from making vectors."""
    if plan.gate == 0:
        for i in range(outputs.size):
            outputs[i] = gates[i] * _sigmoid(gates[i]) * ups[i]
        return
    bound, slope = np.float32(plan.limit), np.float32(plan.alpha)
    slope, added = (slope, np.float32(1.0)) if plan.gate == 2 else (np.float32(1.0), np.float32(0.0))
    for i in range(outputs.size):
        # Written so that NaN stays NaN.
        g, u = gates[i], ups[i]
        g = bound if g > bound else g
        u = bound if u > bound else (-bound if u < -bound else u)
        outputs[i] = g * _sigmoid(slope * g) * (u + added)


@_jit
def _sigmoid(x):
    return np.float32(1.0) / (np.float32(1.0) + exponential(-x))


@_jit
def exponential(x):
    """e to the x for float32, to 2 units in the last place; 0 below -87, infinite above 88, NaN stays NaN."""
    held = LEAST if x < LEAST else (MOST if x > MOST else x)
    power = np.floor(held * LOG2_E + np.float32(0.5))
    rest = held - power * LN2_HIGH - power * LN2_LOW
    total = COEFFICIENTS[0]
    for number in range(1, 7):
        total = total * rest + COEFFICIENTS[number]
    total *= float_of(np.uint32((np.int32(power) + np.int32(127)) << np.int32(23)))
    return np.float32(np.inf) if x > MOST else (np.float32(0.0) if x < LEAST else total)
