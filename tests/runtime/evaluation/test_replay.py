"""Copies on a trace: the policies' own decisions, document by document."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from hetero_runtime.cli import app
from hetero_runtime.errors import ConfigError
from hetero_runtime.evaluation.frontier.base import Point
from hetero_runtime.evaluation.frontier.contenders import Grid
from hetero_runtime.evaluation.frontier.replay import divide, replay
from hetero_runtime.trace import write_trace
from hetero_scheduler.simulator import Scenario, simulate
from hetero_scheduler.trace import Trace
from tests.runtime.trace.info import INFO


def made_up(num_documents: int = 10, length: int = 30, *, seed: int = 0) -> Trace:
    """Routing with some persistence: 2 layers, 12 experts, top-3."""
    random = np.random.default_rng(seed)
    steps = random.normal(size=(num_documents * length, 2, 12))
    logits = np.zeros_like(steps)
    for t in range(len(steps)):
        logits[t] = 0.8 * logits[t - 1] + steps[t] if t % length else steps[t]
    half = logits.astype(np.float16)
    topk = np.argsort(-half.astype(np.float32), axis=-1, kind="stable")[..., :3]
    tokens = random.integers(0, 50, len(steps)).astype(np.int32)
    return Trace(half, topk, tokens, np.arange(num_documents + 1) * length)


def points_of(trace: Trace, *families: str) -> dict[tuple[str, float], Point]:
    contenders = Grid(families=families, bonuses=(0.0, 0.3), insertions=(1,)).contenders()
    points = replay(divide(trace, 0.3), contenders, [0.5, 0.25])
    return {(point.contender.name, point.residency): point for point in points}


def test_exact_routing_copies_what_lru_misses() -> None:
    """The warm set apart, which the simulator's cache begins without."""
    halves = divide(made_up(num_documents=2, length=400), 0.3)
    points = replay(halves, Grid(families=("exact",)).contenders(), [0.5])
    result = simulate(
        halves.replayed, Scenario(residency=0.5, eviction="lru", pool="per_layer", uncounted=0.0)
    )
    misses = result.counts.misses / halves.replayed.num_tokens
    assert abs(points[0].demanded - misses) <= 2 * 2 * 6 / 400
    assert points[0].demanded > 0.5


def test_a_bonus_saves_copies_and_psr_moves_them_ahead() -> None:
    found = points_of(made_up(), "exact", "cache_prior", "psr")
    for residency in (0.5, 0.25):
        exact, prior = found["exact, LRU", residency], found["cache-prior, LRU, 0.3", residency]
        psr = found["psr n=1 w=2, 0.3", residency]
        assert found["cache-prior, LRU, 0", residency].demanded == exact.demanded
        assert prior.demanded < exact.demanded
        assert psr.demanded < prior.demanded
        assert 0 < psr.inserted <= 1  # nothing foresees the first of the two layers
        assert exact.deviating == 0 < prior.deviating


def test_documents_are_requests_of_their_own() -> None:
    trace = made_up(num_documents=4)
    halves = divide(trace, 0.25)
    contenders = Grid(families=("cache_prior",), bonuses=(0.2,)).contenders()
    whole = replay(halves, contenders, [0.5])[0].demanded * halves.replayed.num_tokens
    last = halves.replayed.bounds[-2]
    rest = Trace(
        halves.replayed.logits[:last],
        halves.replayed.topk[:last],
        halves.replayed.tokens[:last],
        halves.replayed.bounds[:-1],
    )
    alone = Trace(
        halves.replayed.logits[last:],
        halves.replayed.topk[last:],
        halves.replayed.tokens[last:],
        halves.replayed.bounds[-2:] - last,
    )
    parts = [replay(halves._replace(replayed=each), contenders, [0.5])[0] for each in (rest, alone)]
    counted = [point.demanded * each.num_tokens for point, each in zip(parts, (rest, alone), strict=True)]
    assert whole == pytest.approx(sum(counted))


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_both_parts_need_documents(share: float) -> None:
    with pytest.raises(ConfigError, match="leaves nothing to calibrate on, or nothing to replay"):
        divide(made_up(), share)


def test_routers_that_chose_by_other_than_logits_are_refused() -> None:
    trace = made_up()
    other = Trace(trace.logits, (trace.topk + 1) % 12, trace.tokens, trace.bounds)
    with pytest.raises(ConfigError, match="chooses by groups or biases"):
        divide(other, 0.3)


def test_the_command(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.safetensors", made_up(), INFO)
    words = ["eval", "copies", str(tmp_path / "trace.safetensors"), "--policies", "exact,psr", "--json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.strip().splitlines()[-1])
    assert [point["name"] for point in report["points"][:2]] == ["exact, LRU", "psr n=1 w=2, 0.1"]
    assert report["points"][0]["divergence"] is None
    assert "KL" not in result.stderr
    assert "load entropy" in result.stderr
    refused = CliRunner().invoke(app, [*words, "--residency", "0.1"])
    assert (refused.exit_code, "residency 0.1 is 1 of a layer's 12" in refused.stderr) == (2, True)
