"""One loaded model, one policy after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hetero_runtime.assembly import Parts
from hetero_runtime.evaluation.base import TokenIds
from hetero_runtime.evaluation.divergence import Divergence
from hetero_runtime.evaluation.frontier.base import Contender, Point, capacity_of
from hetero_runtime.evaluation.harness import Harness
from hetero_runtime.evaluation.perplexity import Perplexity
from hetero_runtime.evaluation.samples import Sample
from hetero_runtime.hf.router_choice import RouterScores, let_choose
from hetero_runtime.hf.router_hooks import router_top_k
from hetero_runtime.routing import Routing
from hetero_scheduler.routing import Calibration, Shape

PointsDone = Callable[[int, int], None]
"""Called with (points done, points in all)."""


@dataclass(frozen=True)
class Texts:
    """What every contender reads."""

    samples: tuple[Sample, ...]
    """Written by the exact model; divergence and copies are of these."""
    held_out: tuple[TokenIds, ...] = ()
    """Rows for perplexity; none: it is left out."""
    rows_at_once: int = 16
    """Of a pass."""


def run_frontier(
    parts: Parts,
    contenders: Sequence[Contender],
    residencies: Sequence[float],
    *,
    texts: Texts,
    calibration: Calibration,
    done: PointsDone | None = None,
) -> list[Point]:
    """Points of all `contenders` at all `residencies` (shares of a layer's experts), residency by residency.

    `parts`: of the exact model; its routers ask the contenders from then on. Raises ConfigError for a
    residency below top-k or above 1, and what scoring raises.
    """
    runner = _Runner(parts, texts, calibration)
    capacities = [capacity_of(residency, runner.shape) for residency in residencies]
    points: list[Point] = []
    for residency, capacity in zip(residencies, capacities, strict=True):
        for contender in contenders:
            points.append(runner.point(contender, residency, capacity))
            if done is not None:
                done(len(points), len(contenders) * len(residencies))
    return points


class _Runner:
    def __init__(self, parts: Parts, texts: Texts, calibration: Calibration) -> None:
        self._parts, self._texts, self._calibration = parts, texts, calibration
        num_layers, num_experts = calibration.uses.shape
        self.shape = Shape(num_layers, num_experts, router_top_k(parts.model))
        self._exact = Harness(parts, rows_at_once=texts.rows_at_once).score(
            [sample.ids for sample in texts.samples]
        )
        self._routing: Routing | None = None
        let_choose(parts.model, self._choose, looks_ahead=True)

    def point(self, contender: Contender, residency: float, capacity: int) -> Point:
        samples = self._texts.samples
        self._routing = routing = Routing(
            contender.policy, self.shape, capacity=capacity, calibration=self._calibration
        )
        harness = Harness(self._parts, rows_at_once=self._texts.rows_at_once, routing=routing)
        scores = harness.score([sample.ids for sample in samples])
        counted, num_tokens = routing.stats(), sum(len(sample.ids) for sample in samples)
        held_out = harness.score(self._texts.held_out) if self._texts.held_out else []
        return Point(
            contender=contender,
            residency=residency,
            capacity=capacity,
            divergence=Divergence.of(samples, self._exact, scores),
            perplexity=Perplexity.of(held_out) if held_out else None,
            inserted=counted.inserted / num_tokens,
            demanded=counted.demanded / num_tokens,
            deviating=counted.deviating / (num_tokens * self.shape.num_layers * self.shape.top_k),
        )

    def _choose(self, layer: int, said: RouterScores, guess: torch.Tensor | None) -> torch.Tensor:
        assert self._routing is not None, "the model runs before a policy is chosen"
        return self._routing.choose(layer, said, guess)
