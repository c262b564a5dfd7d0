"""Divergence against copies on the bundled model: prefetch-steered routing beside Cache-Prior (PSR Fig. 1).

    python -m bench.psr_frontier CORPUS

CORPUS holds the sources that the model was trained on; perplexity is of their held-out split. Divergence and
copies are of text that the exact model writes. Policies read the calibration that comes with the model. All
of it are counts and likelihoods, the same on an idle and on a busy machine. A policy's copies are those of an
engine that mirrors its logical cache, all layers together: demanded ones are waited for in full, the others
are issued a layer earlier.

No `DEVICE`: it needs the corpus, so `python -m bench` does not run it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.harness import RESULTS, ResultFile, Row
from bench.models.corpus import is_held_out, read_sources
from hetero_runtime.assembly import Parts, assemble
from hetero_runtime.beside_model import beside
from hetero_runtime.bundled import model_path
from hetero_runtime.calibration import CALIBRATION_SUFFIX, read_calibration
from hetero_runtime.config import load_config
from hetero_runtime.engine import Engine
from hetero_runtime.evaluation import TokenIds
from hetero_runtime.evaluation.configuration import for_evaluation
from hetero_runtime.evaluation.frontier import Texts, draw_frontier, render_points, run_frontier
from hetero_runtime.evaluation.frontier.base import Point
from hetero_runtime.evaluation.frontier.contenders import Grid
from hetero_runtime.evaluation.frontier.dominance import Measure, advantage, frontier
from hetero_runtime.evaluation.frontier.report import load_entropy
from hetero_runtime.evaluation.samples import draw
from hetero_runtime.evaluation.tasks.spans import begin_token
from hetero_runtime.evaluation.texts import cut_rows, spread, tokenise
from hetero_runtime.planned import plan_for

RESIDENCIES = {50: 0.5, 25: 0.25}
GRID = Grid(
    families=("exact_a", "cache_prior", "cache_prior_2", "psr"),  # without bonus, cache_prior is exact
    bonuses=(0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4),
    insertions=(1, 2),
    windows=(2,),
)
LENGTH = 256
NUM_SAMPLES, NUM_HELD_OUT = 12, 12
"""Windows of `LENGTH` tokens."""


def main(corpus: Path) -> None:
    """Sweep, write the result file and draw the picture."""
    calibration = read_calibration(beside(model_path(), CALIBRATION_SUFFIX)).calibration
    with loaded() as parts:
        start = (begin_token(parts.tokenizer),)
        texts = Texts(
            draw(Engine(parts), [start] * NUM_SAMPLES, num_tokens=LENGTH),
            tuple(held_out(corpus, parts.tokenizer, NUM_HELD_OUT)),
        )
        points = run_frontier(
            parts, GRID.contenders(), tuple(RESIDENCIES.values()), texts=texts, calibration=calibration
        )
    entropy = load_entropy(calibration)
    Console(width=110).print(render_points(points, entropy=entropy))
    ResultFile.write("psr_frontier", [*verdict(points, entropy), *(r for p in points for r in rows_of(p))])
    title = (
        f"bundled model, {points[0].divergence.num_tokens:,} tokens of its own text, entropy {entropy:.3f}"
    )
    draw_frontier(points, RESULTS / "psr_frontier.png", title=title)


@contextmanager
def loaded() -> Iterator[Parts]:
    """The bundled model, exact, all experts resident: what is resident changes nothing here."""
    config = load_config({"device": "cpu", "memory": {"residency": 1.0}, "execution": {"max_length": 1024}})
    parts = assemble(plan_for(for_evaluation(config)).config)
    try:
        yield parts
    finally:
        parts.close()


def held_out(corpus: Path, tokenizer: Any, count: int) -> list[TokenIds]:
    """`count` windows of the held-out split, each of another source as long as there are any."""
    by_source = []
    for source in read_sources(corpus):
        texts = [document for document in source.documents() if is_held_out(document)]
        if texts:
            by_source.append(cut_rows(tokenise(texts, tokenizer), LENGTH))
    in_turns = [row for rows in zip_longest(*by_source) for row in rows if row is not None]
    return spread(in_turns[: max(count, len(by_source))], count)


def verdict(points: Sequence[Point], entropy: float) -> list[Row]:
    """Whether PSR needs fewer demanded copies than Cache-Prior at every divergence that both reach; and by
    how much, of those and of all copies."""
    rows, leasts = [], []
    for percent, residency in RESIDENCIES.items():
        at = [point for point in points if point.residency == residency]
        least, mean = lead(at, lambda point: point.demanded)
        leasts.append(least)
        rows.append(
            Row(id=f"psr.frontier_demand_lead_{percent}", value=mean, unit="ratio", note=f"least {least:.2f}")
        )
        least, mean = lead(at, lambda point: point.copies)
        note = f"least {least:.2f}; below 1, PSR makes more copies in all"
        rows.append(Row(id=f"psr.frontier_copies_lead_{percent}", value=mean, unit="ratio", note=note))
    note = (
        "fewer demanded copies a token than Cache-Prior (J=0 with a fixed range, J=2 with a running one) at "
        f"every KL that both reach, 50 and 25 % resident; load entropy {entropy:.3f}, "
        f"{points[0].divergence.num_tokens} tokens of the model's own text"
    )
    holds = float(min(leasts) > 1)
    return [Row(id="psr.frontier_dominates", value=holds, unit="bool", target="==1", note=note), *rows]


def lead(points: Sequence[Point], measure_of: Measure) -> tuple[float, float]:
    """Cache-Prior's copies over PSR's at equal divergence: the least, the mean."""
    psr = [point for point in points if point.contender.policy.name == "psr"]
    prior = [point for point in points if point.contender.policy.name == "cache_prior"]
    found = advantage(frontier(psr, measure_of), frontier(prior, measure_of))
    assert found is not None, "the sweeps of both reach no common divergence; widen the grid"
    return found


def rows_of(point: Point) -> list[Row]:
    """Divergence, perplexity and copies of one point: `frontier.psr_n_1_w_4_0_2.r50.kl`."""
    name = re.sub(r"[^a-z0-9]+", "_", point.contender.name.lower())
    prefix = f"frontier.{name}.r{round(100 * point.residency)}"
    uncertainty = f"standard error {point.divergence.standard_error:.5f}"
    rows = [
        Row(id=f"{prefix}.kl", value=point.kl, unit="nats/token", note=uncertainty),
        Row(id=f"{prefix}.copies", value=point.copies, unit="1/token"),
        Row(id=f"{prefix}.demand_copies", value=point.demanded, unit="1/token"),
    ]
    if point.perplexity is not None:
        value = point.perplexity.perplexity
        rows.append(Row(id=f"{prefix}.perplexity", value=value, unit="ratio", note="held-out text"))
    return rows


if __name__ == "__main__":
    main(Path(sys.argv[1]))
