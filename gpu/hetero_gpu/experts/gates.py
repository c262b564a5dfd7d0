"""Between the two projections: which rows of `up` belong together, and what becomes of their outputs."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
# ruff: noqa: N803, N806, RET505 (upper case marks what the compiler knows; a branch on it needs its else)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gate_rows(block, OUTPUTS: tl.constexpr, FORM: tl.constexpr):
    """Rows of `up` for one block of outputs, and which of them exist: both `[2 * OUTPUTS]`.

    In the order of memory, so that neighbours are read together: g u g u where they alternate there, else
    all g and then all u.
    """
    i = tl.arange(0, 2 * OUTPUTS)
    if FORM.gate.is_interleaved:
        rows = block * (2 * OUTPUTS) + i
        return rows, rows < FORM.up.rows
    else:
        outputs = block * OUTPUTS + i % OUTPUTS
        return (i // OUTPUTS) * FORM.down.cols + outputs, outputs < FORM.down.cols


@triton.jit
def activate(y, FORM: tl.constexpr):
    """`layout.Gate`: a projection `[2 * OUTPUTS, N]`, rows as `gate_rows` gave them, to `[OUTPUTS, N]`."""
    OUTPUTS: tl.constexpr = y.shape[0] // 2
    N: tl.constexpr = y.shape[1]
    if FORM.gate.is_interleaved:
        gate, up = tl.split(tl.permute(tl.reshape(y, (OUTPUTS, 2, N)), (0, 2, 1)))
    else:
        gate, up = tl.split(tl.permute(tl.reshape(y, (2, OUTPUTS, N)), (1, 2, 0)))
    if FORM.gate.function != "silu":
        gate = tl.minimum(gate, FORM.gate.limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -FORM.gate.limit, FORM.gate.limit, propagate_nan=tl.PropagateNan.ALL)
    if FORM.gate.function == "gpt_oss":
        return gate * tl.sigmoid(gate * FORM.gate.alpha) * (up + 1.0)
    else:
        return gate * tl.sigmoid(gate) * up
