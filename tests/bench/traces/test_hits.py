"""Kept traces and stored predictors in, hit rates of all policies and a picture out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bench.harness import ResultFile
from bench.traces.compact import compress, write_compact
from bench.traces.hits import (
    CAPTURED,
    ORACLE,
    OURS,
    PAPER,
    RIVALS,
    TraceHits,
    knowing_next,
    main,
    prefill_hot,
    rows_of,
)
from hetero_runtime.prediction import RouterFingerprint, write_predictor
from hetero_scheduler.predict import RouterShape
from hetero_scheduler.predict.persistence import Persistence
from hetero_scheduler.predict.routing import shares
from hetero_scheduler.simulator.foreseen import Foreseen
from tests.bench.traces.test_compact import INFO, make_trace
from tests.runtime.foresight.predictors import random_models, random_refinement
from tests.scheduler.simulator.traces import trace_of

EXPERTS, TOP_K = 24, 2


def test_command_replays_all_policies(tmp_path: Path) -> None:
    trace = make_trace(documents=6, experts=EXPERTS, top_k=TOP_K)
    trace, info = replace(trace, early=trace.logits), replace(INFO, cut=3)
    folder = tmp_path / "48x128-natural"
    folder.mkdir()
    write_compact(folder / "sampled.trace.xz", compress(trace, info, keeps_early=True))
    write_predictor(
        folder / "predictor.safetensors",
        random_models(trace.num_layers, EXPERTS, TOP_K),
        fingerprint=RouterFingerprint.of_trace(trace, info),
        notes={},
        refinement=random_refinement(trace.num_layers, EXPERTS),
    )
    words = ["--traces", "48x128-natural", "--documents", "5", "--results", str(tmp_path)]
    main(["--kept", str(tmp_path), *words])
    rows = {row.id: row for row in ResultFile.read(tmp_path / "trace_hits.json").rows}
    ids = [f"hit_{percent}{link}" for link in ("", "_captured") for percent in PAPER]
    ids += ["gap_closed_25", "gap_closed_45", "above_all"]
    assert list(rows) == [f"predict.natural_{name}" for name in ids]
    assert "5 documents" in rows["predict.natural_hit_25"].note
    assert "PrefillHot" in str(rows["predict.natural_hit_25"].reference)
    assert rows["predict.natural_gap_closed_45"].target == ">=0.6"
    with Image.open(tmp_path / "trace_hits.png") as picture:
        assert picture.width > picture.height


def hits_of(**others: float) -> TraceHits:
    everyone = dict.fromkeys(RIVALS, 50.0) | {OURS: 80.0, CAPTURED: 78.0, ORACLE: 90.0, **others}
    by_residency = {policy: dict.fromkeys(PAPER, hit) for policy, hit in everyone.items()}
    return TraceHits(
        "48x128-matched", "about", by_residency, dict.fromkeys((OURS, CAPTURED), dict.fromkeys(PAPER, ""))
    )


def test_rows_hold_ours_against_the_paper_and_everybody() -> None:
    rows = {row.id: row for row in rows_of(hits_of())}
    assert rows["predict.hit_15"].target == ">=84.6" and not rows["predict.hit_15"].is_met
    assert rows["predict.gap_closed_25"].value == pytest.approx(0.75)
    assert rows["predict.above_all"].value == 1
    (row,) = (row for row in rows_of(hits_of(LFRU=80.0)) if row.id == "predict.above_all")
    assert row.value == pytest.approx(20 / 24)
    assert row.note.startswith("not above LFRU at 15 %, LFRU at 25 %")


def test_the_oracle_knows_the_next_step_of_each_document_and_leaves_the_rest() -> None:
    trace = make_trace(documents=3, experts=EXPERTS, top_k=TOP_K)
    foreseen = Foreseen(Persistence(RouterShape(trace.num_layers, EXPERTS, TOP_K), horizon=2), trace)
    oracle = knowing_next(foreseen, trace)
    truth = shares(trace.logits, trace.topk)
    last = trace.bounds[1:] - 1
    inner = np.setdiff1d(np.arange(trace.num_tokens), last)
    np.testing.assert_array_equal(oracle.steps[inner, 0], truth[inner + 1])
    assert not oracle.steps[last, 0].any()
    np.testing.assert_array_equal(oracle.steps[:, 1], foreseen.steps[:, 1])
    assert foreseen.steps[last, 0].any() and not oracle.asks_early


def test_prefill_hot_keeps_what_each_prompt_used_most() -> None:
    routed = [[[0]], [[0]], [[1]], [[0]], [[2]], [[2]], [[0]], [[2]]]
    trace = trace_of(routed, num_experts=3, num_documents=2)
    assert prefill_hot(trace, num_slots=1, prompt=2, first=0) == 0.5  # 0 stays, then 2
    assert prefill_hot(trace, num_slots=1, prompt=2, first=3) == pytest.approx(2 / 3)
