"""Expert kernels of one Qwen3-30B-A3B layer on the CPU, against what the same cores read from memory.

At one token an expert reads its weights once, so what it can reach is what the best reader reaches. Every
call takes other experts of a bank that no cache holds. Reader and kernels take turns, and a share is the
median over the turns: what else runs on the machine slows down both. A kernel is compared with its reference
before it is timed.

    python -m bench.cpu_experts                       all formats, all cores; one token also with one fewer
    python -m bench.cpu_experts --formats bf16 int8 int4 fp8
    python -m bench.cpu_experts --machine devbox      as cpu_experts_devbox.json, rows cpu_devbox.*
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from bench.cpu_expert_records import layer_reference, make_form, random_record, relative_error
from bench.harness import RESULTS, ResultFile, Row, attempt
from hetero_cpu_kernels.bandwidth import dram_read_gb_s
from hetero_cpu_kernels.experts import CpuExperts, ExpertForm, Routing
from hetero_cpu_kernels.pool import WorkerPool, place_workers
from hetero_cpu_kernels.topology import read_topology
from hetero_runtime.expert_file.stored import page_aligned

DEVICE = "cpu"

HIDDEN, INTERMEDIATE, TOP_K = 2048, 768, 8
FORMATS = {
    "bf16": "bfloat16",
    "packed": "packed",
    "fp16": "float16",
    "fp8": "fp8",
    "int8": "int8",
    "int4": "int4",
    "mxfp4": "fp4",
}
MANY_TOKENS = (16, 64, 256)
BANK_BYTES = 400 << 20
ROUNDS = 9
CALLS = 6
STEP_CALLS = 24
"""Calls of one token that follow each other, as the layers of a step do."""
MOST_ERROR = 6e-3


@dataclass
class Bank:
    """Experts of one format, more than a cache holds, and the kernels for them."""

    name: str
    form: ExpertForm
    memory: np.ndarray
    experts: CpuExperts
    pool: WorkerPool
    next_expert: int = 0

    @classmethod
    def of(cls, name: str, pool: WorkerPool) -> Bank:
        form = make_form(FORMATS[name], HIDDEN, INTERMEDIATE)
        plain, packed = random_record(form, np.random.default_rng(0))
        records = page_aligned(-(-BANK_BYTES // form.record_bytes), form.record_bytes)  # as a model's lie
        records[:] = packed
        bank = cls(name, form, records.reshape(-1), CpuExperts(form, pool), pool)
        bank.check(plain)
        return bank

    def on(self, pool: WorkerPool) -> Bank:
        """The same experts, computed by another pool."""
        return Bank(self.name, self.form, self.memory, CpuExperts(self.form, pool), pool, self.next_expert)

    @property
    def workers(self) -> str:
        """Who computes, in words."""
        count = self.pool.num_workers
        return f"{count} {'worker' if count == 1 else 'workers'}, target {self.experts.target.name}"

    def check(self, plain: np.ndarray) -> None:
        """Raise AssertionError when the kernels do not compute what the reference does."""
        for num_tokens in (1, 16):
            hidden, routing, out = self.call(num_tokens, 2)
            self.experts.run(hidden, self.memory, routing=routing, out=out)
            error = relative_error(out, layer_reference(hidden, [plain] * 2, self.form, routing))
            assert error <= MOST_ERROR, f"{self.name}, {num_tokens} tokens: relative error {error:.1e}"

    def call(self, num_tokens: int, num_experts: int) -> tuple[np.ndarray, Routing, np.ndarray]:
        """Activations, a routing to the next experts of the bank, and room for the output."""
        number = len(self.memory) // self.form.record_bytes
        chosen = np.sort((self.next_expert + np.arange(num_experts)) % number)
        self.next_expert = (self.next_expert + num_experts) % number
        hidden = np.random.default_rng(1).standard_normal((num_tokens, HIDDEN)).astype(np.float32)
        routing = Routing(
            offsets=chosen * self.form.record_bytes,
            bounds=np.arange(num_experts + 1) * num_tokens,
            tokens=np.tile(np.arange(num_tokens), num_experts),
            weights=np.full(num_tokens * num_experts, 1 / num_experts, np.float32),
        )
        return hidden, routing, np.empty_like(hidden)

    def seconds(self, num_tokens: int, num_experts: int, calls: int) -> float:
        """Of one call: the median."""
        times = []
        for _ in range(calls):
            hidden, routing, out = self.call(num_tokens, num_experts)
            start = time.perf_counter()
            self.experts.run(hidden, self.memory, routing=routing, out=out)
            times.append(time.perf_counter() - start)
        return statistics.median(times)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write, return how many formats failed."""
    options = parse(arguments)
    topology = read_topology()
    cpus = place_workers(topology, options.threads or len(topology.cores))
    torch.set_num_threads(len(cpus))
    rows: list[Row] = []
    num_failed = 0
    with WorkerPool(cpus) as pool, WorkerPool(cpus[: max(1, len(cpus) - 1)]) as fewer:
        for name in options.formats:
            began = time.monotonic()
            found = attempt(name, partial(measure_format, name, (pool, fewer)))
            num_failed += found is None
            rows += found or []
            print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    if rows:
        suffix = f"_{options.machine}" if options.machine else ""
        rows = [replace(row, id=row.id.replace("cpu.", f"cpu{suffix}.", 1)) for row in rows]
        ResultFile.write(f"cpu_experts{suffix}", rows, folder=options.results)
    return num_failed


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--machine", help="name of a machine whose result is kept beside the main one")
    parser.add_argument("--threads", type=int, help="workers, and reading threads (default: every core)")
    parser.add_argument("--formats", nargs="+", choices=tuple(FORMATS), default=list(FORMATS))
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    return parser.parse_args(arguments)


def measure_format(name: str, pools: Sequence[WorkerPool]) -> list[Row]:
    """All rows of a format; the first pool is the one with a worker on every processor."""
    bank = Bank.of(name, pools[0])
    rows = [one_token([bank, *(bank.on(pool) for pool in pools[1:])])]
    rows += [many_tokens(bank, tokens) for tokens in MANY_TOKENS]
    return [*rows, against_torch(bank)] if name == "bf16" else rows


def best_reader_gb_s(cpus: tuple[int, ...]) -> float:
    """The better of one reading thread on each worker's processor, and one alone."""
    return max(dram_read_gb_s(n, cpus=cpus, buffer_bytes=256 << 20, repeats=3) for n in {1, len(cpus)})


def one_token(banks: Sequence[Bank]) -> Row:
    """Share of the best reader's rate at one token: that of the pool which does best.

    `banks`: one format's, each with another pool; the first has the processors that are read with. A worker
    on every core takes turns with whoever calls; one fewer leaves the caller a core.
    """
    num_bytes = TOP_K * banks[0].form.weight_bytes
    shares, rates, reads = [list[float]() for _ in banks], [list[float]() for _ in banks], list[float]()
    for _ in range(ROUNDS):
        before = best_reader_gb_s(banks[0].pool.cpus)
        round_rates = [num_bytes / step_call_seconds(bank) / 1e9 for bank in banks]
        reads.append(max(before, best_reader_gb_s(banks[0].pool.cpus)))
        for i, rate in enumerate(round_rates):
            rates[i].append(rate)
            shares[i].append(rate / reads[-1])
    best = max(range(len(banks)), key=lambda i: statistics.median(shares[i]))
    others = ", ".join(
        f"{statistics.median(shares[i]):.2f} with {bank.workers}" for i, bank in enumerate(banks) if i != best
    )
    return Row(
        id=f"cpu.bw_share_{banks[0].name}",
        value=statistics.median(shares[best]),
        unit="of the best reader",
        target=">=0.85",
        reference=f"measured reader: {statistics.median(reads):.1f} GB/s",
        note=f"one token, {TOP_K} experts, {statistics.median(rates[best]):.1f} GB/s of weights, "
        f"{banks[best].workers}; shares {min(shares[best]):.2f} to {max(shares[best]):.2f}"
        + (f"; {others}" if others else ""),
    )


def step_call_seconds(bank: Bank) -> float:
    """Of one call of one token, made from a core that no worker has, where there is one."""
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, everywhere - set(bank.pool.cpus) or everywhere)
    try:
        return bank.seconds(1, TOP_K, STEP_CALLS)
    finally:
        os.sched_setaffinity(0, everywhere)


def many_tokens(bank: Bank, num_tokens: int) -> Row:
    """Rate of the products when each expert has so many tokens."""
    num_experts = 4
    seconds = bank.seconds(num_tokens, num_experts, CALLS)
    operations = 2 * 3 * HIDDEN * INTERMEDIATE * num_tokens * num_experts
    return Row(
        id=f"cpu.q{num_tokens}_{bank.name}_gflops",
        value=operations / seconds / 1e9,
        unit="GFLOP/s",
        note=f"{num_tokens} tokens for each of {num_experts} experts, {1e3 * seconds:.2f} ms, "
        f"{num_experts * bank.form.weight_bytes / seconds / 1e9:.1f} GB/s of weights; {bank.workers}",
    )


def against_torch(bank: Bank) -> Row:
    """How many times faster than torch's loop over the same records at one token."""
    ratios = []
    for _ in range(ROUNDS):
        loop = torch_seconds(bank)
        ratios.append(loop / bank.seconds(1, TOP_K, CALLS))
    return Row(
        id="cpu.vs_torch_q1",
        value=statistics.median(ratios),
        unit="times faster",
        target=">=2",
        reference=f"torch's loop in this run: {1e3 * loop:.2f} ms",
        note=f"bf16, one token, {TOP_K} experts; {min(ratios):.2f} to {max(ratios):.2f}; {bank.workers}",
    )


def torch_seconds(bank: Bank) -> float:
    """Of the same layer as a loop of torch's products over views of the bank: the median."""
    memory = torch.from_numpy(bank.memory)

    def weights(offset: int) -> tuple[torch.Tensor, torch.Tensor]:
        views = []
        for matrix in (bank.form.up, bank.form.down):
            begin = offset + matrix.offset
            flat = memory[begin : begin + matrix.num_bytes].view(torch.bfloat16)
            views.append(flat.view(matrix.rows, matrix.cols))
        return views[0], views[1]

    def run(hidden: torch.Tensor, routing: Routing) -> None:
        total = torch.zeros_like(hidden)
        for offset in routing.offsets.tolist():
            up, down = weights(offset)
            gate, value = F.linear(hidden, up).chunk(2, dim=-1)
            total += F.linear(F.silu(gate) * value, down) / TOP_K

    return _median_seconds(lambda hidden, routing: run(torch.from_numpy(hidden).bfloat16(), routing), bank)


def _median_seconds(run: Callable[[np.ndarray, Routing], None], bank: Bank) -> float:
    times = []
    for _ in range(CALLS):
        hidden, routing, _ = bank.call(1, TOP_K)
        start = time.perf_counter()
        run(hidden, routing)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
