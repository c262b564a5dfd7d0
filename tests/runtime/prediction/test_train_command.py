"""`train-predictor` from trace file to predictor file."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from hetero_runtime.cli.train_predictor import train_predictor_command
from hetero_runtime.prediction import RouterFingerprint, read_predictor
from hetero_runtime.prediction.description import read_description
from hetero_runtime.trace.file import TraceInfo, write_trace
from hetero_scheduler.predict.mamba2 import Mamba2Predictor
from hetero_scheduler.trace import Trace

LAYERS, EXPERTS, TOP_K, LENGTH = 3, 8, 2, 24


def make_info() -> TraceInfo:
    plain: dict[Any, Any] = {str: "model", float: 0.0, int: 0}
    types = get_type_hints(TraceInfo)
    values = {field.name: plain.get(types[field.name]) for field in fields(TraceInfo)}
    return TraceInfo(**values | {"config_sha256": "ab" * 32, "decoding": "teacher-forced"})


def make_trace(documents: int, length: int = LENGTH) -> Trace:
    """Experts walk around in a circle."""
    turn = (np.arange(length) + np.arange(documents)[:, None]).reshape(-1, 1, 1)
    logits = 2.0 * np.cos(
        2 * np.pi * (np.arange(EXPERTS) - turn - np.arange(LAYERS)[:, None]) / EXPERTS + 0.1
    )
    topk = np.argsort(-logits, axis=-1)[..., :TOP_K]
    tokens, bounds = np.zeros(documents * length, np.int32), np.arange(documents + 1) * length
    return Trace(logits.astype(np.float16), topk, tokens, bounds)


def run(*words: str) -> Result:
    app = typer.Typer()
    app.command()(train_predictor_command)
    return CliRunner().invoke(app, list(words))


@pytest.fixture
def trace_path(tmp_path: Path) -> Path:
    path = tmp_path / "trace.safetensors"
    write_trace(path, make_trace(30), make_info())
    return path


def test_the_file_predicts_and_the_report_says_how_well(trace_path: Path, tmp_path: Path) -> None:
    out = tmp_path / "predictor.safetensors"
    result = run(str(trace_path), "--out", str(out), "--epochs", "25", "--width", "32", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.strip().splitlines()[-1])
    recalls = {(row["predictor"], row["distance"]): row["at_k"] for row in report["recalls"]}
    assert recalls["mamba2", 1] > 0.9
    assert recalls["first-order", 1] < recalls["mamba2", 1] + 0.11
    assert recalls["static", 8] < 0.5
    assert report["num_documents"] == {"train": 24, "validation": 3, "test": 3}
    assert report["file_bytes"] == out.stat().st_size
    stored = read_predictor(out, RouterFingerprint(LAYERS, EXPERTS, TOP_K, "ab" * 32))
    assert stored.notes["trace"]["decoding"] == "teacher-forced"
    predictor = Mamba2Predictor(stored.models)
    assert [len(group) for group in predictor.groups] == [2, 1]


@pytest.mark.parametrize(
    ("words", "horizons"),
    [(("--token-rank", "0"), ("step",)), (("--token-rank", "4"), ("step", "token", "layer"))],
)
def test_nearer_horizons_are_learned_where_asked_for(
    tmp_path: Path, words: tuple[str, ...], horizons: tuple[str, ...]
) -> None:
    path, out = tmp_path / "trace.safetensors", tmp_path / "predictor.safetensors"
    trace = make_trace(30)
    write_trace(path, replace(trace, early=trace.logits), make_info())
    result = run(str(path), "--out", str(out), "--epochs", "1", "--width", "32", "--json", *words)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.strip().splitlines()[-1])
    recalls = {row["predictor"]: row["at_k"] for row in report["recalls"] if row["distance"] == 1}
    assert read_description(out).horizons == horizons
    if horizons == ("step",):
        assert not any("known" in name for name in recalls)
    else:
        assert recalls["mamba2, next router asked"] > max(0.97, recalls["mamba2"])
        assert "mamba2, token known" in recalls


def test_a_predictor_is_refined_as_it_is(trace_path: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    words = ("--epochs", "1", "--width", "32")
    assert run(str(trace_path), "--out", str(first), *words, "--token-rank", "0").exit_code == 0
    result = run(str(trace_path), "--out", str(second), *words, "--refine", str(first), "--token-rank", "4")
    assert result.exit_code == 0, result.output
    before, after = read_predictor(first), read_predictor(second)
    for old, new in zip(before.models, after.models, strict=True):
        for name, tensor in old.state_dict().items():
            assert torch.equal(new.state_dict()[name], tensor), name
    assert before.refinement is None
    assert after.refinement is not None
    nothing = run(str(trace_path), "--out", str(second), "--refine", str(first), "--token-rank", "0")
    assert nothing.exit_code == 2
    assert "learns nothing" in nothing.output


def test_the_table_is_for_people(trace_path: Path, tmp_path: Path) -> None:
    words = ("--epochs", "1", "--width", "32")
    result = run(str(trace_path), "--out", str(tmp_path / "p.safetensors"), *words)
    assert result.exit_code == 0, result.output
    for word in ("load entropy", "persistence", "first-order", "at k + 3", "24 train"):
        assert word in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--out", "missing/p.safetensors"), "folder does not exist"),
        (("--out", "p.safetensors", "--device", "tpu"), "give cpu or cuda"),
        (("--out", "p.safetensors", "--width", "40"), "--width 40"),
        (("--out", "p.safetensors", "--groups", "4"), "3 layers do not divide into 4 groups"),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else None,
)
def test_what_cannot_work_is_refused_before_training(
    trace_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(str(trace_path), *words)
    assert result.exit_code == 2
    assert message in result.output
    assert not Path("p.safetensors").exists()


@pytest.mark.parametrize(
    ("documents", "length", "message"),
    [(2, LENGTH, "record more documents"), (6, 5, "no document is longer than 8")],
)
def test_a_trace_with_too_little_in_it_is_refused(
    tmp_path: Path, documents: int, length: int, message: str
) -> None:
    path = tmp_path / "short.safetensors"
    write_trace(path, make_trace(documents, length), make_info())
    result = run(str(path), "--out", str(tmp_path / "p.safetensors"))
    assert result.exit_code == 2
    assert message in result.output


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text.safetensors"
    path.write_text("no trace")
    assert run(str(path), "--out", str(tmp_path / "p.safetensors")).exit_code == 2
