"""Our CPU kernels against kt-kernel's and torch's loop: a layer of Qwen3-30B-A3B, 128 experts, top 8.

Both kernels get bfloat16 activations and each token's experts and weights, and give bfloat16 sums; what has
to be sorted or converted is counted. Every call routes its tokens to other experts, at random, of a layer
that no cache holds. Both have workers on the same cores, all but one; they take turns, and a ratio is the
median over the turns. Before they are timed, sums are held to what the reference makes of the same weights;
kt-kernel rounds activations to int8 for its int8 and int4 kernels, ours do not. Formats: bf16; fp8 in blocks
of 128 by 128; int8 by rows, which kt-kernel quantises itself from bfloat16; int4 in groups of 32.

    python -m bench.against_kt --kt-site FOLDER    where kt_kernel 0.7.2 lies, if not on the path
    python -m bench.against_kt --older PACKAGE     not with kt-kernel, but with an older hetero_cpu_kernels of
                                                   another name, on the path; prints rows, writes no file
                               --formats bf16 fp8 --tokens 1 256    so many of both

Some 100 s on 16 cores. Rows are written after each format, so a run that is killed keeps them. Without
kt-kernel a result is written too, and the exit status is not 0. What C code prints goes to standard error.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from bench.cpu_expert_records import Bytes, Floats, layer_reference, make_form, random_record, relative_error
from bench.cpu_experts import FORMATS, HIDDEN, INTERMEDIATE, TOP_K, Bank, against_torch, one_token
from bench.harness import RESULTS, ResultFile, Row, attempt
from hetero_cpu_kernels.experts import CpuExperts, ExpertForm, Routing
from hetero_cpu_kernels.ktransformers import CallMemory, KtLayer, KtPool
from hetero_cpu_kernels.ktransformers.library import quiet
from hetero_cpu_kernels.pool import WorkerPool, place_workers
from hetero_cpu_kernels.topology import read_topology
from hetero_runtime.expert_file.stored import page_aligned

DEVICE = "cpu"

NUM_EXPERTS = 128
CHECKED_TOKENS, CHECKED_EXPERTS = 24, 12
"""16 tokens an expert: enough for the kernels of many."""
DIFFERENT = 8
"""Experts whose weights differ; the others repeat them, elsewhere in memory."""
COMPARED = ("bf16", "int8", "fp8", "int4")
TARGETS = {"bf16": ">=1.0", "int8": ">=1.1", "fp8": ">=1.15", "int4": ">=1.2"}
"""At one token; with more, no slower."""
CALLS = {1: 40, 16: 12, 64: 6, 256: 3}
"""By tokens: calls of one turn."""
ROUNDS = 5
SETTLE_S = 0.08
"""After a turn: kt-kernel's workers spin for 50 ms more, torch's for some."""
MOST_ERROR = {"bf16": 1e-2, "fp8": 1e-2, "int8": 6e-2, "int4": 4e-2}
"""Of either sum; ours is bfloat16 at the end, and rounded to it where many tokens are multiplied."""


class Call(NamedTuple):
    """Random work: bfloat16 bits `[T, H]`, experts and weights `[T, K]`."""

    hidden: torch.Tensor
    experts: np.ndarray
    weights: Floats

    @classmethod
    def of(cls, num_tokens: int, rng: np.random.Generator, *, num_experts: int | None = None) -> Call:
        """Of the first `num_experts`, or all."""
        chosen = rng.random((num_tokens, num_experts or NUM_EXPERTS)).argsort(axis=1)[:, :TOP_K]
        weights = rng.uniform(0.5, 1.0, (num_tokens, TOP_K)).astype(np.float32)
        hidden = torch.from_numpy(rng.standard_normal((num_tokens, HIDDEN)).astype(np.float32)).bfloat16()
        return cls(hidden, np.ascontiguousarray(chosen), weights / weights.sum(1, keepdims=True))

    def routing(self, record_bytes: int) -> Routing:
        """The same, expert after expert."""
        flat = self.experts.reshape(-1)
        order = np.argsort(flat, kind="stable")
        counts = np.bincount(flat, minlength=NUM_EXPERTS)
        used = np.flatnonzero(counts)
        return Routing(
            offsets=used * record_bytes,
            bounds=np.concatenate([[0], np.cumsum(counts[used])]),
            tokens=order // TOP_K,
            weights=self.weights.reshape(-1)[order],
        )


class Side(NamedTuple):
    """Who computes. `run`: a layer's sum, bfloat16 `[T, H]`."""

    name: str
    run: Callable[[Call], torch.Tensor]


def our_side(experts: CpuExperts, pool: WorkerPool, bank: Bytes) -> Side:
    def run(call: Call) -> torch.Tensor:
        hidden = call.hidden.float().numpy()
        out = np.empty_like(hidden)
        experts.run(hidden, bank, routing=call.routing(experts.form.record_bytes), out=out)
        return torch.from_numpy(out).bfloat16()

    return Side(f"ours ({pool.num_workers} workers, {experts.target.name})", run)


def their_side(layer: KtLayer, pool: KtPool) -> Side:
    def run(call: Call) -> torch.Tensor:
        layer.submit(call.hidden.view(torch.uint16).numpy(), call.experts, call.weights)
        return torch.from_numpy(layer.wait()).view(torch.bfloat16)

    return Side(f"kt-kernel 0.7.2 ({pool.num_workers} workers)", run)


class Layer(NamedTuple):
    """One format's experts: the records, and the records of those that differ."""

    name: str
    form: ExpertForm
    bank: Bytes
    different: list[Bytes]

    @classmethod
    def of(cls, name: str) -> Layer:
        form, rng = make_form(FORMATS[name], HIDDEN, INTERMEDIATE), np.random.default_rng(0)
        different = [random_record(form, rng)[0] for _ in range(DIFFERENT)]
        records = page_aligned(NUM_EXPERTS, form.record_bytes)  # as a model's lie
        records.reshape(-1, DIFFERENT, form.record_bytes)[:] = different
        return cls(name, form, records.reshape(-1), different)

    def check(self, *sides: Side) -> list[float]:
        """Relative errors against the reference; raises AssertionError where one is too large."""
        call = Call.of(CHECKED_TOKENS, np.random.default_rng(7), num_experts=CHECKED_EXPERTS)
        errors = [0.0] * len(sides)
        for part in (call, Call(*(array[:1] for array in call))):
            routing = part.routing(self.form.record_bytes)
            numbers = routing.offsets // self.form.record_bytes % DIFFERENT
            plain = [self.different[number] for number in numbers.tolist()]
            expected = layer_reference(part.hidden.float().numpy(), plain, self.form, routing)
            for i, side in enumerate(sides):
                error = relative_error(side.run(part).float().numpy(), expected)
                assert error <= MOST_ERROR[self.name], f"{side.name}, {self.name}: relative error {error:.1e}"
                errors[i] = max(errors[i], error)
        return errors


def turn(side: Side, calls: Sequence[Call]) -> float:
    """Median seconds of a call, after one that is not counted."""
    times = []
    for call in (calls[-1], *calls):
        start = time.perf_counter()
        side.run(call)
        times.append(time.perf_counter() - start)
    time.sleep(SETTLE_S)
    return statistics.median(times[1:])


def compare(
    layer: Layer, ours: Side, theirs: Side, *, tokens: Sequence[int] = (), peer: str = "kt"
) -> list[Row]:
    """How many times faster ours is, by tokens (none: all that `CALLS` has)."""
    errors = layer.check(ours, theirs)
    rows, rng = [], np.random.default_rng(1)
    for num_tokens in tokens or CALLS:
        number = CALLS[num_tokens]
        turns = []
        for _ in range(ROUNDS):
            calls = [Call.of(num_tokens, rng) for _ in range(number)]
            turns.append((turn(ours, calls), turn(theirs, calls)))
        ratios = [theirs_s / ours_s for ours_s, theirs_s in turns]
        ours_ms, theirs_ms = (1e3 * statistics.median(times) for times in zip(*turns, strict=True))
        rate = f", {TOP_K * layer.form.weight_bytes / ours_ms / 1e6:.1f} GB/s" if num_tokens == 1 else ""
        rows.append(
            Row(
                id=f"cpu.vs_{peer}_q{num_tokens}_{layer.name}",
                value=statistics.median(ratios),
                unit="times faster",
                target=TARGETS[layer.name] if num_tokens == 1 else ">=1.0",
                reference=f"{theirs.name}, same run: {theirs_ms:.3f} ms",
                note=f"{ours.name}: {ours_ms:.3f} ms{rate}; {min(ratios):.2f} to {max(ratios):.2f} in "
                f"{ROUNDS} turns; errors {errors[0]:.1e} and {errors[1]:.1e}",
            )
        )
    return rows


def compare_format(name: str, pool: WorkerPool, their_pool: KtPool) -> list[Row]:
    """Make a layer, their copy of it, and compare."""
    layer = Layer.of(name)
    records = layer.bank.reshape(NUM_EXPERTS, -1)
    memory = CallMemory(HIDDEN, top_k=TOP_K, most_tokens=max(CALLS))
    copy = KtLayer(their_pool, layer.form, records, memory=memory)
    ours = our_side(CpuExperts(layer.form, pool), pool, layer.bank)
    return compare(layer, ours, their_side(copy, their_pool))


def against_kt(cpus: tuple[int, ...], rows: list[Row], save: Callable[[], object]) -> None:
    """Add the rows of all formats, one after another: two copies of a layer are in memory at a time."""
    torch.set_num_threads(1)
    their_pool = KtPool(cpus)
    everywhere = os.sched_getaffinity(0)
    with WorkerPool(cpus) as pool:
        os.sched_setaffinity(0, their_pool.spare_cpus)  # this thread, which calls, is on no worker's core
        for name in COMPARED:
            rows += (
                attempt(f"{name} against kt-kernel", partial(compare_format, name, pool, their_pool)) or []
            )
            save()
        os.sched_setaffinity(0, everywhere)
    their_pool.close()


def against_older(package: str, cpus: tuple[int, ...], options: argparse.Namespace) -> None:
    """Print how many times faster these kernels are than those of another package, row by row."""
    experts, pools = (importlib.import_module(f"{package}.{part}") for part in ("experts", "pool"))
    torch.set_num_threads(1)
    with WorkerPool(cpus) as pool, pools.WorkerPool(cpus) as their_pool:
        for name in options.formats:
            layer = Layer.of(name)
            ours = our_side(CpuExperts(layer.form, pool), pool, layer.bank)
            theirs = our_side(experts.CpuExperts(layer.form, their_pool), their_pool, layer.bank)
            theirs = theirs._replace(name=package)
            for row in compare(layer, ours, theirs, tokens=options.tokens, peer="older"):
                print(f"{row.id} {row.value:.3f}  {row.reference}; {row.note}", flush=True)


def alone(cpus: tuple[int, ...]) -> list[Row]:
    """Share of the DRAM rate by format, with a worker a core or one fewer, and against torch's loop."""
    torch.set_num_threads(len(cpus))
    rows: list[Row] = []
    with WorkerPool(cpus) as pool, WorkerPool(cpus[: max(1, len(cpus) - 1)]) as fewer:
        for name in COMPARED:
            bank = Bank.of(name, pool)
            rows.append(one_token([bank, bank.on(fewer)]))
            if name == "bf16":
                rows.append(against_torch(bank))
    return rows


def save(rows: Sequence[Row], folder: Path) -> None:
    """What is known so far, if anything is."""
    if rows:
        ResultFile.of("against_kt", rows).save(folder)


def main() -> int:
    """Measure, write, return how many formats were not compared."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kt-site", type=Path, help="folder with the package kt_kernel")
    parser.add_argument(
        "--threads", type=int, help="of both, in the comparison (default: every core but one)"
    )
    parser.add_argument("--older", metavar="PACKAGE", help="compare with it instead")
    parser.add_argument("--formats", nargs="+", choices=COMPARED, default=COMPARED, help="with --older")
    parser.add_argument("--tokens", nargs="+", type=int, choices=CALLS, default=tuple(CALLS), help="the same")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    options = parser.parse_args()
    if options.kt_site:
        sys.path.append(str(options.kt_site))
    topology = read_topology()
    if options.older:
        against_older(options.older, place_workers(topology, options.threads), options)
        return 0
    with quiet():
        rows = attempt("our kernels alone", lambda: alone(place_workers(topology, len(topology.cores)))) or []
        workers = place_workers(topology, options.threads)
        attempt("the comparison", lambda: against_kt(workers, rows, lambda: save(rows, options.results)))
    if rows:
        ResultFile.write("against_kt", rows, folder=options.results)
    missing = len(COMPARED) - sum(row.id.startswith("cpu.vs_kt_q1_") for row in rows)
    if missing:
        print(
            f"{missing} of {len(COMPARED)} formats were not compared with kt-kernel: see above",
            file=sys.stderr,
        )
    return missing


if __name__ == "__main__":
    sys.exit(main())
