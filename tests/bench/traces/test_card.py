"""The card says of routing that was steered that it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.harness import ResultFile, Row
from bench.traces.card import main
from tests.bench.traces.test_facts import SUMMARY

LOOK = {
    "balance": 0.1,
    "consistency": 0.03,
    "novelty": 0.001,
    "foresight": 0.02,
    "loss": 3.0,
    "entropy": 0.97,
}


@pytest.mark.parametrize(
    ("wants", "title", "word"),
    [
        ({"lru": None, "foreseen": None}, "natural", "as it comes"),
        ({"lru": [74, 88], "foreseen": 0.9, "ahead": 1}, "matched", "made so"),
    ],
)
def test_card(tmp_path: Path, wants: dict[str, Any], title: str, word: str) -> None:
    summary = {
        **SUMMARY,
        "shape": "48x128",
        "wants": wants,
        "progress": {"tokens": 5e7, "steps": 900, "seconds": 150.0},
        "looks": [LOOK],
        "parameters": 42_000_000,
        "machine": {"gpu": None, "cpu": "a CPU"},
        "commit": "abc",
        "command": "python -m bench.traces.train",
    }
    (tmp_path / "train.json").write_text(json.dumps(summary))
    rows = [Row(id="predict.recall_k3", value=0.91, unit="share", target=">=0.9", reference="static 0.3")]
    path = ResultFile.write("predictors", rows, folder=tmp_path)
    main([str(path), "--train", str(tmp_path / "train.json"), "--out", str(tmp_path / "card.md")])
    card = (tmp_path / "card.md").read_text()
    assert card.startswith(f"# Narrow MoE, 48x128, {title}\n")
    assert word in card
    assert "| `predict.recall_k3` | 0.91 | share | >=0.9 | static 0.3 |" in card
