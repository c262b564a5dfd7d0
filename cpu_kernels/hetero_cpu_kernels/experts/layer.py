"""One layer's experts on the CPU, where their records lie: `CpuExperts`.

experts = CpuExperts(form, pool)
experts.run(hidden, bank, routing=Routing(...), out=out)
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from hetero_cpu_kernels.amx import request_amx
from hetero_cpu_kernels.experts.activations import TILE
from hetero_cpu_kernels.experts.call import (
    Bytes,
    Extent,
    Floats,
    Integers,
    Routing,
    check_arrays,
    check_routing,
    write_addresses,
)
from hetero_cpu_kernels.experts.form import ExpertForm
from hetero_cpu_kernels.experts.job import ABANDONED, compile_job
from hetero_cpu_kernels.experts.placed import ALIGN_BYTES, PlacedProjection, aligned
from hetero_cpu_kernels.experts.plan import (
    ADDRESS_FIELDS,
    FEW_TOKENS,
    GATE_CODES,
    NUMBER_FIELDS,
    PLAN,
    address_of,
    scratch_parts,
    word_of,
)
from hetero_cpu_kernels.experts.targets import Target, best_target
from hetero_cpu_kernels.pool import WorkerPool

_ADDRESS_WORDS = np.array([word_of(path) for path in ADDRESS_FIELDS])
_NUMBER_WORDS = np.array([word_of(path) for path in NUMBER_FIELDS])
_FAILURES = {ABANDONED: "an expert worker was left alone by another that failed"}


class CpuExperts:
    """Compiled for one form, one target and one pool; computes one call at a time.

    `target`: None for the fastest that executes here. Raises ValueError for a form that the kernels cannot
    read, RuntimeError where this processor does not grant what the target needs.
    """

    def __init__(self, form: ExpertForm, pool: WorkerPool, *, target: Target | None = None) -> None:
        self.form, self.target = form, target or best_target()
        self._pool = pool
        if self.target.many == "tiles" and (refusal := request_amx()):
            raise RuntimeError(f"target {self.target.name}: {refusal}")
        self._up, self._down = (
            PlacedProjection(form, matrix, target=self.target) for matrix in (form.up, form.down)
        )
        self._job = compile_job()
        self._few_tokens = self.target.few_tokens
        self._words = np.zeros(PLAN.itemsize // 8, dtype=np.int64)
        self._write_constants(self._words.view(PLAN)[0])
        self._words_at = address_of(self._words)
        self._scratch = np.empty(0, dtype=np.uint8)
        self._scratch_words = (0, 0, 0)
        self._scratch_tokens = 0
        self._pairs: Integers = np.arange(64)
        self._busy = threading.Lock()
        self._began_ns = 0
        self._held: list[Any] = []

    @property
    def last_s(self) -> float:
        """Seconds from `submit` until the last worker finished, of the call that was waited for last."""
        return (self._pool.finished_ns - self._began_ns) / 1e9

    def run(self, hidden: Floats, bank: Bytes, *, routing: Routing, out: Floats) -> None:
        """`submit` and `wait`."""
        self.submit(hidden, bank, routing=routing, out=out)
        self.wait()

    def submit(self, hidden: Floats, bank: Bytes, *, routing: Routing, out: Floats) -> None:
        """Start computing; every element of `out` is written by the time `wait` returns.

        The thread that submits also waits, before it submits again; others that submit meanwhile take turns.
        `hidden`, `out`: `[T, H]`, C-contiguous; `bank`: uint8, flat. All must stay as they are until then.
        Raises ValueError for shapes or numbers that do not fit each other.
        """
        check_arrays(self.form, hidden=hidden, bank=bank, out=out)
        extent = check_routing(self.form, routing, num_tokens=len(hidden), bank_bytes=bank.size)
        self._busy.acquire()
        try:
            self._fill(hidden, bank, routing, out, extent)
            self._began_ns = time.perf_counter_ns()
            self._pool.submit(self._job.address, self._words_at, failures=_FAILURES)
        except BaseException:
            self._busy.release()
            raise

    def wait(self) -> None:
        """Return when the submitted call is done. Raises WorkerError when a worker failed."""
        try:
            self._pool.wait()
        finally:
            self._held.clear()
            self._busy.release()

    @property
    def job_address(self) -> int:
        """Of the job that a plan is given to."""
        return int(self._job.address)

    def lay_out(self, hidden: Floats, bank: Bytes, *, routing: Routing, out: Floats) -> Integers:
        """The words of the plan of such a call, of any experts of up to FEW_TOKENS tokens, for compiled code
        that makes it itself (`standing`); the arrays are its to keep, and `submit` must not be called any
        more. Raises ValueError as `submit`."""
        check_arrays(self.form, hidden=hidden, bank=bank, out=out)
        extent = check_routing(self.form, routing, num_tokens=len(hidden), bank_bytes=bank.size)
        self._few_tokens = FEW_TOKENS
        self._fill(hidden, bank, routing, out, extent._replace(most_tokens=FEW_TOKENS))
        return self._words

    def _write_constants(self, plan: Any) -> None:
        gate = self.form.gate
        plan["control"] = self._pool.control
        plan["hidden"], plan["inner"] = self.form.hidden, self.form.intermediate
        plan["gate"], plan["is_interleaved"] = GATE_CODES[gate.function], gate.is_interleaved
        plan["limit"], plan["alpha"] = gate.limit, gate.alpha
        self._up.write(plan["up"])
        self._down.write(plan["down"])

    def _fill(self, hidden: Floats, bank: Bytes, routing: Routing, out: Floats, extent: Extent) -> None:
        """Write what changes from call to call."""
        records = address_of(bank) + routing.offsets
        inputs, rows = self._place_inputs(routing, len(hidden), extent.most_tokens)
        self._words[_NUMBER_WORDS] = [
            *(len(hidden), len(records), len(routing.tokens)),
            *(extent.least_tokens <= self._few_tokens, extent.most_tokens > self._few_tokens),
            self._few_tokens,
            *self._place_scratch(extent.most_tokens),
            *inputs,
        ]
        write_addresses(self._words, _ADDRESS_WORDS, hidden, out, records, routing)
        self._held = [hidden, bank, routing, out, records, *rows]

    def _place_inputs(
        self, routing: Routing, num_tokens: int, most_tokens: int
    ) -> tuple[list[int], list[Integers]]:
        """Memory of the four inputs: its address and that of each pair's row in it; and those rows.

        `most_tokens`: of an expert. Inputs of many tokens have no memory where none has so many.
        """
        num_pairs = len(routing.tokens)
        pairs = self._first_pairs(num_pairs)
        tokens_at, pairs_at = address_of(routing.tokens), address_of(pairs)
        up = [self._up.few.reserve(num_tokens), tokens_at]
        down = [self._down.few.reserve(num_pairs), pairs_at]
        if most_tokens <= self._few_tokens:
            return [*up, 0, 0, *down, 0, 0], [pairs]
        if self.target.many != "tiles":
            up += [self._up.many.reserve(num_tokens), tokens_at]
            return [*up, *down, self._down.many.reserve(num_pairs), pairs_at], [pairs]
        tile_rows = _tile_rows(routing.bounds)
        num_rows, rows_at = int(tile_rows[-1]) + 1, address_of(tile_rows)
        up += [self._up.many.reserve(num_rows), rows_at]
        return [*up, *down, self._down.many.reserve(num_rows), rows_at], [pairs, tile_rows]

    def _first_pairs(self, count: int) -> Integers:
        """0, 1, 2 ... in memory that is kept: at least `count` of them."""
        if count > len(self._pairs):
            self._pairs = np.arange(2 * count)
        return self._pairs

    def _place_scratch(self, most_tokens: int) -> tuple[int, int, int]:
        """`scratch_at`, `scratch_bytes` and `results` of a plan; kept until it must grow."""
        if most_tokens > self._scratch_tokens:
            programs = self._up.program, self._down.program
            results, size = scratch_parts(most_tokens, programs)
            self._scratch = np.empty(size * self._pool.num_workers + ALIGN_BYTES, dtype=np.uint8)
            self._scratch_words = aligned(self._scratch), size, results
            self._scratch_tokens = most_tokens
        return self._scratch_words


def _tile_rows(bounds: Integers) -> Integers:
    """Each pair's row where every expert begins a group of tokens of its own."""
    counts = np.diff(bounds)
    padded = -(-counts // TILE) * TILE
    starts = np.cumsum(padded) - padded
    return np.repeat(starts - bounds[:-1], counts) + np.arange(int(bounds[-1]))
