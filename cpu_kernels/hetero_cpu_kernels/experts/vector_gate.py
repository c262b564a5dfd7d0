"""The gate's functions on vectors, in LLVM's language: what `gates` computes one value at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from hetero_cpu_kernels.experts.emitter import F32, Emitter
from hetero_cpu_kernels.experts.form import Gate
from hetero_cpu_kernels.experts.gates import COEFFICIENTS, LEAST, LN2_HIGH, LN2_LOW, LOG2_E, MOST


def gated(emit: Emitter, gate: Gate, g: Any, u: Any) -> Any:
    """The activation of a vector of gates and one of ups. NaN stays NaN."""
    build = emit.build
    if gate.function != "silu":
        g, u = _at_most(emit, g, gate.limit), _at_least(emit, _at_most(emit, u, gate.limit), -gate.limit)
    slope = g
    if gate.function == "gpt_oss":
        slope, u = build.fmul(g, _number(emit, gate.alpha)), build.fadd(u, _number(emit, 1.0))
    one = _number(emit, 1.0)
    sigmoid = build.fdiv(one, build.fadd(_exponential(emit, build.fneg(slope)), one))
    return build.fmul(build.fmul(g, sigmoid), u)


def _exponential(emit: Emitter, x: Any) -> Any:
    """As `gates.exponential`."""
    build = emit.build
    held = _at_most(emit, _at_least(emit, x, LEAST), MOST)
    power = _call(emit, "floor", emit.fma(held, _number(emit, LOG2_E), _number(emit, 0.5)))
    rest = emit.fma(power, _number(emit, -LN2_HIGH), held)
    rest = emit.fma(power, _number(emit, -LN2_LOW), rest)
    total = _number(emit, COEFFICIENTS[0])
    for coefficient in COEFFICIENTS[1:]:
        total = emit.fma(total, rest, _number(emit, coefficient))
    factor = emit.as_floats(build.shl(build.add(emit.as_integers(power), emit.word(127)), emit.word(23)))
    total = build.fmul(total, factor)
    total = build.select(build.fcmp_ordered(">", x, _number(emit, MOST)), _number(emit, float("inf")), total)
    return build.select(build.fcmp_ordered("<", x, _number(emit, LEAST)), emit.zeros(), total)


def _at_most(emit: Emitter, x: Any, bound: float | np.float32) -> Any:
    """The smaller one; NaN where x is."""
    most = _number(emit, bound)
    return emit.build.select(emit.build.fcmp_ordered(">", x, most), most, x)


def _at_least(emit: Emitter, x: Any, bound: float | np.float32) -> Any:
    """The larger one; NaN where x is."""
    least = _number(emit, bound)
    return emit.build.select(emit.build.fcmp_ordered("<", x, least), least, x)


def _call(emit: Emitter, function: str, x: Any) -> Any:
    return emit.call(f"llvm.{function}.v{emit.lanes}f32", emit.floats, [x])


def _number(emit: Emitter, value: float | np.float32) -> Any:
    return ir.Constant(ir.VectorType(F32, emit.lanes), [float(value)] * emit.lanes)
