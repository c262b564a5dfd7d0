"""What each horizon of a forecast adds on the bundled model: recall, hits, and what is moved for nothing.

`python -m bench.horizons_bundled TRACE [PREDICTOR]`: a trace of held-out text that `hetero-runtime trace
--early` recorded, and a predictor that has learned all horizons (the bundled one). The caches are the
simulator's, by the engine's own policies, on the machine of `simulated_bundled`.

No `DEVICE`: it needs a trace, so `python -m bench` does not run it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from bench.harness import ResultFile, Row
from bench.simulated_bundled import MACHINE, read_bundled
from hetero_runtime.beside_model import beside
from hetero_runtime.bundled import model_path
from hetero_runtime.prediction import RouterFingerprint, StoredPredictor, read_predictor
from hetero_runtime.prediction.horizons import predictors_of
from hetero_runtime.prediction.locate import PREDICTOR_SUFFIX
from hetero_runtime.simulation import Sweep, run_sweep
from hetero_runtime.simulation.report import machine_line, trace_line
from hetero_runtime.trace import TraceInfo
from hetero_scheduler.predict.recall import recall_at
from hetero_scheduler.predict.refinement_training import one_step_shares
from hetero_scheduler.simulator import SimulationResult
from hetero_scheduler.simulator.foreseen import Foreseen
from hetero_scheduler.trace import Trace

HORIZONS = ("step", "token", "layer")
RESIDENCIES = (0.25, 0.45)
PREFIX = "predict.bundled_"


def recall_rows(stored: StoredPredictor, trace: Trace, *, prefix: str = PREFIX) -> list[Row]:
    """Recall of the next step at k + 3, what is prefetched, as more is known of it."""
    assert stored.refinement is not None, "the predictor has learned all horizons"
    assert trace.early is not None, "the trace was recorded with --early"
    is_first = np.isin(np.arange(trace.num_tokens), trace.bounds[:-1])
    steps = np.flatnonzero(~is_first)
    shares = one_step_shares(stored.models, trace)[steps].astype(np.float32)
    known = stored.refinement.with_tokens(shares, trace.tokens[steps])
    early = trace.early[steps].astype(np.float32)
    near = stored.refinement.with_next_router(known, early, slice(0, trace.num_layers))
    return [
        Row(
            id=f"{prefix}horizon_{name}_recall_k3",
            value=recall_at(said, trace.topk[steps], trace.top_k + 3),
            unit="share",
            note=f"{len(steps):,} steps of {len(trace.bounds) - 1} documents, all layers",
        )
        for name, said in zip(HORIZONS, (shares, known, near), strict=True)
    ]


def hit_rows(stored: StoredPredictor, trace: Trace, info: TraceInfo, *, prefix: str = PREFIX) -> list[Row]:
    """Hits and waste of JSD prefetch with probabilistic Belady, horizon by horizon; LRU beside them."""
    trained = {name: Foreseen(predictors_of(stored, 1, nearest=name)[0], trace) for name in HORIZONS}
    sweep = Sweep(
        residencies=RESIDENCIES,
        evictions=("belady",),
        schedules=("jsd",),
        predictors=HORIZONS,
        machine=MACHINE,
    )
    lru = {
        result.scenario.residency: result
        for result in run_sweep(trace, Sweep(residencies=RESIDENCIES, evictions=("lru",), machine=MACHINE))
    }
    results = run_sweep(trace, sweep, trained=trained)
    return [_row(result, lru[result.scenario.residency], info, prefix=prefix) for result in results]


def _row(result: SimulationResult, lru: SimulationResult, info: TraceInfo, *, prefix: str) -> Row:
    counts, percent = result.counts, round(100 * result.scenario.residency)
    late, full = 100 * counts.late / counts.required, 100 * result.full_load_share
    moved = (counts.prefetches + counts.misses) / result.tokens
    wasted, by_lru = counts.prefetches_wasted / result.tokens, lru.counts.misses / lru.tokens
    return Row(
        id=f"{prefix}horizon_{result.scenario.predictor}_hit_{percent}",
        value=100 * result.hit_rate,
        unit="%",
        reference=f"LRU {100 * lru.hit_rate:.1f}",
        note=(
            f"late {late:.1f} %, full load {full:.0f} % (LRU {100 * lru.full_load_share:.0f}); {moved:.1f} "
            f"experts moved a token, {wasted:.1f} of them for nothing (LRU {by_lru:.1f}, all needed); "
            f"{trace_line([result], info)}; {machine_line([result])}"
        ),
    )


def main(heldout: Path, predictor: Path | None = None) -> None:
    """Measure, print, write `horizons_bundled.json`."""
    trace, info = read_bundled(heldout)
    stored = read_predictor(
        predictor or beside(model_path(), PREDICTOR_SUFFIX), RouterFingerprint.of_trace(trace, info)
    )
    ResultFile.write("horizons_bundled", recall_rows(stored, trace) + hit_rows(stored, trace, info))


if __name__ == "__main__":
    main(*(Path(word) for word in sys.argv[1:]))
