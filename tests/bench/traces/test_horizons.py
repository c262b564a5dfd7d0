"""A kept trace and a stored predictor in, rows of all horizons out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bench.harness import ResultFile
from bench.traces.compact import compress, write_compact
from bench.traces.horizons import main
from hetero_runtime.prediction import RouterFingerprint, write_predictor
from hetero_runtime.trace import RoutingFacts
from tests.bench.traces.test_compact import INFO, make_trace
from tests.runtime.foresight.predictors import random_models, random_refinement

EXPERTS, TOP_K = 12, 2


def test_command_replays_all_horizons(tmp_path: Path) -> None:
    trace = make_trace(documents=6, experts=EXPERTS, top_k=TOP_K)
    trace = replace(trace, early=trace.logits)
    assert RoutingFacts.of(trace).load_entropy > 0.9
    write_compact(tmp_path / "sampled.trace.xz", compress(trace, INFO, keeps_early=True))
    write_predictor(
        tmp_path / "p.safetensors",
        random_models(trace.num_layers, EXPERTS, TOP_K),
        fingerprint=RouterFingerprint.of_trace(trace, INFO),
        notes={},
        refinement=random_refinement(trace.num_layers, EXPERTS),
    )
    words = ["--flavour", "natural", "--shape", "48x128", "--documents", "4", "--results", str(tmp_path)]
    main([str(tmp_path / "sampled.trace.xz"), str(tmp_path / "p.safetensors"), *words])
    rows = {row.id: row for row in ResultFile.read(tmp_path / "horizons_48x128_natural.json").rows}
    step, layer = (rows[f"predict.natural_replayed_horizon_{name}_recall_k3"] for name in ("step", "layer"))
    assert layer.value > step.value
    assert "36 steps of 4 documents" in step.note
    assert sum("_hit_" in name for name in rows) == 6
