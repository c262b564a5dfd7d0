"""Activations as two bytes each: what they are off by, and rows that have no such digits."""

from __future__ import annotations

import numpy as np
import pytest

from bench.cpu_expert_records import layer_reference, make_form, random_record, random_routing
from hetero_cpu_kernels.experts import CpuExperts, ExpertForm, Target, is_executable, target
from hetero_cpu_kernels.pool import WorkerPool

HIDDEN, INNER = 256, 128
VNNI = [entry for entry in map(target, ("avx_vnni", "avx512_vnni")) if is_executable(entry)]


@pytest.fixture(params=VNNI, ids=lambda entry: entry.name)
def executed(request: pytest.FixtureRequest) -> Target:
    entry: Target = request.param
    return entry


def outputs(form: ExpertForm, entry: Target, hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What one expert makes of the tokens, and what it should."""
    rng = np.random.default_rng(3)
    record, _ = random_record(form, rng)
    routing = random_routing(form, [len(hidden)], len(hidden), rng)
    out = np.full_like(hidden, np.nan)
    with WorkerPool([0]) as pool:
        CpuExperts(form, pool, target=entry).run(hidden, record, routing=routing, out=out)
    with np.errstate(all="ignore"):
        return out, layer_reference(hidden, [record], form, routing)


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("largest", [1.0, 30.0, 1000.0], ids=lambda size: f"outlier-{size:g}")
def test_an_outlier_coarsens_its_own_token_only(executed: Target, name: str, largest: float) -> None:
    hidden = np.random.default_rng(0).standard_normal((3, HIDDEN)).astype(np.float32)
    hidden[1, 7] = largest
    out, expected = outputs(make_form(name, HIDDEN, INNER), executed, hidden)
    sizes = np.linalg.norm(expected, axis=1)
    errors = np.linalg.norm(out - expected, axis=1) / sizes
    assert errors[[0, 2]].max() < 2e-4
    assert errors[1] < 2e-4 + 2e-5 * largest


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_tokens_of_zeros_small_numbers_and_no_numbers(executed: Target, name: str) -> None:
    hidden = np.random.default_rng(0).standard_normal((5, HIDDEN)).astype(np.float32)
    hidden[0] = 0.0
    hidden[1] *= 1e-20
    hidden[2] *= 1e-38
    hidden[3, 5] = np.nan
    out, expected = outputs(make_form(name, HIDDEN, INNER), executed, hidden)
    assert not out[0].any()
    assert np.isfinite(out[:3]).all()
    assert np.allclose(out[:3], expected[:3], rtol=0, atol=1e-30)
    assert np.isnan(out[3]).all()
    assert np.linalg.norm(out[4] - expected[4]) < 2e-4 * np.linalg.norm(expected[4])
