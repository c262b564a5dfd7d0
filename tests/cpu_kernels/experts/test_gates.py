"""The gate's exponential against numpy's, and the gates at the ends of their range."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from llvmlite import ir
from numba import njit

from bench.cpu_expert_records import GATES
from hetero_cpu_kernels.addresses import call_kernel
from hetero_cpu_kernels.experts import best_target
from hetero_cpu_kernels.experts.emitter import Emitter
from hetero_cpu_kernels.experts.form import Gate
from hetero_cpu_kernels.experts.gates import apply_gate, exponential
from hetero_cpu_kernels.experts.native import NativeCode
from hetero_cpu_kernels.experts.plan import GATE_CODES, PLAN, address_of
from hetero_cpu_kernels.experts.reference import apply_gate as reference_gate
from hetero_cpu_kernels.experts.vector_gate import gated


def test_exponential() -> None:
    x = np.linspace(-86, 87, 5001, dtype=np.float32)
    found = np.array([exponential(value) for value in x], dtype=np.float32)
    exact = np.exp(x.astype(np.float64))
    assert np.max(np.abs(found - exact) / exact) < 2.5e-7
    assert np.isnan(exponential(np.float32("nan")))


def loop_gate(gate: Gate, pairs: np.ndarray) -> np.ndarray:
    outputs = np.empty(len(pairs), np.float32)
    plan = np.zeros(1, PLAN)
    plan["gate"], plan["is_interleaved"] = GATE_CODES[gate.function], gate.is_interleaved
    plan["limit"], plan["alpha"] = gate.limit, gate.alpha
    values = np.ascontiguousarray(pairs if gate.is_interleaved else pairs.T).reshape(-1)
    apply_gate(plan[0], values, outputs)
    return outputs


@njit
def run_kernel(function: int, arguments_at: int) -> None:
    call_kernel(function, arguments_at)


def vector_gate(gate: Gate, pairs: np.ndarray) -> np.ndarray:
    entry, module = best_target(), ir.Module()
    emit = Emitter(module, "gate", lanes=entry.lanes)
    with emit.loop(0, emit.argument(3), step=entry.lanes) as turn:
        places = [emit.add(emit.argument(i), emit.mul(turn.index, 4)) for i in range(3)]
        emit.store(gated(emit, gate, *(emit.load(emit.floats, at) for at in places[:2])), places[2])
    emit.finish()
    code = NativeCode(module, entry)
    padded = -(-len(pairs) // entry.lanes) * entry.lanes
    values = np.zeros((3, padded), np.float32)
    values[:2, : len(pairs)] = pairs.T
    arguments = np.array([*(address_of(row) for row in values), padded])
    run_kernel(code.address("gate"), address_of(arguments))
    return values[2, : len(pairs)]


@pytest.mark.parametrize("compute", [loop_gate, vector_gate])
@pytest.mark.parametrize("name", GATES)
def test_gates_of_large_and_missing_values(
    name: str, compute: Callable[[Gate, np.ndarray], np.ndarray]
) -> None:
    gate = GATES[name]
    special = np.array([-1e30, -200, -1, -0.0, 0, 1, 200, 1e30, np.nan], dtype=np.float32)
    pairs = np.stack(np.meshgrid(special, special), axis=-1).reshape(-1, 2)  # [n, gate and up]
    values = np.ascontiguousarray(pairs if gate.is_interleaved else pairs.T).reshape(-1)
    outputs = compute(gate, pairs)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = reference_gate(values[None], gate)[0]
    is_finite = np.abs(expected) < 1e29
    assert np.array_equal(np.isnan(outputs), np.isnan(expected))
    np.testing.assert_allclose(outputs[is_finite], expected[is_finite], rtol=1e-6, atol=1e-6)
