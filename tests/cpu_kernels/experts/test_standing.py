"""A call that stands: compiled code makes it with fewer experts and rows each time; the sums are the same."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from bench.cpu_expert_records import make_form, random_record, random_routing
from hetero_cpu_kernels.experts import CpuExperts, best_target
from hetero_cpu_kernels.experts.call import Routing
from hetero_cpu_kernels.experts.plan import FEW_TOKENS
from hetero_cpu_kernels.experts.standing import StandingCall, make_call, shape_call
from hetero_cpu_kernels.pool import WorkerPool

ROWS, TOP_K, EXPERTS = 4, 3, 6


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    cpus = sorted(os.sched_getaffinity(0))
    with WorkerPool([cpus[i % len(cpus)] for i in range(2)], spins=100) as pool:
        yield pool


def make(call: StandingCall, routing: Routing, *, rows: int) -> int:
    """One call, as `routing` says."""
    num_experts, num_pairs = len(routing.offsets), len(routing.tokens)
    call.records[:num_experts] = call.bank_at + routing.offsets
    call.bounds[: num_experts + 1], call.tokens[:num_pairs] = routing.bounds, routing.tokens
    call.weights[:num_pairs] = routing.weights
    shape_call(call.words, rows, num_experts, num_pairs)
    return int(make_call(call.words, call.job, call.control, call.num_workers, call.timeout_at))


@pytest.mark.parametrize("name", ["bfloat16", "int4"])
def test_sums_are_those_of_calls_from_python_bit_for_bit(name: str, pool: WorkerPool) -> None:
    form, rng = make_form(name, 128, 64), np.random.default_rng(3)
    bank = np.concatenate([random_record(form, rng)[1] for _ in range(EXPERTS)])
    hidden, out = np.zeros((ROWS, form.hidden), np.float32), np.zeros((ROWS, form.hidden), np.float32)
    experts = CpuExperts(form, pool, target=best_target())
    own = CpuExperts(form, pool, target=best_target())
    call = StandingCall(own, pool, hidden=hidden, out=out, top_k=TOP_K, bank=bank)
    for rows, counts in [(4, [4, 1, 3, 2, 1, 1]), (1, [1, 1, 1]), (2, [2]), (4, [1, 4])]:
        routing = random_routing(form, counts, rows, rng)
        hidden[:rows] = rng.standard_normal((rows, form.hidden))
        out[:], expected = np.nan, np.full((rows, form.hidden), np.nan, np.float32)
        with call.alone():
            assert make(call, routing, rows=rows) == 0
        experts.run(hidden[:rows], bank, routing=routing, out=expected)
        assert np.array_equal(out[:rows], expected)


def test_more_rows_than_stand_are_refused(pool: WorkerPool) -> None:
    form = make_form("bfloat16", 128, 64)
    hidden = np.zeros((FEW_TOKENS + 1, form.hidden), np.float32)
    with pytest.raises(ValueError, match=f"{FEW_TOKENS + 1} rows; a standing call has at most"):
        StandingCall(
            CpuExperts(form, pool, target=best_target()),
            pool,
            hidden=hidden,
            out=hidden,
            top_k=1,
            bank=np.zeros(form.record_bytes, np.uint8),
        )


def test_while_a_pool_is_lent_others_wait() -> None:
    order: list[str] = []
    with WorkerPool(sorted(os.sched_getaffinity(0))[:1], spins=100) as pool:
        with pool.lent():
            closing = threading.Thread(target=lambda: (pool.close(), order.append("closed")))
            closing.start()
            order.append("given back")
        closing.join(10)
        assert order == ["given back", "closed"]
        with pytest.raises(RuntimeError, match="the worker pool is closed"), pool.lent():
            raise AssertionError("lent")
