"""The gate's exponential against numpy's, and the gates at the ends of their range."""

from __future__ import annotations

import numpy as np
import pytest

from bench.cpu_expert_records import GATES
from hetero_cpu_kernels.experts.gates import apply_gate, exponential
from hetero_cpu_kernels.experts.plan import GATE_CODES, PLAN
from hetero_cpu_kernels.experts.reference import apply_gate as reference_gate


def test_exponential() -> None:
    x = np.linspace(-86, 87, 5001, dtype=np.float32)
    found = np.array([exponential(value) for value in x], dtype=np.float32)
    exact = np.exp(x.astype(np.float64))
    assert np.max(np.abs(found - exact) / exact) < 2.5e-7
    assert np.isnan(exponential(np.float32("nan")))


@pytest.mark.parametrize("name", GATES)
def test_gates_of_large_and_missing_values(name: str) -> None:
    gate = GATES[name]
    special = np.array([-1e30, -200, -1, -0.0, 0, 1, 200, 1e30, np.nan], dtype=np.float32)
    pairs = np.stack(np.meshgrid(special, special), axis=-1).reshape(-1, 2)  # [n, gate and up]
    outputs = np.empty(len(pairs), np.float32)
    plan = np.zeros(1, PLAN)
    plan["gate"], plan["is_interleaved"] = GATE_CODES[gate.function], gate.is_interleaved
    plan["limit"], plan["alpha"] = gate.limit, gate.alpha
    values = np.ascontiguousarray(pairs if gate.is_interleaved else pairs.T).reshape(-1)
    apply_gate(plan[0], values, outputs)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = reference_gate(values[None], gate)[0]
    is_finite = np.abs(expected) < 1e29
    assert np.array_equal(np.isnan(outputs), np.isnan(expected))
    np.testing.assert_allclose(outputs[is_finite], expected[is_finite], rtol=1e-6, atol=1e-6)
