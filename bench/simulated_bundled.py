"""Hit rates of simulated caches on the bundled model's own routing.

    python -m bench.simulated_bundled HELDOUT SAMPLED [PREDICTOR]

HELDOUT and SAMPLED are traces of the bundled model (`hetero-runtime trace`): held-out text, and text that it
wrote at temperature 0.8. Caches alone are replayed on both; forecasts and prefetches, whose replay is not
compiled, on the second. PREDICTOR is a file of `hetero-runtime train-predictor`, trained on other text than
SAMPLED; only the 32 tokens of held-out text that begin each of its documents may be known to it.

The imagined machine is the GPU box with block-fp8 Qwen3-30B-A3B experts: hit rates of prefetching policies
depend on it, those of caches alone do not. The bundled model has 8 layers, so a forecast of the next step
leaves a sixth of the time that it leaves in a model of 48.

No `DEVICE`: it needs traces, so `python -m bench` does not run it.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from bench.harness import RESULTS, ResultFile, Row
from hetero_runtime.prediction import RouterFingerprint, read_predictor
from hetero_runtime.simulation import Sweep, draw_hit_rates, run_sweep
from hetero_runtime.simulation.report import machine_line, policy_name, trace_line
from hetero_runtime.trace import TraceInfo, read_trace
from hetero_scheduler.predict import Predictor
from hetero_scheduler.predict.mamba2 import Mamba2Predictor
from hetero_scheduler.simulator import Machine, SimulationResult
from hetero_scheduler.simulator.foreseen import Foreseen
from hetero_scheduler.trace import Trace

MACHINE = Machine(layer_ms=0.1, record_bytes=4_724_736, link_gb_s=55.0)
CACHES = Sweep(
    evictions=("lru", "lfu", "lfru", "oracle_belady", "oracle_belady_8"),
    pools=("global", "per_layer"),
    machine=MACHINE,
)
AHEAD = (
    Sweep(evictions=("belady",), predictors=("oracle",), machine=MACHINE),
    Sweep(evictions=("lru",), schedules=("jsd",), predictors=("oracle_next",), machine=MACHINE),
    Sweep(
        evictions=("belady",),
        schedules=("jsd",),
        predictors=("frequency", "persistence", "oracle_next", "oracle"),
        machine=MACHINE,
    ),
    Sweep(evictions=("belady",), schedules=("moe_infinity",), predictors=("oracle",), machine=MACHINE),
)
TRAINED = Sweep(
    evictions=("belady",), schedules=("none", "jsd", "moe_infinity"), predictors=("mamba2",), machine=MACHINE
)
PAPER = {
    ("lru", 15): "60.0",
    ("lru", 25): "74.2",
    ("lru", 35): "84.5",
    ("lru", 45): "88.5",
}
"""SeqMoE §9.3, the mean of four big models."""


def main(heldout: Path, sampled: Path, predictor: Path | None = None) -> None:
    """Replay, write the result file and draw both pictures."""
    rows: list[Row] = []
    trace, info = read_bundled(heldout)
    results = run_sweep(trace, CACHES)
    rows += [row_of(result, info, area="sim.heldout") for result in results]
    trace, info = read_bundled(sampled)
    caches = run_sweep(trace, CACHES)
    ahead = look_ahead(trace, info, predictor)
    rows += [row_of(result, info, area="sim") for result in caches + ahead]
    ResultFile.write("simulated_bundled", rows)
    draw_hit_rates(caches, info, RESULTS / "simulated_bundled.png")
    bounds = [result for result in caches if result.scenario.eviction in ("lru", "oracle_belady")]
    shown = [result for result in bounds if result.scenario.pool == "global"]
    draw_hit_rates(shown + ahead, info, RESULTS / "simulated_bundled_ahead.png")


def read_bundled(path: Path) -> tuple[Trace, TraceInfo]:
    """A trace, with a name for its model that a reader of the results understands."""
    trace, info = read_trace(path)
    return trace, replace(info, model="bundled model")


def look_ahead(trace: Trace, info: TraceInfo, predictor: Path | None) -> list[SimulationResult]:
    """Policies that act on forecasts."""
    trained: dict[str, Predictor] = {}
    sweeps = list(AHEAD)
    if predictor is not None:
        stored = read_predictor(predictor, RouterFingerprint.of_trace(trace, info))
        trained["mamba2"] = Foreseen(Mamba2Predictor(stored.models), trace)
        sweeps.append(TRAINED)
    return [result for sweep in sweeps for result in run_sweep(trace, sweep, trained=trained)]


def row_of(result: SimulationResult, info: TraceInfo, *, area: str) -> Row:
    """`sim.lru_hit_25`, with what says whether it means something."""
    scenario, counts = result.scenario, result.counts
    percent = round(100 * scenario.residency)
    policy = policy_name(scenario).replace(" + ", "_").replace(" (", "_").replace(")", "")
    pool = "" if scenario.pool == "global" else ".per_layer"
    note = (
        f"{scenario.pool} pool; static cache {100 * result.static_hit_rate:.1f} %; "
        f"{trace_line([result], info)}"
    )
    if counts.prefetches:
        note += (
            f"; late {100 * counts.late / counts.required:.1f} %, precision {100 * result.precision:.1f} %, "
            f"full load {100 * result.full_load_share:.0f} %; {machine_line([result])}"
        )
    paper = PAPER.get((policy, percent))
    return Row(
        id=f"{area}{pool}.{policy}_hit_{percent}",
        value=100 * result.hit_rate,
        unit="%",
        reference=None if paper is None else f"{paper} (SeqMoE §9.3, four big models)",
        note=note,
    )


if __name__ == "__main__":
    main(*(Path(word) for word in sys.argv[1:]))
