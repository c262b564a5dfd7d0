"""A copy engine without a device: memmove, but the bytes come late, and errors on demand.

The worker sees functions of the shape of CUDA's; state and events are words of one array.

    word 0  delay: queries until the oldest copy arrives      4  copies arrived
         1  queries since the oldest could have started       5  1: what a copy goes over is poisoned at once
         2  copy that fails, counted from 0; -1 none          6  queries answer "not ready" for ever
         3  copies started                                    8  events: copies started before each
                                                              64 queue: to, source, bytes of each copy
"""

from __future__ import annotations

import ctypes

import numba
import numpy as np
import torch
from numba import types

from hetero_gpu.control import CopyEngine
from hetero_gpu.control.copy_engine import sleep_address
from hetero_gpu.control.host_atomics import (
    call_copy,
    call_query,
    call_record,
    call_sleep,
    load_acquire,
    store_release,
)

LINK_ERROR = 700
_NOT_READY = 600
_DELAY, _QUERIES, _FAILING, _STARTED, _ARRIVED, _POISON, _STUCK = range(7)
_EVENTS, _QUEUE, _QUEUE_SIZE = 8, 64, 64

_libc = ctypes.CDLL(None)
_memmove, _memset = _libc.memmove, _libc.memset
_memmove.argtypes, _memmove.restype = [ctypes.c_int64] * 3, ctypes.c_int64
_memset.argtypes, _memset.restype = [ctypes.c_int64, ctypes.c_int, ctypes.c_int64], ctypes.c_int64


@numba.njit
def _get(state, word):
    return load_acquire(state + 8 * word)


@numba.njit
def _set(state, word, value):
    store_release(state + 8 * word, value)


@numba.cfunc(types.int32(types.int64, types.int64, types.int64, types.int32, types.int64))
def _copy(to, source, num_bytes, kind, stream):
    started = _get(stream, _STARTED)
    if started == _get(stream, _FAILING):
        return LINK_ERROR
    entry = _QUEUE + 3 * (started % _QUEUE_SIZE)
    _set(stream, entry, to)
    _set(stream, entry + 1, source)
    _set(stream, entry + 2, num_bytes)
    if _get(stream, _POISON) != 0:
        _memset(to, 0xEE, num_bytes)
    _set(stream, _STARTED, started + 1)
    return 0


@numba.cfunc(types.int32(types.int64, types.int64))
def _record(event, stream):
    _set(event, 0, _get(stream, _STARTED))
    _set(event, 1, stream)
    return 0


@numba.cfunc(types.int32(types.int64))
def _query(event):
    stream = _get(event, 1)
    arrived = _get(stream, _ARRIVED)
    _set(stream, _QUERIES, _get(stream, _QUERIES) + 1)
    is_due = _get(stream, _QUERIES) > _get(stream, _DELAY) and _get(stream, _STUCK) == 0
    if is_due and arrived < _get(stream, _STARTED):
        entry = _QUEUE + 3 * (arrived % _QUEUE_SIZE)
        _memmove(_get(stream, entry), _get(stream, entry + 1), _get(stream, entry + 2))
        arrived += 1
        _set(stream, _ARRIVED, arrived)
        _set(stream, _QUERIES, 0)
    return 0 if arrived >= _get(event, 0) else _NOT_READY


class FakeLink:
    """One link; its knobs may be turned while it runs."""

    def __init__(self, *, delay: int = 0, fail_at: int = -1, num_pieces: int = 2) -> None:
        self._state = np.zeros(_QUEUE + 3 * _QUEUE_SIZE, dtype=np.int64)
        self._state[_DELAY], self._state[_FAILING], self._state[_POISON] = delay, fail_at, 1
        base = self._state.ctypes.data
        self.engine = CopyEngine(
            copy=_copy.address,
            record=_record.address,
            query=_query.address,
            stream=base,
            events=tuple(base + 8 * (_EVENTS + 2 * i) for i in range(num_pieces)),
            keep=(self,),
        )

    @property
    def num_started(self) -> int:
        return int(self._state[_STARTED])

    def set_delay(self, num_queries: int) -> None:
        self._state[_DELAY] = num_queries

    def fail_from_now_on(self) -> None:
        self._state[_FAILING] = self._state[_STARTED]

    def stop_poisoning(self) -> None:
        self._state[_POISON] = 0

    def stick(self, is_stuck: bool) -> None:
        self._state[_STUCK] = is_stuck


_SLEEP_US, _FAILS, _REAL_STUCK, _COPY_AT, _RECORD_AT, _QUERY_AT, _STREAM, _SLEEP_AT = range(8)


@numba.cfunc(types.int32(types.int64, types.int64, types.int64, types.int32, types.int64))
def _real_copy(to, source, num_bytes, kind, state):
    if _get(state, _FAILS) != 0:
        return LINK_ERROR
    if _get(state, _SLEEP_US) > 0:
        call_sleep(_get(state, _SLEEP_AT), _get(state, _SLEEP_US))
    return call_copy(_get(state, _COPY_AT), to, source, num_bytes, _get(state, _STREAM))


@numba.cfunc(types.int32(types.int64, types.int64))
def _real_record(event, state):
    return call_record(_get(state, _RECORD_AT), _get(event, 0), _get(state, _STREAM))


@numba.cfunc(types.int32(types.int64))
def _real_query(event):
    state = _get(event, 1)
    return _NOT_READY if _get(state, _REAL_STUCK) != 0 else call_query(_get(state, _QUERY_AT), _get(event, 0))


class RealLink:
    """CUDA's own copies, until one of the knobs is turned; the same knobs as FakeLink."""

    def __init__(self, device: torch.device) -> None:
        real = CopyEngine.cuda(device)
        self._state = np.zeros(8 + 2 * len(real.events), dtype=np.int64)
        self._state[_COPY_AT : _SLEEP_AT + 1] = (
            real.copy,
            real.record,
            real.query,
            real.stream,
            sleep_address(),
        )
        base = self._state.ctypes.data
        for i, event in enumerate(real.events):
            self._state[8 + 2 * i :][:2] = event, base
        self.engine = CopyEngine(
            copy=_real_copy.address,
            record=_real_record.address,
            query=_real_query.address,
            stream=base,
            events=tuple(base + 8 * (8 + 2 * i) for i in range(len(real.events))),
            keep=(self, real),
        )

    def set_delay(self, microseconds: int) -> None:
        self._state[_SLEEP_US] = microseconds

    def fail_from_now_on(self) -> None:
        self._state[_FAILS] = 1

    def stick(self, is_stuck: bool) -> None:
        self._state[_REAL_STUCK] = is_stuck
