"""How workers wait for a job, for each other, and how a caller waits for them: spin first, then sleep.

    control   a few 64-bit words, each on a cache line of its own

    RING        number of jobs handed out; workers sleep on it
    DONE        workers that finished the job; the caller sleeps on it
    ARRIVED     arrivals at the job's barriers
    FAILED      first status of the job that was not 0
    IDLE        workers asleep
    FUNCTION    address of the job: int64 job(int64 plan, int64 index, int64 count), 0 when it went well
    PLAN        its first argument
    STOPPED     1: the next ring ends the workers
    FINISHED    when the last worker finished the job, in nanoseconds of `time.perf_counter_ns`

A caller writes FUNCTION and PLAN, clears DONE, ARRIVED and FAILED, then rings: RING is written last. A worker
that is about to sleep first counts itself in IDLE and then looks at RING again, so no ring is missed.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
# mypy: disable-error-code="call-arg, attr-defined, var-annotated"

from __future__ import annotations

import numpy as np
from numba import njit

from hetero_cpu_kernels.addresses import (
    add_to_word,
    call_job,
    load_word,
    monotonic_ns,
    pause,
    sleep_while,
    store_word,
    wake_sleepers,
    yield_processor,
)

LINE_BYTES = 64
NUM_LINES = 9
RING, DONE, ARRIVED, FAILED, IDLE, FUNCTION, PLAN, STOPPED, FINISHED = (
    LINE_BYTES * line for line in range(NUM_LINES)
)
CONTROL_BYTES = NUM_LINES * LINE_BYTES

_IMPATIENT_SPINS = 4000
"""Looks at a barrier before the processor is offered to others: more threads than cores must not hang."""


_SPINS_A_YIELD = 64
"""Looks before the processor is offered to others: a caller and a worker may share one."""


@njit(nogil=True)
def _wait_a_little(spin):
    """Between two looks of a loop; `spin`: how many it had."""
    pause()
    if spin % _SPINS_A_YIELD == _SPINS_A_YIELD - 1:
        yield_processor()


@njit(nogil=True)
def _await_ring(control, served, spins):
    for spin in range(spins):
        if load_word(control + RING) != served:
            return
        _wait_a_little(spin)
    while load_word(control + RING) == served:
        add_to_word(control + IDLE, 1)
        if load_word(control + RING) == served:
            sleep_while(control + RING, served, 0)
        add_to_word(control + IDLE, -1)


@njit("int64(int64, int64, int64, int64)", nogil=True)
def serve(control, index, count, spins):
    """A worker's life: jobs from the first ring until it is stopped. Returns the number of jobs."""
    served = 0
    timespec = np.empty(2, np.int64)
    while True:
        _await_ring(control, served, spins)
        if load_word(control + STOPPED) != 0:
            return served
        served += 1
        status = call_job(load_word(control + FUNCTION), load_word(control + PLAN), index, count)
        if status != 0 and load_word(control + FAILED) == 0:
            store_word(control + FAILED, status)
        store_word(control + FINISHED, monotonic_ns(timespec.ctypes.data))  # the last one's word stays
        if add_to_word(control + DONE, 1) == count - 1:
            wake_sleepers(control + DONE)


@njit("void(int64, int64, int64)", nogil=True)
def ring(control, function, plan):
    """Hand a job to all workers. The one before it must be finished."""
    store_word(control + FUNCTION, function)
    store_word(control + PLAN, plan)
    store_word(control + DONE, 0)
    store_word(control + ARRIVED, 0)
    store_word(control + FAILED, 0)
    add_to_word(control + RING, 1)
    if load_word(control + IDLE) > 0:
        wake_sleepers(control + RING)


@njit("boolean(int64, int64, int64, int64)", nogil=True)
def await_done(control, count, spins, timeout_at):
    """Whether all workers finished, after spinning and at most one sleep of `timeout_at`."""
    for spin in range(spins):
        if load_word(control + DONE) == count:
            return True
        _wait_a_little(spin)
    done = load_word(control + DONE)
    if done != count:
        sleep_while(control + DONE, done, timeout_at)
    return load_word(control + DONE) == count


@njit(nogil=True)
def arrive(control, count):
    """Say, inside a job, that this worker is here. Returns how many arrivals it waits for."""
    arrived = add_to_word(control + ARRIVED, 1)
    return (arrived // count + 1) * count


@njit(nogil=True)
def are_all_here(control, goal):
    """Whether so many have arrived."""
    return load_word(control + ARRIVED) >= goal


@njit(nogil=True)
def await_all(control, goal):
    """Wait until so many have arrived. False when one of them failed before."""
    spins = 0
    while not are_all_here(control, goal):
        if load_word(control + FAILED) != 0:
            return False
        pause()
        spins += 1
        if spins > _IMPATIENT_SPINS:
            yield_processor()
    return True
