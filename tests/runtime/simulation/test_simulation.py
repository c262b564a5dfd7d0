"""Sweeps, their table, their JSON, their picture, and the command."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner, Result

from hetero_runtime.cli.simulate import simulate_command
from hetero_runtime.errors import ConfigError, DeviceError
from hetero_runtime.prediction import RouterFingerprint, write_predictor
from hetero_runtime.simulation import Sweep, draw_hit_rates, render_results, run_sweep, to_json
from hetero_runtime.trace import write_trace
from hetero_scheduler.predict import RouterShape, make_predictor
from hetero_scheduler.predict.mamba2_block import Mamba2Sizes
from hetero_scheduler.predict.mamba2_model import GroupModel, GroupShape
from hetero_scheduler.simulator import Scenario
from hetero_scheduler.simulator.foreseen import Foreseen
from tests.runtime.trace.info import INFO
from tests.scheduler.simulator.traces import structured_trace

TRACE = structured_trace(150, 4, 16, 2)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "trace.safetensors"
    write_trace(path, TRACE, INFO)
    return path


def run(*words: object) -> Result:
    app = typer.Typer()
    app.command()(simulate_command)
    return CliRunner().invoke(app, [*map(str, words)])


def sweep(**options: Any) -> list[Scenario]:
    return Sweep(residencies=(0.25,), **options).scenarios()


def test_a_predictor_that_nobody_listens_to_makes_no_scenario() -> None:
    found = sweep(evictions=("lru", "belady"), schedules=("none", "jsd"), predictors=("none", "oracle"))
    assert [(s.eviction, s.schedule, s.predictor) for s in found] == [
        ("lru", "none", "none"),
        ("lru", "jsd", "oracle"),
        ("belady", "none", "oracle"),
        ("belady", "jsd", "oracle"),
    ]


def test_a_sweep_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="act on forecasts; choose a predictor"):
        sweep(evictions=("belady",))


def test_table_json_and_picture(tmp_path: Path) -> None:
    ticks: list[tuple[int, int]] = []
    results = run_sweep(
        TRACE,
        Sweep(
            evictions=("lru",),
            schedules=("none", "jsd"),
            predictors=("oracle",),
            pools=("global", "per_layer"),
        ),
        progress=lambda done, total: ticks.append((done, total)),
    )
    assert ticks == [(done, 16) for done in range(17)]
    console = Console(width=160, record=True, file=StringIO())
    console.print(render_results(results, INFO))
    text = console.export_text()
    for part in ("lru + jsd (oracle)", "per_layer", "static", "load entropy", "sampled at 0.8", "useful"):
        assert part in text
    rows = to_json(results, INFO)["rows"]
    assert len(json.loads(json.dumps(rows))) == 16
    assert rows[0]["hit_rate"] == results[0].hit_rate
    picture = tmp_path / "hits.png"
    draw_hit_rates(results, INFO, picture)
    with Image.open(picture) as image:
        assert image.width > image.height > 300
    assert picture.stat().st_size < 150_000


def test_a_picture_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    results = run_sweep(TRACE, Sweep(residencies=(0.25,), evictions=("lru",)))
    with pytest.raises(DeviceError, match="the picture cannot be written"):
        draw_hit_rates(results, INFO, tmp_path / "nowhere" / "hits.png")


def test_the_command(file: Path, tmp_path: Path) -> None:
    picture = tmp_path / "hits.png"
    words = ("--residency", "0.25,0.5", "--pool", "per_layer", "--record-mb", 2, "--plot", picture, "--json")
    result = run(file, *words)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.strip().splitlines()[-1])
    assert report["trace"]["model"] == "tiny"
    assert [(row["eviction"], row["residency"]) for row in report["rows"][:3]] == [
        ("lru", 0.25),
        ("lru", 0.5),
        ("lfu", 0.25),
    ]
    assert report["rows"][0]["record_bytes"] == 2_000_000
    assert report["rows"][0]["num_slots"] == 16
    assert picture.is_file()
    assert "of full" in result.stderr


def test_a_trained_predictor_from_its_file(file: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = Mamba2Sizes(d_model=16, state_size=8, head_dim=8)
    models = [GroupModel(GroupShape(2, TRACE.num_experts, TRACE.top_k, sizes=sizes)) for _ in range(2)]
    learned = tmp_path / "predictor.safetensors"
    write_predictor(learned, models, fingerprint=RouterFingerprint.of_trace(TRACE, INFO), notes={})
    policies = ("--eviction", "belady", "--schedule", "jsd", "--predictor", "mamba2", "--residency", "0.25")
    result = run(file, *policies, "--predictor-file", learned, "--json")
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout.strip().splitlines()[-1])["rows"]
    assert (row["predictor"], row["forecasts"]) == ("mamba2", 2 * 135)


def test_foreseen_forecasts_are_the_predictors_own() -> None:
    shape = RouterShape(TRACE.num_layers, TRACE.num_experts, TRACE.top_k)
    sweep = Sweep(residencies=(0.3,), evictions=("belady",), schedules=("jsd",), predictors=("frequency",))
    (asked,) = run_sweep(TRACE, sweep)
    foreseen = Foreseen(make_predictor("frequency", shape), TRACE)
    for _ in range(2):
        (replayed,) = run_sweep(TRACE, sweep, trained={"frequency": foreseen})
        assert replayed.counts == asked.counts


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--residency", "a quarter"), "--residency 'a quarter' holds what is no number"),
        (("--residency", "0.01"), "fewer slots than the 2"),
        (("--eviction", "fifo"), "unknown eviction 'fifo'"),
        (("--pool", "shared"), "unknown pool 'shared'"),
        (("--schedule", "jsd"), "choose a predictor"),
        (("--link-gb-s", "0"), "link_gb_s is 0"),
        (("--predictor", "mamba2"), "--predictor-file go together"),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(file: Path, words: tuple[str, ...], said: str) -> None:
    result = run(file, *words)
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.output


def test_a_file_that_is_no_trace(tmp_path: Path) -> None:
    result = run(tmp_path / "none.safetensors")
    assert result.exit_code == 2
    assert "none.safetensors" in result.stderr
