"""The prefetch worker's loop: compiled, without the GIL, talking only through the control region.

    task ring ──► one copy at a time, in pieces ──► landing ring

One turn:

    1  the next task: stale (its layer has begun) → landing DROPPED
         else, unless a copy is open, the device gathers misses, or no staging buffer is free: it is opened
    2  a piece of the open copy, then an event, unless as many pieces as allowed are under way,
         or the device gathers misses of a layer that does not await this copy
    3  the oldest piece, if its event has come; with the last one of a copy → landing ARRIVED
    4  after many turns with nothing to do: sleep a little

What the device gathers has the link to itself but for the pieces that are under way; a whole record would
take half of the link from it until it is over. Tags only grow; a task whose tag does not was read from a
broken ring and ends the loop. Whatever ends it, the pieces under way are waited for (within bounds), so that
no memory is freed beneath one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

from hetero_gpu.control.host_atomics import (
    call_copy,
    call_query,
    call_record,
    call_sleep,
    load_acquire,
    store_release,
)
from hetero_gpu.control.region import LANDING_WORDS, TASK_WORDS, WORD_BYTES, Landed, Word

NOT_READY = 600
"""cudaErrorNotReady: the event has not come yet."""
BAD_TASK, STUCK_COPY = -1, -2
"""Ends of the loop that are not error codes of the copy engine."""

_TASK_BYTES, _LANDING_BYTES = TASK_WORDS * WORD_BYTES, LANDING_WORDS * WORD_BYTES
_POSITION, _PAUSE, _TASK_TAIL, _LANDING_TAIL, _HEARTBEAT, _STOP, _CONSUMED = (
    WORD_BYTES * word
    for word in (
        Word.POSITION,
        Word.PAUSE,
        Word.TASK_TAIL,
        Word.LANDING_TAIL,
        Word.HEARTBEAT,
        Word.STOP,
        Word.CONSUMED,
    )
)
_NOT_LAST = 0
"""Stands where a copy's tag would; tags begin with 1."""
_DROPPED, _ARRIVED = int(Landed.DROPPED), int(Landed.ARRIVED)
_IDLE_TURNS, _IDLE_US = 1 << 20, 20
"""Some 2 ms without work, longer than layers of a step are apart: a task that finds the worker asleep waits
for the 70 us that so short a sleep really takes, half as long as a copy."""
_LAST_TURNS, _LAST_US = 100_000, 100
"""Ten seconds for copies that are still under way at the end."""


class Wiring(NamedTuple):
    """All addresses that the loop needs, int64."""

    region: int
    tasks: int
    landings: int
    ring_size: int
    bank: int
    stored_bytes: int
    """From one record of the bank to the next: what is copied."""
    piece_bytes: int
    """Of it at a time, at most."""
    target: int
    """The slabs, or the staging buffers."""
    target_bytes: int
    """From one slab or buffer to the next."""
    num_buffers: int
    """0: straight into slabs."""
    num_slots: int
    num_keys: int
    stream: int
    copy: int
    record: int
    query: int
    sleep: int


def _njit(function: Any) -> Any:
    return numba.njit(nogil=True, boundscheck=False)(function)


@_njit
def _word(address: Any, index: Any) -> Any:
    return load_acquire(address + index * WORD_BYTES)


@_njit
def _report(wiring: Any, slot: Any, tag: Any, status: Any, buffer: Any, positions: Any) -> Any:
    """Returns the number of landings reported with this one."""
    landed = load_acquire(wiring.region + _LANDING_TAIL)
    entry = wiring.landings + (landed % wiring.ring_size) * _LANDING_BYTES
    store_release(entry, slot)
    store_release(entry + WORD_BYTES, tag)
    store_release(entry + 2 * WORD_BYTES, status)
    store_release(entry + 3 * WORD_BYTES, buffer)
    store_release(entry + 4 * WORD_BYTES, positions)
    store_release(wiring.region + _LANDING_TAIL, landed + 1)
    return landed + 1


@_njit
def _start_piece(wiring: Any, source: Any, to: Any, num_bytes: Any, event: Any) -> Any:
    """0, or the copy engine's error code."""
    code = call_copy(wiring.copy, to, source, num_bytes, wiring.stream)
    if code == 0:
        code = call_record(wiring.record, event, wiring.stream)
    return code


@_njit
def _wait_for_last(wiring: Any, events: Any, oldest: Any, newest: Any) -> Any:
    """Wait for the copies still under way. 0, or why one did not end."""
    for _ in range(_LAST_TURNS):
        while oldest < newest:
            code = call_query(wiring.query, events[oldest % events.size])
            if code == NOT_READY:
                break
            if code != 0:
                return code
            oldest += 1
        if oldest == newest:
            return 0
        call_sleep(wiring.sleep, _LAST_US)
    return STUCK_COPY


@_njit
def _is_buffer_free(wiring: Any, used_until: Any, opened: Any) -> Any:
    """Whether the next copy has a place: the device is done with what its buffer held."""
    if wiring.num_buffers == 0:
        return True
    return used_until[opened % wiring.num_buffers] <= load_acquire(wiring.region + _CONSUMED)


@_njit
def run_loop(wiring: Any, events: Any, slots: Any, tags: Any, begun_at: Any, used_until: Any) -> Any:
    """Serve tasks until STOP is set. Returns 0, or the code of the first failure.

    `events`: `[most pieces under way]` int64; `slots`, `tags`, `begun_at`: room for as many. `used_until`:
    for each staging buffer the number of landings that must be consumed before it is free, 0 at first.
    """
    most = events.size
    head = load_acquire(wiring.region + _LANDING_TAIL)
    submitted, finished = 0, 0  # pieces
    opened, arrived = 0, 0  # copies
    slot, tag, due, begun, source, to, left = 0, 0, 0, 0, 0, 0, 0  # of the open one; none with nothing left
    last_tag, idle, failure = 0, 0, 0
    free_at = load_acquire(wiring.region + _POSITION)
    while failure == 0 and load_acquire(wiring.region + _STOP) == 0:
        idle += 1
        store_release(wiring.region + _HEARTBEAT, load_acquire(wiring.region + _HEARTBEAT) + 1)
        # the pause behind the task, so that what is asked for in one waits for its end
        has_task = head < load_acquire(wiring.region + _TASK_TAIL)
        is_paused = load_acquire(wiring.region + _PAUSE) != 0
        if has_task:
            entry = wiring.tasks + (head % wiring.ring_size) * _TASK_BYTES
            next_key, next_slot, next_tag = _word(entry, 0), _word(entry, 1), _word(entry, 2)
            position, deadline = load_acquire(wiring.region + _POSITION), _word(entry, 3)
            is_taken = position >= deadline
            if next_tag <= last_tag or not (
                0 <= next_slot < wiring.num_slots and 0 <= next_key < wiring.num_keys
            ):
                failure = BAD_TASK
            elif is_taken:
                _report(wiring, next_slot, next_tag, _DROPPED, 0, 0)
            elif left == 0 and not is_paused and _is_buffer_free(wiring, used_until, opened):
                is_taken = True
                slot, tag, due, begun = next_slot, next_tag, deadline, position
                place = slot if wiring.num_buffers == 0 else opened % wiring.num_buffers
                source = wiring.bank + next_key * wiring.stored_bytes
                to, left = wiring.target + place * wiring.target_bytes, wiring.stored_bytes
                opened += 1
            if is_taken:
                head, last_tag, idle = head + 1, next_tag, 0
        is_held_back = is_paused and load_acquire(wiring.region + _POSITION) != due
        if failure == 0 and left > 0 and not is_held_back and submitted - finished < most:
            num_bytes = min(left, wiring.piece_bytes)
            failure = _start_piece(wiring, source, to, num_bytes, events[submitted % most])
            if failure == 0:
                source, to, left = source + num_bytes, to + num_bytes, left - num_bytes
                slots[submitted % most], begun_at[submitted % most] = slot, begun
                tags[submitted % most] = tag if left == 0 else _NOT_LAST
                submitted, idle = submitted + 1, 0
        if failure == 0 and finished < submitted:
            failure = call_query(wiring.query, events[finished % most])
            if failure == 0:
                if tags[finished % most] != _NOT_LAST:
                    buffer = 0 if wiring.num_buffers == 0 else arrived % wiring.num_buffers
                    now = load_acquire(wiring.region + _POSITION)
                    positions = now - max(begun_at[finished % most], free_at)
                    landings = _report(
                        wiring, slots[finished % most], tags[finished % most], _ARRIVED, buffer, positions
                    )
                    if wiring.num_buffers != 0:
                        used_until[buffer] = landings
                    arrived, free_at = arrived + 1, now
                finished, idle = finished + 1, 0
            elif failure == NOT_READY:
                failure = 0
        if idle > _IDLE_TURNS:
            call_sleep(wiring.sleep, _IDLE_US)
    ending = _wait_for_last(wiring, events, finished, submitted)
    return failure if failure != 0 and ending != STUCK_COPY else ending


def compile_loop() -> None:
    """Compile now rather than at the first task (a second or two)."""
    types: Any = numba.types
    integers = types.int64[::1]
    wiring = types.NamedUniTuple(types.int64, len(Wiring._fields), Wiring)
    run_loop.compile((wiring, integers, integers, integers, integers, integers))


def make_room(num_pieces: int, num_buffers: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """`slots`, `tags`, `begun_at` and `used_until` for `run_loop`."""
    slots, tags, begun_at = np.zeros((3, num_pieces), dtype=np.int64)
    return slots, tags, begun_at, np.zeros(num_buffers, dtype=np.int64)
