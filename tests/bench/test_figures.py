"""Figures travel from a child process whatever else it prints; a child that fails says why."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import decode_case
from bench.figures import ChildError, Figures, measure_in_child
from hetero_runtime import graph
from hetero_runtime.minds import Minds
from hetero_runtime.mode import choose_mode

FIGURES = Figures(
    engine="made up",
    residency=0.45,
    tok_s=100.0,
    all_tok_s=(90.0, 100.0, 110.0),
    ttfts_ms={128: 50.0, 1024: 80.0},
    hit_rate=0.8,
    slots=7,
    peak_vram_gib=1.5,
    load_s=2.0,
)


def test_figures_read_back(capsys: pytest.CaptureFixture[str]) -> None:
    print("{noise}\nloading")
    FIGURES.print()
    replace(FIGURES, hit_rate=None, start_s=3.0).print()
    print("bye")
    assert Figures.read(capsys.readouterr().out) == replace(FIGURES, hit_rate=None, start_s=3.0)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("print('no numbers')", "printed no figures; its last words: 'no numbers"),
        ("print('got this far', flush=True); raise SystemExit(3)", "exit status 3.*got this far"),
        ("import time; time.sleep(60)", "longer than 1 s"),
    ],
)
def test_child_that_gives_nothing_says_why(source: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "made_up_child.py").write_text(source)
    environment = dict(os.environ) | {"PYTHONPATH": str(tmp_path)}
    with pytest.raises(ChildError, match=message):
        measure_in_child(["made_up_child"], environment=environment, limit_s=1)


def test_our_engine_as_a_child(checkpoint: Path, routing: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(checkpoint), "--residency", "0.45", "--routing", str(routing), "--device", "cpu"]
    decode_case.main([*words, "--tokens", "4", "--runs", "1", "--prompts", "5", "9"])
    figures = Figures.read(capsys.readouterr().out)
    assert figures.engine == "hetero_runtime"
    assert figures.tok_s > 0
    assert set(figures.ttfts_ms) == {5, 9}
    assert figures.hit_rate is not None
    assert 0 < figures.hit_rate < 1
    assert figures.slots == 14


def test_start_is_what_assembling_an_engine_spends_on_capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = SimpleNamespace()

    def capture(*_: object, **__: object) -> SimpleNamespace:
        time.sleep(0.02)
        return captured

    monkeypatch.setattr(graph, "capture", capture)
    config: Any = SimpleNamespace(
        execution=SimpleNamespace(mode="graph", max_rows=1, max_length=8),
        prediction=SimpleNamespace(predictor="none"),
        prefetch=SimpleNamespace(schedule="none"),
        speculation=SimpleNamespace(drafter="none"),
    )
    parts: Any = SimpleNamespace(experts=[], orchestrator=SimpleNamespace(run_layer=None))
    with decode_case._captures_timed() as seconds:
        chosen: object = choose_mode(config, parts, Minds([], None, None, None), foresight=None)
        assert chosen is captured
    assert 0.02 <= sum(seconds) < 5
    assert graph.capture is capture


def test_our_engine_as_a_child_all_resident_without_a_recording(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(checkpoint), "--residency", "1", "--device", "cpu", "--tokens", "4", "--runs", "1"]
    decode_case.main(words)
    figures = Figures.read(capsys.readouterr().out)
    assert (figures.ttfts_ms, figures.hit_rate, figures.slots) == ({}, None, 32)
