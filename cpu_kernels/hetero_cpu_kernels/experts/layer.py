"""One layer's experts on the CPU, where their records lie: `CpuExperts`.

experts = CpuExperts(form, pool)
experts.run(hidden, bank, routing=Routing(...), out=out)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hetero_cpu_kernels.amx import request_amx
from hetero_cpu_kernels.experts.activations import TILE
from hetero_cpu_kernels.experts.form import ExpertForm
from hetero_cpu_kernels.experts.job import ABANDONED, compile_job
from hetero_cpu_kernels.experts.placed import ALIGN_BYTES, PlacedProjection, aligned
from hetero_cpu_kernels.experts.plan import (
    CALL_FIELDS,
    FEW_TOKENS,
    GATE_CODES,
    MOST_TOKENS,
    PLAN,
    address_of,
    scratch_parts,
    word_of,
)
from hetero_cpu_kernels.experts.targets import Target, best_target
from hetero_cpu_kernels.pool import WorkerPool

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

_CALL_WORDS = np.array([word_of(path) for path in CALL_FIELDS])
_FAILURES = {ABANDONED: "an expert worker was left alone by another that failed"}


class Routing(NamedTuple):
    """Which experts compute which tokens.

    Expert i has its record at byte `offsets[i]` of the bank, and the tokens `tokens[bounds[i]:bounds[i+1]]`
    with those `weights`. A token's sum is in the order of the experts: list them ascending.
    """

    offsets: Integers
    """`[experts]`"""
    bounds: Integers
    """`[experts + 1]`"""
    tokens: Integers
    """`[pairs]`, rows of `hidden`"""
    weights: Floats
    """`[pairs]`"""


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
            PlacedProjection(form, matrix, self.target) for matrix in (form.up, form.down)
        )
        self._job = compile_job()
        self._words = np.zeros(PLAN.itemsize // 8, dtype=np.int64)
        self._write_constants(self._words.view(PLAN)[0])
        self._scratch = np.empty(0, dtype=np.uint8)
        self._held: list[Any] = []

    def run(self, hidden: Floats, bank: Bytes, *, routing: Routing, out: Floats) -> None:
        """`submit` and `wait`."""
        self.submit(hidden, bank, routing=routing, out=out)
        self.wait()

    def submit(self, hidden: Floats, bank: Bytes, *, routing: Routing, out: Floats) -> None:
        """Start computing; every element of `out` is written by the time `wait` returns.

        `hidden`, `out`: `[T, H]`, C-contiguous; `bank`: uint8, flat. All must stay as they are until then.
        Raises ValueError for shapes or numbers that do not fit each other.
        """
        _check(self.form, hidden, bank, out)
        _check_routing(self.form, hidden, bank, routing)
        self._fill(hidden, bank, routing, out)
        self._pool.submit(self._job.address, address_of(self._words), failures=_FAILURES)

    def wait(self) -> None:
        """Return when the submitted call is done. Raises WorkerError when a worker failed."""
        try:
            self._pool.wait()
        finally:
            self._held.clear()

    def _write_constants(self, plan: Any) -> None:
        gate = self.form.gate
        plan["control"] = self._pool.control
        plan["hidden"], plan["inner"] = self.form.hidden, self.form.intermediate
        plan["gate"], plan["is_interleaved"] = GATE_CODES[gate.function], gate.is_interleaved
        plan["limit"], plan["alpha"] = gate.limit, gate.alpha
        self._up.write(plan["up"])
        self._down.write(plan["down"])

    def _fill(self, hidden: Floats, bank: Bytes, routing: Routing, out: Floats) -> None:
        """Write `CALL_FIELDS`: in one go, because a call of one token lasts less than a millisecond."""
        records = address_of(bank) + routing.offsets
        counts = np.diff(routing.bounds)
        arrays: tuple[npt.NDArray[Any], ...] = (
            hidden,
            out,
            records,
            routing.bounds,
            routing.tokens,
            routing.weights,
        )
        most, least = int(counts.max(initial=0)), int(counts.min(initial=MOST_TOKENS))
        sizes = len(hidden), len(counts), len(routing.tokens), least <= FEW_TOKENS, most > FEW_TOKENS
        inputs, pairs = self._place_inputs(routing, len(hidden))
        addresses = map(address_of, arrays)
        self._words[_CALL_WORDS] = [*sizes, *addresses, *self._place_scratch(max(1, most)), *inputs]
        self._held = [*arrays, *pairs]

    def _place_inputs(self, routing: Routing, num_tokens: int) -> tuple[list[int], list[Integers]]:
        """Memory of the four inputs: its address and that of each pair's row in it; and those rows."""
        pairs = np.arange(len(routing.tokens))
        if self.target.many == "tiles":
            tile_rows = _tile_rows(routing.bounds)
            num_tile_rows = int(tile_rows[-1]) + 1 if len(pairs) else 0
            uses = [(routing.tokens, num_tokens), (tile_rows, num_tile_rows)]
            uses += [(pairs, len(pairs)), (tile_rows, num_tile_rows)]
        else:
            uses = [(routing.tokens, num_tokens)] * 2 + [(pairs, len(pairs))] * 2
        inputs = self._up.few, self._up.many, self._down.few, self._down.many
        placed = [
            (memory.reserve(num_rows), address_of(rows))
            for memory, (rows, num_rows) in zip(inputs, uses, strict=True)
        ]
        return [address for place in placed for address in place], [rows for rows, _ in uses]

    def _place_scratch(self, most_tokens: int) -> tuple[int, int, int, int]:
        """`scratch_at`, `scratch_bytes`, `results` and `tile_results` of a plan."""
        programs = self._up.program, self._down.program
        results, tile_results, size = scratch_parts(most_tokens, programs)
        needed = size * self._pool.num_workers + ALIGN_BYTES
        if needed > self._scratch.size:
            self._scratch = np.empty(needed, dtype=np.uint8)
        return aligned(self._scratch), size, results, tile_results


def _tile_rows(bounds: Integers) -> Integers:
    """Each pair's row where every expert begins a group of tokens of its own."""
    counts = np.diff(bounds)
    padded = -(-counts // TILE) * TILE
    starts = np.cumsum(padded) - padded
    return np.repeat(starts - bounds[:-1], counts) + np.arange(int(bounds[-1]))


def _check(form: ExpertForm, hidden: Floats, bank: Bytes, out: Floats) -> None:
    for name, floats in (("hidden", hidden), ("out", out)):
        if floats.dtype != np.float32 or floats.ndim != 2 or floats.shape[1] != form.hidden:
            raise ValueError(f"{name} is {floats.dtype} {floats.shape}, not float32 [tokens, {form.hidden}]")
    if len(hidden) != len(out):
        raise ValueError(f"hidden has {len(hidden)} tokens, out {len(out)}")
    arrays: dict[str, npt.NDArray[Any]] = {"hidden": hidden, "bank": bank, "out": out}
    for name, array in arrays.items():
        if not array.flags.c_contiguous:
            raise ValueError(f"{name} is not C-contiguous")
    if bank.dtype != np.uint8 or bank.ndim != 1:
        raise ValueError(f"bank is {bank.dtype} {bank.shape}, not flat uint8")


def _check_routing(form: ExpertForm, hidden: Floats, bank: Bytes, routing: Routing) -> None:
    for name, array in routing._asdict().items():
        expected = np.float32 if name == "weights" else np.int64
        if array.dtype != expected or array.ndim != 1 or not array.flags.c_contiguous:
            raise ValueError(f"routing.{name} is {array.dtype} {array.shape}, not flat {expected.__name__}")
    offsets, bounds, tokens, weights = routing
    if len(bounds) != len(offsets) + 1 or bounds[0] != 0 or bounds[-1] != len(tokens):
        raise ValueError(f"routing.bounds must be {len(offsets) + 1} numbers from 0 to {len(tokens)}")
    if len(weights) != len(tokens):
        raise ValueError(f"routing has {len(tokens)} tokens and {len(weights)} weights")
    counts = np.diff(bounds)
    if len(counts) and (counts.min() < 1 or counts.max() > MOST_TOKENS):
        raise ValueError(f"an expert has {counts.min()} or {counts.max()} tokens, not 1 to {MOST_TOKENS}")
    if len(tokens) and (tokens.min() < 0 or tokens.max() >= len(hidden)):
        raise ValueError(f"routing.tokens name rows outside of the {len(hidden)} of hidden")
    if len(offsets) and (offsets.min() < 0 or offsets.max() + form.record_bytes > bank.size):
        raise ValueError(f"a record of {form.record_bytes} bytes ends outside of the bank's {bank.size}")
