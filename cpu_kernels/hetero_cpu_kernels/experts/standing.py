"""A call whose arrays stay where they are: compiled code makes it again and again, without Python.

A layer of one token takes a third of a millisecond; what Python does around a call would be a third of that.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, call-arg"

from __future__ import annotations

from contextlib import AbstractContextManager

import numpy as np
from numba import njit

from hetero_cpu_kernels.addresses import load_word
from hetero_cpu_kernels.experts.call import Bytes, Floats, Integers, Routing
from hetero_cpu_kernels.experts.layer import CpuExperts
from hetero_cpu_kernels.experts.plan import FEW_TOKENS, address_of, word_of
from hetero_cpu_kernels.pool import WorkerPool
from hetero_cpu_kernels.pool.doorbell import FAILED, await_done, ring

_NUM_TOKENS, _NUM_EXPERTS, _NUM_PAIRS, _RECORDS = (
    word_of(name) for name in ("num_tokens", "num_experts", "num_pairs", "records_at")
)
_SPINS = 60_000
"""Looks of the caller before it sleeps: 1 to 3 ms, longer than a layer."""
_SLEEP_NS = 100_000_000


class StandingCall:
    """Rows of `hidden` `[R, H]`, R up to FEW_TOKENS, of up to `top_k` experts each, into `out` `[R, H]`.

    Before each `make_call` compiled code writes what `call.Routing` says of a call: `bounds`, `tokens`,
    `weights`, and the addresses of the experts' records, `records`.
    """

    def __init__(
        self,
        experts: CpuExperts,
        pool: WorkerPool,
        *,
        hidden: Floats,
        out: Floats,
        top_k: int,
        bank: Bytes,
    ) -> None:
        """`experts`, of that `pool`, are this call's alone. Raises ValueError for arrays that they cannot
        use."""
        rows, num_pairs = len(hidden), len(hidden) * top_k
        if rows > FEW_TOKENS:
            raise ValueError(f"{rows} rows; a standing call has at most {FEW_TOKENS}")
        self.bounds: Integers = np.arange(num_pairs + 1)
        self.tokens: Integers = np.repeat(np.arange(rows), top_k)
        self.weights: Floats = np.zeros(num_pairs, dtype=np.float32)
        self.records: Integers = np.zeros(num_pairs, dtype=np.int64)
        largest = Routing(self.records, self.bounds, self.tokens, self.weights)
        self.words = experts.lay_out(hidden, bank, routing=largest, out=out)
        self.words[_RECORDS] = address_of(self.records)
        self.bank_at = address_of(bank)
        self.job, self.control, self.num_workers = experts.job_address, pool.control, pool.num_workers
        self._timeout = np.array([0, _SLEEP_NS], dtype=np.int64)
        self.timeout_at = address_of(self._timeout)
        self._pool, self._keep = pool, (experts, hidden, out, bank)

    def alone(self) -> AbstractContextManager[None]:
        """Around all calls: nobody else gives the pool a job meanwhile."""
        return self._pool.lent()


@njit("int64(int64[::1], int64, int64, int64, int64)", nogil=True)
def make_call(words, job, control, num_workers, timeout_at):
    """Compute what stands in the arrays; the job's status, 0 when it went well."""
    ring(control, job, words.ctypes.data)
    while not await_done(control, num_workers, _SPINS, timeout_at):
        pass
    return load_word(control + FAILED)


@njit("void(int64[::1], int64, int64, int64)", nogil=True)
def shape_call(words, num_tokens, num_experts, num_pairs):
    """How much of the arrays the next call has."""
    words[_NUM_TOKENS], words[_NUM_EXPERTS], words[_NUM_PAIRS] = num_tokens, num_experts, num_pairs
