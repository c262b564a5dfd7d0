"""Preset seqmoe on the bundled model, on this machine's CPU: hits and speed beside LRU's and the simulator's.

`python -m bench.bundled_foresight`. On device `cpu` a copy overlaps with nothing, so forecasts decide
evictions alone. The same text comes out either way, so hit rates are of the same routing. Speeds are taken in
turns, one answer by each engine, so that whatever else the machine does falls on all of them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.bundled_decode import PROMPTS
from bench.harness import RESULTS, ResultFile, Row
from bench.simulated_twin import simulated_hits
from hetero_runtime.assembly import Parts, assemble
from hetero_runtime.config import load_config
from hetero_runtime.engine import Engine
from hetero_runtime.hf.routing_record import record_routing
from hetero_runtime.planned import plan_for
from hetero_runtime.prediction import read_predictor
from hetero_scheduler.predict.mamba2 import Mamba2Predictor
from hetero_scheduler.simulator import Scenario
from hetero_scheduler.trace import Trace

DEVICE = "cpu"

RESIDENCIES = {"25": 0.25, "45": 0.45}
ROUNDS = 3


class Served(NamedTuple):
    """One engine, with the speeds of its answers."""

    engine: Engine
    parts: Parts
    tok_s: list[float]

    @property
    def hit_rate(self) -> float:
        """In decode, all answers together."""
        return self.engine.stats().decode.cache.hit_rate


def load(preset: str, residency: float) -> Served:
    """The bundled model under `preset`."""
    config = load_config(
        {
            "preset": preset,
            "device": "cpu",
            "memory": {"residency": residency},
            "execution": {"max_length": 1024},
        }
    )
    parts = assemble(plan_for(config).config)
    return Served(Engine(parts), parts, [])


def answer(served: Served, prompt: str, seed: int, num_tokens: int) -> None:
    """One answer, its speed kept."""
    completion = served.engine.generate(
        prompt, max_tokens=num_tokens, temperature=0.8, seed=seed, ignore_eos=True
    )
    served.tok_s.append(completion.timings.tok_s)


def measure(residency: float, num_tokens: int) -> tuple[Served, Served]:
    """(LRU, seqmoe), each with the same answers; the engines are still open."""
    both = load("lru", residency), load("seqmoe", residency)
    for served in both:
        served.engine.generate(PROMPTS[0], max_tokens=8)
    for seed in range(ROUNDS):
        for prompt in PROMPTS:
            for served in both:
                answer(served, prompt, seed, num_tokens)
    return both


def engine_minus_simulator(served: Served, residency: float, num_tokens: int) -> float:
    """Points between the two hit rates of one long answer: see `bench.simulated_twin`."""
    before = served.engine.stats().decode.cache
    with record_routing(served.parts.model) as record:
        answer(served, PROMPTS[0], ROUNDS, 4 * num_tokens)
        routing = record.take()
    counted = served.engine.stats().decode.cache - before
    steps = len(routing.logits)
    trace = Trace(
        routing.logits.numpy(),
        routing.top_k.numpy(),
        np.zeros(steps, dtype=np.int32),
        np.array([0, steps], dtype=np.int64),
    )
    scenario = Scenario(eviction="belady", predictor="mamba2", residency=residency)
    predictor = Mamba2Predictor(read_predictor(served.parts.config.prediction.path).models)
    simulated = simulated_hits(trace, scenario, num_counted=4 * num_tokens - 1, predictor=predictor)
    return 100 * abs(counted.hit_rate - simulated)


def rows_of(name: str, residency: float, num_tokens: int) -> list[Row]:
    """Everything at one residency."""
    lru, seqmoe = measure(residency, num_tokens)
    note = f"sampled at 0.8, {ROUNDS} × {len(PROMPTS)} answers of {num_tokens} tokens, the same texts"
    speeds = [statistics.median(served.tok_s) for served in (lru, seqmoe)]
    rows = [
        Row(
            id=f"foresight.bundled_hit_{name}",
            value=100 * seqmoe.hit_rate,
            unit="%",
            reference=f"LRU {100 * lru.hit_rate:.1f}",
            note=f"forecasts decide evictions, nothing is prefetched; {note}",
        ),
        Row(
            id=f"foresight.bundled_over_lru_{name}",
            value=speeds[1] / speeds[0],
            unit="ratio",
            reference=f"LRU {speeds[0]:.0f} tok/s",
            note=f"{speeds[1]:.0f} tok/s; medians, taken in turns",
        ),
        Row(
            id=f"foresight.bundled_minus_sim_{name}",
            value=engine_minus_simulator(seqmoe, residency, num_tokens),
            unit="points",
            target="<=1",
            note=f"one answer of {4 * num_tokens} tokens; the simulator begins with an empty cache, the "
            "engine with what earlier answers left",
        ),
    ]
    for served in (lru, seqmoe):
        served.engine.close()
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write `bundled_foresight.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=160, help="decoded for each prompt")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    options = parser.parse_args(arguments)
    rows = [row for name, share in RESIDENCIES.items() for row in rows_of(name, share, options.tokens)]
    ResultFile.write("bundled_foresight", rows, folder=options.results)


if __name__ == "__main__":
    main()
