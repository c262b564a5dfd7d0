"""Engine time beside the counts: which engine serves a point, and that it is timed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hetero_runtime.config import Config, load_config
from hetero_runtime.errors import RequestError
from hetero_runtime.evaluation.frontier import draw_frontier, render_points
from hetero_runtime.evaluation.frontier.base import Point
from hetero_runtime.evaluation.frontier.contenders import Grid
from hetero_runtime.evaluation.frontier.timing import engine_config, time_points
from hetero_runtime.planned import plan_for
from tests.architectures import build_checkpoint
from tests.runtime.calibration.calibrations import write_random_calibration
from tests.runtime.evaluation.test_frontier import point

FAMILIES = ("exact", "exact_a", "cache_prior_2", "psr", "speculative_experts")


def points() -> list[Point]:
    """One of each family."""
    contenders = Grid(families=FAMILIES, bonuses=(0.3,), insertions=(2,), windows=(6,)).contenders()
    return [replace(point("", 0.1, 3.0), contender=contender) for contender in contenders]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A tiny model with a calibration beside it."""
    folder = build_checkpoint("Qwen3Moe", tmp_path / "tiny")
    write_random_calibration(folder)
    return load_config(
        {"model": {"path": str(folder)}, "device": "cpu", "preset": "seqmoe", "execution": {"max_length": 64}}
    )


def test_the_engine_serves_the_policy_with_slabs_that_mirror_its_cache(
    config: Config, tmp_path: Path
) -> None:
    file = str(tmp_path / "tiny.calibration.safetensors")
    served = [engine_config(each, config, file) for each in points()]
    assert served[1] is None  # exact routing beside the A priority
    exact, prior, psr, speculative = (plan_for(each).config for each in served if each is not None)
    assert (exact.routing.policy, exact.eviction.policy) == ("exact", "lru")
    assert (prior.routing.protected, prior.routing.range, prior.routing.bonus) == (2, "running", 0.3)
    assert (psr.routing.insertions, psr.routing.window, psr.routing.priority) == (2, 6, "a")
    assert [each.prefetch.schedule for each in (prior, psr, speculative)] == ["popularity", *["bounded"] * 2]
    for each in (prior, psr, speculative):
        assert (each.routing.capacity, each.memory.slabs, each.memory.pool) == (8, 24, "per_layer")
        assert each.eviction.policy == "logical"


def test_points_are_timed_and_shown(config: Config, tmp_path: Path) -> None:
    from rich.console import Console

    told: list[tuple[int, int]] = []
    row = tuple(range(20, 40))
    file = str(tmp_path / "tiny.calibration.safetensors")
    timed = time_points(points(), config, [row], calibration=file, done=lambda *at: told.append(at))
    assert told[-1] == (5, 5)
    assert [each.engine_ms is None for each in timed] == [False, True, False, False, False]
    assert all(each.engine_ms > 0 for each in timed if each.engine_ms is not None)
    console = Console(width=110, record=True)
    console.print(render_points(timed, entropy=1.0))
    assert " ms" in console.export_text()
    draw_frontier(timed, tmp_path / "timed.png", title="timed")
    draw_frontier(points(), tmp_path / "plain.png", title="timed")
    assert (tmp_path / "timed.png").stat().st_size > (tmp_path / "plain.png").stat().st_size


def test_a_row_that_is_all_prompt_is_refused(config: Config) -> None:
    with pytest.raises(RequestError, match="has 16 tokens, and the first 16 are its prompt"):
        time_points(points(), config, [tuple(range(20, 36))], calibration="auto")


def test_counts_do_not_depend_on_being_timed(config: Config, tmp_path: Path) -> None:
    file = str(tmp_path / "tiny.calibration.safetensors")
    row = tuple(np.arange(20, 38).tolist())
    (timed,) = time_points(points()[:1], config, [row], calibration=file)
    assert replace(timed, engine_ms=None) == points()[0]
