"""The accuracy bench: what it asks, that a right answer is told from a wrong one, and its rows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tokenizers import Tokenizer

from bench import vl_accuracy
from bench.harness import ResultFile
from bench.vl.held_out import MEASURED, Asked, ask_each, pairs
from bench.vl.model import Geometry, build_model
from bench.vl.questions import Question
from bench.vl.saving import as_shipped, save_model
from bench.vl_accuracy import Answers, rows_of
from bench.vl_working_set import CASES, KEEP_RATIOS


def test_the_same_questions_every_time_one_a_picture() -> None:
    asked = ask_each("digits", 4)
    assert [each.question for each in asked] == [each.question for each in ask_each("digits", 4)]
    assert {each.question.kind for each in asked} == {"digits"}
    assert len({each.image.tobytes() for each in asked}) == 4


def test_pairs_take_kinds_in_turn() -> None:
    given = pairs(7)
    assert len(given) == 7
    assert given[0][1] == ask_each(MEASURED[0], 1)[0].question.text
    assert given[5][1] == ask_each(MEASURED[0], 2)[1].question.text


class _Said(NamedTuple):
    text: str


class _Says:
    """Stands for an engine."""

    def __init__(self, text: str) -> None:
        self._text = text

    def generate(self, _prompt: object, **_options: object) -> _Said:
        return _Said(self._text)


@pytest.mark.parametrize(
    ("said", "is_right"), [("red", True), (" red", True), ("dark red", False), ("", False)]
)
def test_the_one_right_answer(said: str, is_right: bool) -> None:
    asked = Asked(ask_each("colour", 1)[0].image, Question("colour", "What colour?", "red"))
    assert vl_accuracy._is_right(_Says(said), asked) is is_right  # type: ignore[arg-type]


def test_the_verdict_is_on_means_over_kinds() -> None:
    answers = [
        Answers(case, {"count": [True, case.method != "affinity"], "colour": [True] * 4}) for case in CASES
    ]
    rows = {row.id: row for row in rows_of(answers, about="made up")}
    assert rows["vl.accuracy_100_none"].value == 1
    assert rows["vl.accuracy_70_affinity_count"].value == 0.5
    assert [rows[f"vl.accuracy_lost_{round(100 * keep)}"].value for keep in KEEP_RATIOS] == [0.25, 0.25]
    assert rows["vl.accuracy_lost_50"].is_met is False


def test_the_bench_on_an_untrained_model(
    tokenizer: Tokenizer, geometry: Geometry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = build_model(geometry, tokenizer, torch.device("cpu"))
    save_model(as_shipped(model, tokenizer), tokenizer, tmp_path / "model")
    words = ["vl_accuracy", str(tmp_path / "model"), "--num", "1", "--prefix", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    cases = [case for case in CASES if case.method in ("none", "affinity", "saliency")]
    monkeypatch.setattr(vl_accuracy, "CASES", cases)
    vl_accuracy.main()
    rows = {row.id: row for row in ResultFile.read(tmp_path / "vl_accuracy.json").rows}
    assert len(rows) == len(cases) * (1 + len(MEASURED)) + len(KEEP_RATIOS)
    assert all(0 <= row.value <= 1 for row in rows.values() if "lost" not in row.id)
