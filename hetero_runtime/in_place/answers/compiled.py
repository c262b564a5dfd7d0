"""Answers without Python: one compiled loop listens, sorts the pairs, has the workers compute, and answers.

await_call ─ pairs by expert ─ make_call ═ workers ═ answer ─ await_call ...        no GIL from end to end
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import os
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit, typeof

from hetero_cpu_kernels.addresses import monotonic_ns
from hetero_cpu_kernels.experts.standing import make_call, shape_call
from hetero_gpu.control.copy_engine import sleep_address
from hetero_gpu.in_place.listen import answer, await_call
from hetero_runtime.errors import DeviceError
from hetero_runtime.in_place.answers.base import Answers, CallLine
from hetero_runtime.in_place.base import Floats, Integers, StandingExperts
from hetero_runtime.in_place.misses import InPlaceStats

_EXPERTS, _NANOSECONDS, _ANSWERED = range(3)


class _Wire(NamedTuple):
    """The call as it arrives, and where its answer goes."""

    region: int
    sleep: int
    head: Integers
    experts: npt.NDArray[np.int32]
    weights: Floats
    total: Floats


class _Plan(NamedTuple):
    """The call as the kernels take it: `StandingCall`, and where records lie."""

    words: Integers
    bounds: Integers
    tokens: Integers
    weights: Floats
    records: Integers
    order: Integers
    job: int
    control: int
    num_workers: int
    timeout_at: int
    bank_at: int
    record_bytes: int
    num_experts: int


class CompiledAnswers(Answers):
    """Construction compiles the loop: a second or two. The listener keeps off the workers' processors."""

    def __init__(self, standing: StandingExperts, line: CallLine) -> None:
        self._standing, self._line = standing, line
        call, mailbox = standing.call, line.mailbox
        self._wire = _Wire(
            line.region.host_address,
            sleep_address(),
            mailbox.head,
            mailbox.experts,
            mailbox.weights,
            mailbox.total,
        )
        self._plan = _Plan(
            *(call.words, call.bounds, call.tokens, call.weights, call.records),
            np.zeros(len(call.tokens), dtype=np.int64),
            *(call.job, call.control, call.num_workers, call.timeout_at, call.bank_at),
            *(standing.record_bytes, standing.num_experts),
        )
        self._told = np.zeros(3, dtype=np.int64)
        _answer_calls.compile(tuple(map(typeof, (self._wire, self._plan, self._told))))

    def run(self, answered: int) -> None:
        if self._standing.listener_cpus:
            os.sched_setaffinity(0, self._standing.listener_cpus)  # of this thread only
        self._told[_ANSWERED] = answered
        with self._standing.call.alone():
            status = _answer_calls(self._wire, self._plan, self._told)
        if status:
            raise DeviceError(f"computing experts on the CPU failed: a worker ended with status {status}")

    def stats(self) -> InPlaceStats:
        return InPlaceStats(int(self._told[_EXPERTS]), float(self._told[_NANOSECONDS]) / 1e9)


@njit(nogil=True)
def _answer_calls(wire: Any, plan: Any, told: Any) -> Any:
    """Until STOP is set, or a call fails: its status. `told` is written for others to read."""
    timespec = np.empty(2, np.int64)
    while True:
        number = await_call(wire.region, told[_ANSWERED], wire.sleep)
        if number < 0:
            return 0
        began = monotonic_ns(timespec.ctypes.data)
        num_experts = _sort_pairs(wire, plan)
        status = make_call(plan.words, plan.job, plan.control, plan.num_workers, plan.timeout_at)
        if status != 0:
            wire.total[:] = 0.0
        told[_EXPERTS] += num_experts
        told[_NANOSECONDS] += monotonic_ns(timespec.ctypes.data) - began
        told[_ANSWERED] = number
        answer(wire.region, number)
        if status != 0:
            return status


@njit(nogil=True)
def _sort_pairs(wire: Any, plan: Any) -> Any:
    """Pairs by expert, those of one by row, into the plan's arrays. Returns how many experts there are."""
    layer, num_rows = wire.head[0], wire.head[1]
    top_k, num_pairs = wire.experts.shape[1], 0
    for pair in range(num_rows * top_k):
        expert = wire.experts[pair // top_k, pair % top_k]
        if expert < 0:
            continue
        place = num_pairs
        while place > 0 and _expert_of(wire, plan.order[place - 1]) > expert:
            plan.order[place] = plan.order[place - 1]
            place -= 1
        plan.order[place] = pair
        num_pairs += 1
    num_experts, last = 0, -1
    for place in range(num_pairs):
        pair = plan.order[place]
        expert = _expert_of(wire, pair)
        if expert != last:
            plan.bounds[num_experts] = place
            record = layer * plan.num_experts + expert
            plan.records[num_experts] = plan.bank_at + record * plan.record_bytes
            num_experts, last = num_experts + 1, expert
        plan.tokens[place] = pair // top_k
        plan.weights[place] = wire.weights[pair // top_k, pair % top_k]
    plan.bounds[num_experts] = num_pairs
    shape_call(plan.words, num_rows, num_experts, num_pairs)
    return num_experts


@njit(nogil=True)
def _expert_of(wire: Any, pair: Any) -> Any:
    top_k = wire.experts.shape[1]
    return wire.experts[pair // top_k, pair % top_k]
