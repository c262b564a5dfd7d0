"""What one expert costs on this machine: over the link and on the device, and where it lies on the CPU.

A second or so at the start, on records that nobody has touched since they were read; while running, the costs
follow what layers take.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from hetero_runtime.experts.compute import ExpertMlp, Params
from hetero_runtime.in_place.base import InPlaceExperts, Work
from hetero_runtime.in_place.cores import beside_workers
from hetero_scheduler.misses import CostCurve, Costs, DeviceSide

TOKENS = (1, 4, 16, 64)
_RUNS = 5
_EXPERTS = 4
"""In one call, as many as a layer misses: starting a call costs something too."""
_LEAST_CALL_S = 1e-6
_MOST_S = 1.0
"""For each side: after so long no further number of tokens is tried."""


class Sample(NamedTuple):
    """What is measured with: sizes of the model, and how the device computes an expert."""

    hidden: int
    num_layers: int
    num_experts: int
    dtype: torch.dtype
    mlp: ExpertMlp
    params: Callable[[], Params]
    """Parameters of an expert that is on the device."""


@torch.no_grad()
def measure_costs(
    experts: InPlaceExperts, sample: Sample, device: torch.device, *, load_s: float, overlaps: bool
) -> Costs:
    """Both sides, in up to about two seconds: medians of a few runs, the first run of each kind not counted.

    `load_s`: seconds of one expert over the link, which is measured already; `overlaps`: while the device
    computes. Of a call the backend's part alone is measured; the layer's shows while running.
    """
    x = torch.randn(max(TOKENS), sample.hidden, dtype=sample.dtype, device=device)
    calls_s: list[float] = []

    def compute(tokens: int, _run: int) -> float:
        began = time.perf_counter()
        sample.mlp(x[:tokens], sample.params())
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    def in_place(tokens: int, run: int) -> float:
        work, began = _work(sample, tokens, run), time.perf_counter()
        experts.submit(work)
        done = experts.wait()
        calls_s.append(time.perf_counter() - began - done.seconds)
        return done.seconds

    number = min(_EXPERTS, sample.num_experts)
    with beside_workers(experts.num_workers):
        side = DeviceSide(load_s, CostCurve(_seconds(compute)), overlaps)
        on_cpu = _seconds(in_place)
    curve = CostCurve({tokens: seconds / number for tokens, seconds in on_cpu.items()})
    return Costs(curve, side, call_s=max(_LEAST_CALL_S, statistics.median(calls_s)))


def _seconds(run: Callable[[int, int], float]) -> dict[int, float]:
    """Median of what `run(tokens, number of the run)` gives, by tokens."""
    began, medians = time.perf_counter(), dict[int, float]()
    for tokens in TOKENS:
        medians[tokens] = statistics.median([run(tokens, number) for number in range(1 + _RUNS)][1:])
        if time.perf_counter() - began > _MOST_S:
            break
    return medians


def _work(sample: Sample, tokens: int, run: int) -> Work:
    """Experts of one layer after another, each with `tokens` tokens."""
    number = min(_EXPERTS, sample.num_experts)
    hidden = np.random.default_rng(run).standard_normal((tokens, sample.hidden), dtype=np.float32)
    return Work(
        layer=run % sample.num_layers,
        hidden=hidden,
        experts=np.arange(number),
        bounds=np.arange(number + 1) * tokens,
        tokens=np.tile(np.arange(tokens), number),
        weights=np.full(number * tokens, 1 / number, dtype=np.float32),
    )
