"""Frontiers of a tiny model; which of two lies below; tables, pictures and the command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from hetero_runtime.assembly import assemble
from hetero_runtime.calibration import write_calibration
from hetero_runtime.cli import app
from hetero_runtime.config import load_config
from hetero_runtime.engine import Engine
from hetero_runtime.errors import ConfigError, DeviceError
from hetero_runtime.evaluation import Perplexity
from hetero_runtime.evaluation.configuration import for_evaluation
from hetero_runtime.evaluation.divergence import Divergence
from hetero_runtime.evaluation.frontier import Texts, draw_frontier, render_points, run_frontier, to_json
from hetero_runtime.evaluation.frontier.base import Contender, Point
from hetero_runtime.evaluation.frontier.contenders import FAMILIES, Grid
from hetero_runtime.evaluation.frontier.dominance import advantage, frontier
from hetero_runtime.evaluation.frontier.report import load_entropy
from hetero_runtime.evaluation.samples import draw
from hetero_runtime.plan import read_geometry
from hetero_runtime.planned import plan_for
from hetero_runtime.prediction import RouterFingerprint
from hetero_scheduler.routing import Calibration, Shape, TokenPrior, make_routing_policy, uncalibrated
from tests.architectures import build_checkpoint

SHAPE = Shape(num_layers=3, num_experts=16, top_k=4)


def point(family: str, kl: float, copies: float, *, demanded: float | None = None) -> Point:
    return Point(
        contender=Contender(make_routing_policy("cache_prior"), family, 0.2),
        residency=0.5,
        capacity=8,
        divergence=Divergence(kl, 0.0, 1.0, 100, 4),
        perplexity=None,
        inserted=copies if demanded is None else copies - demanded,
        demanded=0.0 if demanded is None else demanded,
        deviating=0.1,
    )


def calibration(seed: int = 0) -> Calibration:
    """Of no text: some experts are used more than others."""
    uses = np.random.default_rng(seed).integers(1, 100, (3, 16)).astype(np.float64)
    plain = uncalibrated(SHAPE)
    return Calibration(plain.score_range, uses, plain.prior)


def copies_of(each: Point) -> float:
    return each.copies


def test_a_frontier_keeps_what_no_other_point_beats() -> None:
    points = [point("a", 0.2, 3.0), point("a", 0.1, 5.0), point("a", 0.15, 6.0), point("a", 0.3, 3.0)]
    nats, copies = frontier(points, copies_of)
    assert (nats.tolist(), copies.tolist()) == ([0.1, 0.2], [5.0, 3.0])


def test_the_advantage_is_the_least_where_both_are() -> None:
    ours = frontier([point("a", 0.1, 4.0), point("a", 0.3, 2.0)], copies_of)
    theirs = frontier([point("b", 0.0, 20.0), point("b", 0.2, 6.0), point("b", 0.4, 3.0)], copies_of)
    least, mean = advantage(ours, theirs) or (0.0, 0.0)
    # at 0.1: 13 / 4; at 0.2: 6 / 3; at 0.3: 4.5 / 2
    assert least == pytest.approx(2.0)
    assert mean == pytest.approx((13 / 4 + 2 + 4.5 / 2) / 3)
    back, _ = advantage(theirs, ours) or (0.0, 0.0)
    assert back == pytest.approx(4 / 13)


def test_frontiers_that_share_no_divergence_are_not_compared() -> None:
    ours, theirs = ([point("a", kl, 1.0)] for kl in (0.1, 0.5))
    assert advantage(frontier(ours, copies_of), frontier(theirs, copies_of)) is None


def test_a_grid_takes_the_product_of_what_a_family_has() -> None:
    grid = Grid(families=FAMILIES, bonuses=(0.1, 0.2), insertions=(1, 2), windows=(4,))
    names = [contender.name for contender in grid.contenders()]
    assert len(names) == len(set(names)) == 2 + 3 * 2 + 2 * 2 + 2
    assert {"exact, LRU", "exact, A", "cache-prior, A, 0.1", "psr n=2 w=4, 0.2"} < set(names)
    kept = [c.policy.rules.protected for c in grid.contenders() if "best 2" in c.family]
    assert kept == [2, 2]


@pytest.mark.parametrize(
    ("grid", "said"),
    [(Grid(families=("lru",)), "unknown policy lru; known: exact"), (Grid(bonuses=(-1.0,)), "bonus is -1.0")],
)
def test_what_is_no_policy_is_refused(grid: Grid, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        grid.contenders()


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory) -> list[Point]:
    """Of a tiny model at two residencies."""
    tree = {
        "model": {"path": str(build_checkpoint("Qwen3Moe", tmp_path_factory.mktemp("model")))},
        "device": "cpu",
        "execution": {"max_length": 64},
    }
    parts = assemble(plan_for(for_evaluation(load_config(tree))).config)
    samples = draw(Engine(parts), [(1,)] * 4, num_tokens=12)
    held_out = (tuple(range(20, 40)), tuple(range(60, 67)))
    contenders = Grid(bonuses=(0.1, 0.8), insertions=(1,)).contenders()
    told: list[tuple[int, int]] = []
    try:
        found = run_frontier(
            parts,
            contenders,
            [0.5, 0.25],
            texts=Texts(samples, held_out),
            calibration=calibration(),
            done=lambda *at: told.append(at),
        )
        parts.orchestrator.check()
    finally:
        parts.close()
    assert told == [(i + 1, 12) for i in range(12)]
    return found


def test_exact_routing_diverges_nowhere_and_issues_nothing_ahead(points: list[Point]) -> None:
    exact = [each for each in points if each.contender.policy.is_exact]
    assert [each.divergence.nats for each in exact] == [0.0] * 4
    assert [each.inserted for each in exact] == [0.0] * 4
    assert all(each.deviating == 0 for each in exact)
    assert len({each.perplexity for each in exact}) == 1


def test_a_bonus_trades_copies_for_divergence(points: list[Point]) -> None:
    for residency in (0.5, 0.25):
        exact, _, little, much = [
            each for each in points if each.residency == residency and each.contender.policy.name != "psr"
        ]
        assert exact.demanded > little.demanded > much.demanded
        assert 0 < little.deviating < much.deviating
        assert little.divergence.nats != 0.0 < much.divergence.nats


def test_psr_issues_copies_ahead_in_place_of_demanded_ones(points: list[Point]) -> None:
    by_name = {(each.contender.name, each.residency): each for each in points}
    psr, prior = by_name["psr n=1 w=2, 0.1", 0.25], by_name["cache-prior, LRU, 0.1", 0.25]
    assert 0 < psr.inserted <= SHAPE.num_layers - 1
    assert psr.demanded < prior.demanded
    assert psr.copies == psr.inserted + psr.demanded


def test_a_table_for_each_residency_and_flat_rows(points: list[Point]) -> None:
    from rich.console import Console

    entropy = load_entropy(calibration())
    console = Console(width=100, record=True)
    console.print(render_points(points, entropy=entropy))
    text = console.export_text()
    for part in ("50% resident (8 experts", "25% resident (4 experts", "psr n=1 w=2, 0.1", "perplexity"):
        assert part in text
    assert f"load entropy {entropy:.3f}" in text
    report = to_json(points, entropy=entropy)
    assert json.loads(json.dumps(report))["points"][0]["name"] == "exact, LRU"
    assert report["load_entropy"] == entropy < 1


def test_held_out_text_is_left_out_of_the_table_where_there_was_none() -> None:
    from rich.console import Console

    console = Console(width=100, record=True)
    console.print(render_points([point("a", 0.1, 3.0)], entropy=1.0))
    assert "perplexity" not in console.export_text()


def test_a_picture_is_drawn(points: list[Point], tmp_path: Path) -> None:
    draw_frontier(points, tmp_path / "frontier.png", title="a tiny model")
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(DeviceError, match="cannot be written"):
        draw_frontier(points, tmp_path / "nowhere" / "frontier.png", title="")


def test_perplexity_is_of_held_out_text(points: list[Point]) -> None:
    assert all(isinstance(each.perplexity, Perplexity) for each in points)
    assert {each.perplexity.num_tokens for each in points if each.perplexity} == {25}


def run(*words: object) -> Result:
    cpu = ("--set", "device=cpu", "--set", "execution.max_length=64")
    return CliRunner().invoke(app, ["eval", "frontier", *map(str, words), *cpu])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny model with a calibration beside it."""
    folder = build_checkpoint("Qwen3Moe", tmp_path / "tiny")
    write_calibration(
        tmp_path / "tiny.calibration.safetensors",
        Calibration(
            np.ones(3), np.ones((3, 16)), TokenPrior(np.empty(0, np.int64), np.zeros((1, 3, 16), np.uint8))
        ),
        fingerprint=RouterFingerprint.of_model(read_geometry(folder)),
        notes={},
    )
    return folder


def test_the_command_sweeps_and_draws(model: Path, tmp_path: Path) -> None:
    plot, text = tmp_path / "frontier.png", tmp_path / "text.txt"
    text.write_text("It is good to share.")
    sweep = ("--bonus", "0.1,0.4", "--insertions", 1, "--policies", "exact,psr")
    texts = ("--length", 20, "--windows", 2, "--text", text)
    result = run(model, *sweep, *texts, "--timed", 2, "--plot", plot, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.strip().splitlines()[-1])
    assert [each["name"] for each in report["points"][:3]] == [
        "exact, LRU",
        "psr n=1 w=2, 0.1",
        "psr n=1 w=2, 0.4",
    ]
    assert [each["residency"] for each in report["points"]] == [0.5] * 3 + [0.25] * 3
    assert "25% resident" in result.stderr
    assert plot.exists()
    assert all(each["engine_ms"] > 0 for each in report["points"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--residency", "0.1"), "residency 0.1 is 2 of a layer's 16 experts"),
        (("--bonus", "much"), "--bonus 'much' holds what is no number"),
        (("--insertions", "1.5"), "--insertions '1.5' holds what is no whole number"),
        (("--policies", "lru"), "unknown policy lru"),
        (("--calibration", "/nowhere"), "/nowhere does not exist"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words: tuple[str, ...], said: str, model: Path) -> None:
    result = run(model, "--length", 8, "--windows", 1, *words)
    assert (result.exit_code, result.stderr.startswith("error: "), said in result.stderr) == (2, True, True)
