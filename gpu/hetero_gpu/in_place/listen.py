"""The host's end of a call: waiting for one without the GIL, and answering it."""

from __future__ import annotations

from typing import Any

import numba

from hetero_gpu.control.host_atomics import call_sleep, load_acquire, store_release
from hetero_gpu.control.region import WORD_BYTES, Word

_CALLS, _ANSWERS, _STOP = (WORD_BYTES * word for word in (Word.CALLS, Word.ANSWERS, Word.STOP))
_SPINS = 2_000_000
"""Looks before the first sleep: some 3 ms, longer than steps are apart. Who sleeps is woken late, by a third
of what a layer takes."""
_SHORT_US, _LONG_US = 20, 1000
_SHORT_SLEEPS = 5000
"""Some tenths of a second without a call: nobody decodes, and the first call may wait a millisecond."""


@numba.njit(nogil=True)
def await_call(region: Any, answered: Any, sleep: Any) -> Any:
    """The number of the call after `answered`, or -1 when STOP is set. `region`: host address of its words;
    `sleep`: address of usleep."""
    looks = 0
    while load_acquire(region + _STOP) == 0:
        calls = load_acquire(region + _CALLS)
        if calls > answered:
            return calls
        looks += 1
        if looks > _SPINS + _SHORT_SLEEPS:
            call_sleep(sleep, _LONG_US)
        elif looks > _SPINS:
            call_sleep(sleep, _SHORT_US)
    return -1


@numba.njit(nogil=True)
def answer(region: Any, call: Any) -> Any:
    """Say that `call` is answered: its sum lies in the mailbox."""
    store_release(region + _ANSWERS, call)


def compile_listening() -> None:
    """Compile now rather than at the first call."""
    word: Any = numba.types.int64
    await_call.compile((word, word, word))
    answer.compile((word, word))
