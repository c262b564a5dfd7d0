"""Facts of a trace against what the simulator says, and words on the training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.harness import ResultFile
from bench.traces.compact import compress, write_compact
from bench.traces.facts import fact_rows, main, row_prefix, training_note
from bench.traces.look import LOOKED_AT, Look, lru_hits
from hetero_scheduler.simulator import Scenario, simulate
from tests.bench.traces.test_compact import INFO, make_trace

SUMMARY: dict[str, Any] = {
    "looks": [{"balance": 0.1, "consistency": 0.03, "novelty": 0.001, "foresight": 0.02}],
    "kinds": ["math", "story"],
    "wants": {"entropy": 0.965, "lru": [72, 87], "foreseen": None},
    "progress": {"tokens": 5e7},
}


def test_rows_are_those_of_the_simulator() -> None:
    trace = make_trace()
    rows = {row.id: row for row in fact_rows(trace, INFO, prefix="predict.matched_", is_matched=True)}
    expected = simulate(trace, Scenario(residency=0.25))
    assert rows["predict.matched_lru_25"].value == pytest.approx(100 * expected.hit_rate)
    assert rows["predict.matched_static_25"].value == pytest.approx(100 * expected.static_hit_rate)
    off = rows["predict.matched_lru_25_off"]
    assert off.value == pytest.approx(abs(100 * expected.hit_rate - 74))
    assert off.is_met is (off.value <= 3)
    assert rows["predict.matched_entropy"].target == ">=0.95"
    assert rows["predict.matched_belady_15"].value >= rows["predict.matched_lru_15"].value
    assert "predict.matched_lru_15_off" not in rows
    assert len(rows) == 2 + 4 * (5 + 1) + 2


def test_a_natural_trace_has_nothing_to_match() -> None:
    rows = fact_rows(make_trace(), INFO, prefix="predict.natural_", is_matched=False)
    assert not [row.id for row in rows if row.id.endswith("_off")]


def test_prefixes_tell_flavour_and_shape() -> None:
    assert row_prefix("matched", "48x128") == "predict.matched_"
    assert row_prefix("natural", "24x32") == "predict.natural_24x32_"


def test_training_is_told_in_words() -> None:
    note = training_note(SUMMARY)
    assert note == (
        "trained on 50 M tokens (math, story), router terms: balance 0.1, temporal consistency 0.03, "
        "novelty 0.001 steered to LRU hits 72/87 %"
    )
    foreseen = {**SUMMARY, "wants": {"lru": None, "foreseen": 0.9, "ahead": 8}}
    assert training_note(foreseen).endswith(
        "foresight 0.02 steered to 90 % of experts foreseen 8 ahead by a companion"
    )


def test_command_writes_one_file_a_model(tmp_path: Path) -> None:
    for name in ("sampled", "heldout"):
        write_compact(tmp_path / f"{name}.trace.xz", compress(make_trace(), INFO))
    (tmp_path / "train.json").write_text(json.dumps(SUMMARY))
    paths = [str(tmp_path / f"{name}.trace.xz") for name in ("sampled", "heldout")]
    words = [
        "--flavour=matched",
        "--shape=24x32",
        f"--train={tmp_path / 'train.json'}",
        f"--results={tmp_path}",
    ]
    main([*paths, *words])
    result = ResultFile.read(tmp_path / "traces_24x32_matched.json")
    ids = {row.id for row in result.rows}
    assert {"predict.matched_24x32_lru_25", "predict.matched_24x32_heldout_lru_25"} <= ids


def test_a_looks_replay_is_the_simulators() -> None:
    trace = make_trace()
    for residency in LOOKED_AT:
        expected = 100 * simulate(trace, Scenario(residency=residency)).hit_rate
        assert lru_hits(trace.topk, trace.num_experts, residency) == pytest.approx(expected)
    text = str(Look(3.0, 0.97, 0.3, (74.0, 88.0), 0.9))
    assert text == "held out 3.000  entropy 0.970  LRU 74.0/88.0 %  again 30 %  foreseen 90.0 %"
