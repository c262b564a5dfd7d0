"""The frontier bench: which windows are read, what its rows say, and a run with little of everything."""

from __future__ import annotations

import lzma
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from bench import psr_frontier
from bench.harness import ResultFile
from bench.models.corpus import SEPARATOR, is_held_out
from bench.psr_frontier import GRID, RESIDENCIES, held_out, rows_of, verdict
from hetero_runtime.evaluation.divergence import Divergence
from hetero_runtime.evaluation.frontier.base import Contender, Point
from hetero_runtime.evaluation.perplexity import Perplexity
from hetero_scheduler.routing import make_routing_policy
from tests import tiny_tokenizer


def point(policy: str, residency: float, *, kl: float, demanded: float, inserted: float = 0.0) -> Point:
    return Point(
        contender=Contender(make_routing_policy(policy), f"{policy}, LRU", 0.2),
        residency=residency,
        capacity=8,
        divergence=Divergence(kl, 0.001, 1.0, 100, 4),
        perplexity=Perplexity(1.0, 0.1, 10, 2),
        inserted=inserted,
        demanded=demanded,
        deviating=0.1,
    )


def both(*, psr_demanded: float) -> list[Point]:
    return [
        each
        for residency in RESIDENCIES.values()
        for each in (
            point("psr", residency, kl=0.1, demanded=psr_demanded, inserted=3.0),
            point("cache_prior", residency, kl=0.05, demanded=5.0),
            point("cache_prior", residency, kl=0.15, demanded=3.0),
        )
    ]


@pytest.mark.parametrize(("demanded", "holds"), [(2.0, 1.0), (4.5, 0.0)])
def test_the_verdict_is_on_demanded_copies(demanded: float, holds: float) -> None:
    rows = {row.id: row for row in verdict(both(psr_demanded=demanded), entropy=0.9)}
    assert (rows["psr.frontier_dominates"].value, rows["psr.frontier_dominates"].is_met) == (
        holds,
        holds == 1,
    )
    assert rows["psr.frontier_demand_lead_25"].value == pytest.approx(4.0 / demanded)
    assert rows["psr.frontier_copies_lead_50"].value == pytest.approx(4.0 / (demanded + 3.0))
    assert "load entropy 0.900" in rows["psr.frontier_dominates"].note


def test_every_point_has_its_four_numbers() -> None:
    rows = {row.id: row.value for row in rows_of(point("psr", 0.25, kl=0.1, demanded=2.0, inserted=3.0))}
    assert rows == {
        "frontier.psr_lru_0_2.r25.kl": 0.1,
        "frontier.psr_lru_0_2.r25.copies": 5.0,
        "frontier.psr_lru_0_2.r25.demand_copies": 2.0,
        "frontier.psr_lru_0_2.r25.perplexity": pytest.approx(2.71828, abs=1e-5),
    }


def test_names_of_the_grid_stay_apart() -> None:
    names = [
        row.id
        for contender in GRID.contenders()
        for row in rows_of(replace(point("psr", 0.5, kl=0.1, demanded=1.0), contender=contender))
    ]
    assert len(set(names)) == len(names)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Two small sources of numbered documents."""
    for name in ("P.story.one", "P.math.two"):
        documents = [f"{name} tells of the number {i}, and of no other." for i in range(300)]
        (tmp_path / f"{name}.txt.xz").write_bytes(lzma.compress(SEPARATOR.join(documents).encode()))
    return tmp_path


def test_held_out_windows_take_turns_between_sources(corpus: Path, tmp_path: Path) -> None:
    tiny_tokenizer.save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    texts = [tokenizer.decode(row) for row in held_out(corpus, tokenizer, 4)]
    assert [text[:11] for text in texts] == ["P.math.two ", "P.story.one"] * 2
    assert all(is_held_out(text) for text in texts)
    assert len(held_out(corpus, tokenizer, 1)) == 1


def test_a_small_run_writes_table_rows_and_picture(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"LENGTH": 24, "NUM_SAMPLES": 2, "NUM_HELD_OUT": 2}
    for name, value in small.items():
        monkeypatch.setattr(psr_frontier, name, value)
    monkeypatch.setattr(psr_frontier, "GRID", replace(GRID, bonuses=(0.0, 0.4), insertions=(1,)))
    monkeypatch.setattr(psr_frontier, "RESULTS", tmp_path)
    write = ResultFile.write
    monkeypatch.setattr(ResultFile, "write", lambda bench, rows: write(bench, rows, folder=tmp_path))
    psr_frontier.main(corpus)
    rows = {row.id: row for row in ResultFile.read(tmp_path / "psr_frontier.json").rows}
    assert rows["frontier.psr_n_1_w_2_0.r25.kl"].value == 0.0
    assert rows["frontier.cache_prior_lru_0_4.r25.kl"].value != 0.0
    assert rows["psr.frontier_dominates"].value in (0.0, 1.0)
    assert (tmp_path / "psr_frontier.png").exists()
