"""The accuracy bench and its ablation: what is asked, and what their rows say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from bench import vl_ablation, vl_accuracy
from bench.harness import ResultFile
from bench.vl.comparison import Outcome
from bench.vl.geometry import Geometry, build_model
from bench.vl.held_out import ask_each, pairs
from bench.vl.saving import as_shipped, save_model
from bench.vl_working_set import CASES, KEEP_RATIOS
from hetero_scheduler.compression import METHODS


def test_the_same_questions_every_time_one_a_picture() -> None:
    asked = ask_each("digits", 4)
    assert [each.question for each in asked] == [each.question for each in ask_each("digits", 4)]
    assert {each.question.kind for each in asked} == {"digits"}
    assert len({each.image.tobytes() for each in asked}) == 4


def test_pairs_take_kinds_in_turn() -> None:
    given = pairs(7)
    assert len(given) == 7
    assert len({image.tobytes() for image, _ in given}) == 7
    starts = [given[place][1].split()[0] for place in (0, 1, 2, 4, 5, 6)]
    assert starts == ["Is", "How", "What", "What", "Is", "How"]


def outcome(right: dict[str, int], *, experts: float = 32.0) -> Outcome:
    """Of four questions a kind."""
    return Outcome(right, dict.fromkeys(right, 4), experts)


def test_the_verdict_is_on_means_over_kinds() -> None:
    outcomes = {case: outcome({"count": 2 + 2 * (case.method != "affinity"), "colour": 4}) for case in CASES}
    rows = {row.id: row for row in vl_accuracy.rows_of(outcomes, about="made up")}
    assert rows["vl.accuracy_100_none"].value == 1
    assert rows["vl.accuracy_70_affinity_count"].value == 0.5
    assert [rows[f"vl.accuracy_lost_{round(100 * keep)}"].value for keep in KEEP_RATIOS] == [0.25, 0.25]
    assert rows["vl.accuracy_lost_50"].is_met is False


def test_knobs_are_told_against_saliency_alone() -> None:
    affinity, saliency = outcome({"count": 3}, experts=24.0), outcome({"count": 4})
    rows = vl_ablation.rows_of(vl_ablation.Setting("alpha_0.1"), affinity, saliency, about="made up")
    assert [row.id for row in rows][-1] == "vl.working_set_ratio_50_alpha_0_1"
    assert [row.value for row in rows] == [0.75, 0.25, 24, 0.75]


@pytest.fixture
def untrained(tokenizer: Tokenizer, geometry: Geometry, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = build_model(geometry, tokenizer, torch.device("cpu"))
    save_model(as_shipped(model, tokenizer), tokenizer, tmp_path / "model")
    return tmp_path / "model"


def test_the_bench_on_an_untrained_model(untrained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["vl_accuracy", str(untrained), "--num", "2", "--prefix", "1", "--out", str(untrained.parent)]
    monkeypatch.setattr(sys, "argv", words)
    vl_accuracy.main()
    rows = {row.id: row for row in ResultFile.read(untrained.parent / "vl_accuracy.json").rows}
    assert {f"vl.accuracy_50_{method}" for method in METHODS} <= set(rows)
    assert all(0 <= row.value <= 1 for row in rows.values() if "lost" not in row.id)


def test_the_ablation_on_an_untrained_model(untrained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "argv", ["vl_ablation", str(untrained), "--num", "1", "--out", str(untrained.parent)]
    )
    monkeypatch.setattr(vl_ablation, "_DEPTHS", (1, 2))
    monkeypatch.setattr(vl_ablation, "_DEPTH", 2)
    vl_ablation.main()
    rows = {row.id: row for row in ResultFile.read(untrained.parent / "vl_ablation.json").rows}
    assert len(rows) == 4 * (1 + len(vl_ablation.settings_at(2)))
    assert rows["vl.working_set_ratio_50_prefix_1"].value > 0
